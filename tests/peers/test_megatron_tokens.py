"""Token files beside Megatron-LM's own reader and writer.

Run by hand where megatron-core is installed (``pip install --no-deps megatron-core`` is enough).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.prepare import Request, prepare
from hpctrain.data.tokens import Tokens, dtype_for, write

theirs = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed", exc_type=ImportError
)

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "uint16"]
SEQUENCE = st.lists(st.integers(0, 127), min_size=1, max_size=9)
DOCUMENTS = st.lists(st.lists(SEQUENCE, min_size=1, max_size=3), min_size=1)


def their_documents(prefix: str) -> list[list[int]]:
    """What Megatron reads, sequences joined to documents."""
    found = theirs.IndexedDataset(prefix)
    borders = found.document_indices
    assert found.index.sequence_count == borders[-1]
    return [
        [int(token) for sequence in range(a, b) for token in found[sequence]]
        for a, b in zip(borders, borders[1:], strict=False)
    ]


def their_files(prefix: str, documents: list[list[list[int]]], dtype: str) -> None:
    """Documents of several sequences, written by Megatron."""
    builder = theirs.IndexedDatasetBuilder(prefix + ".bin", dtype=np.dtype(dtype).type)
    for document in documents:
        joined = torch.tensor([token for sequence in document for token in sequence])
        builder.add_document(joined, [len(sequence) for sequence in document])
    builder.finalize(prefix + ".idx")


@settings(max_examples=30)
@given(documents=DOCUMENTS, dtype=st.sampled_from(DTYPES))
def test_megatron_reads_what_is_written_here(tmp_path_factory, documents, dtype):
    prefix = str(tmp_path_factory.mktemp("ours") / "pair")
    flat = [sum(document, []) for document in documents]
    write(prefix, flat, dtype)
    assert their_documents(prefix) == flat


@settings(max_examples=30)
@given(documents=DOCUMENTS, dtype=st.sampled_from(DTYPES))
def test_what_megatron_writes_is_read_here(tmp_path_factory, documents, dtype):
    prefix = str(tmp_path_factory.mktemp("theirs") / "pair")
    their_files(prefix, documents, dtype)
    tokens = Tokens(prefix)
    flat = [sum(document, []) for document in documents]
    assert tokens.dtype == np.dtype(dtype)
    assert [tokens.document(i).tolist() for i in range(tokens.documents)] == flat


@settings(max_examples=30)
@given(documents=DOCUMENTS, dtype=st.sampled_from(DTYPES))
def test_the_same_documents_give_the_same_bytes(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("both")
    flat = [sum(document, []) for document in documents]
    write(folder / "ours", flat, dtype)
    their_files(str(folder / "theirs"), [[document] for document in flat], dtype)
    for suffix in (".bin", ".idx"):
        assert (folder / f"ours{suffix}").read_bytes() == (folder / f"theirs{suffix}").read_bytes()


def test_megatron_reads_what_is_prepared_here(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    prepare(Request((str(tmp_path / "x.jsonl"),)), tmp_path / "pair")
    assert their_documents(str(tmp_path / "pair")) == [[97, 98, 256], [99, 256]]


@pytest.mark.parametrize("vocabulary", [1, 257, 65499, 65500, 65536, 10**6])
def test_a_vocabulary_takes_the_same_dtype(vocabulary):
    assert dtype_for(vocabulary) == theirs.DType.optimal_dtype(vocabulary)
