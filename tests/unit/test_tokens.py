"""Tokens: the file pair, written, read, and found damaged."""

from __future__ import annotations

import json
import os
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.tokens import Description, Tokens, describe, dtype_for, fill_index, lay_index, write
from hpctrain.errors import DataError

DTYPES = ["uint8", "int8", "int16", "int32", "int64", "uint16"]
DOCUMENTS = st.lists(st.lists(st.integers(0, 127), max_size=12), max_size=12)


@pytest.fixture
def prefix(tmp_path):
    """A pair of three documents of 3, 0 and 2 tokens."""
    write(tmp_path / "pair", [[1, 2, 3], [], [4, 5]], "uint16")
    return str(tmp_path / "pair")


def patch(path: str, at: int, raw: bytes) -> None:
    """Overwrite bytes of a file."""
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(raw)


@given(DOCUMENTS, st.sampled_from(DTYPES))
def test_what_is_written_is_read(tmp_path_factory, documents, dtype):
    prefix = tmp_path_factory.mktemp("tokens") / "pair"
    write(prefix, documents, dtype)
    tokens = Tokens(prefix)
    assert tokens.dtype == np.dtype(dtype)
    assert [tokens.document(i).tolist() for i in range(tokens.documents)] == documents
    assert tokens.read(0, tokens.total).tolist() == sum(documents, [])
    assert np.diff(tokens.borders(0, tokens.documents)).tolist() == [len(document) for document in documents]


def test_the_index_has_the_bytes_of_the_format(prefix):
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    tables = struct.pack("<3i", 3, 0, 2) + struct.pack("<3q", 0, 6, 6) + struct.pack("<4q", 0, 1, 2, 3)
    with open(prefix + ".idx", "rb") as index, open(prefix + ".bin", "rb") as data:
        assert index.read() == header + tables
        assert data.read() == struct.pack("<5H", 1, 2, 3, 4, 5)


def test_a_document_may_be_several_sequences_and_carry_modes(tmp_path):
    """As Megatron-LM writes them when it splits sentences, and for multimodal data."""
    prefix = str(tmp_path / "sentences")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 1, 4, 3)
    tables = struct.pack("<4i", 1, 2, 0, 3) + struct.pack("<4q", 0, 1, 3, 3) + struct.pack("<3q", 0, 2, 4)
    (tmp_path / "sentences.idx").write_bytes(header + tables + bytes(4))
    (tmp_path / "sentences.bin").write_bytes(bytes([1, 2, 3, 4, 5, 6]))
    tokens = Tokens(prefix)
    assert [tokens.document(i).tolist() for i in range(tokens.documents)] == [[1, 2, 3], [4, 5, 6]]


def test_parts_of_an_index_may_be_written_in_any_order(tmp_path):
    write(tmp_path / "whole", [[0] * n for n in (4, 1, 7, 2)], "uint16")
    path = str(tmp_path / "parts.idx")
    lay_index(path, np.dtype("uint16"), 4)
    fill_index(path, np.array([7, 2]), 2, 5)
    fill_index(path, np.array([], np.int64), 2, 5)
    fill_index(path, np.array([4, 1]), 0, 0)
    assert (tmp_path / "parts.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


@pytest.mark.parametrize("name", ["pair", "pair.bin", "pair.idx"])
def test_the_prefix_may_be_given_with_either_ending(prefix, name):
    assert Tokens(os.path.join(os.path.dirname(prefix), name)).documents == 3


def test_a_vocabulary_takes_the_dtype_that_megatron_takes():
    assert [str(dtype_for(n)) for n in (257, 65499, 65500, 200000)] == ["uint16", "uint16", "int32", "int32"]


def test_tokens_are_not_written_through_a_reader(prefix):
    with pytest.raises(ValueError):
        Tokens(prefix).read(0, 2)[0] = 9


def test_files_get_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "pair", [[1]], "uint16")
    finally:
        os.umask(before)
    assert {os.stat(tmp_path / name).st_mode & 0o777 for name in ("pair.bin", "pair.idx")} == {0o640}


def test_a_writer_that_fails_leaves_the_pair_before_as_it_was(prefix):
    with pytest.raises(ValueError):
        write(prefix, [[1], ["no token"]], "uint16")
    assert Tokens(prefix).document(0).tolist() == [1, 2, 3]


def test_a_pair_that_is_half_replaced_does_not_pass_for_one(prefix, monkeypatch):
    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        write(prefix, [[9, 9, 9], [9, 9]], "uint16")
    with pytest.raises(DataError, match="pair.idx cannot be read"):
        Tokens(prefix)


DAMAGES = {
    "no index": (lambda p: os.unlink(p + ".idx"), r"pair.idx cannot be read\n.*No such file.*\n.*PREFIX"),
    "no data": (lambda p: os.unlink(p + ".bin"), r"pair.bin cannot be read\n.*No such file"),
    "foreign": (lambda p: patch(p + ".idx", 0, b"GIF89a"), r"is not a token index\n.*begins with b'GIF89a"),
    "empty": (lambda p: os.truncate(p + ".idx", 0), r"is not a token index\n.*begins with b''"),
    "half a header": (lambda p: os.truncate(p + ".idx", 20), r"cut short\n.*within its header, after 20 bytes"),
    "half a table": (lambda p: os.truncate(p + ".idx", 60), r"cut short or.*\n.*need 102 bytes, and it has 60"),
    "version": (lambda p: patch(p + ".idx", 9, b"\x02"), r"has version 2\n.*only version 1"),
    "floats": (lambda p: patch(p + ".idx", 17, b"\x07"), r"holds no tokens: dtype code 7\n.*1 uint8, 2 int8"),
    "unknown dtype": (lambda p: patch(p + ".idx", 17, b"\x63"), r"holds no tokens: dtype code 99\n"),
    "pointer": (lambda p: patch(p + ".idx", 34 + 12 + 8, b"\x07"), r"damaged at sequence 1\n"),
    "negative size": (lambda p: patch(p + ".idx", 34 + 4, b"\xff\xff\xff\xff"), r"damaged at sequence 1\n"),
    "border": (lambda p: patch(p + ".idx", 34 + 36 + 8, b"\x03"), r"damaged in its documents\n"),
    "last border": (lambda p: patch(p + ".idx", 34 + 36 + 24, b"\x02"), r"damaged in its documents\n"),
    "short data": (lambda p: os.truncate(p + ".bin", 8), r"has 8 bytes and.*\n.*5 tokens of uint16, which are 10"),
    "long data": (lambda p: os.truncate(p + ".bin", 12), r"has 12 bytes and does not belong to its index"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_pair_is_refused_and_its_fault_named(prefix, damage):
    act, message = DAMAGES[damage]
    act(prefix)
    with pytest.raises(DataError, match=message):
        Tokens(prefix)


def test_a_description_is_read_as_it_was_written(tmp_path):
    made = Description(257, 256, "bytes", 3, 1000, 2, 1002, 1, 0, "abc")
    (tmp_path / "pair.json").write_text(made.text())
    assert describe(tmp_path / "pair") == describe(tmp_path / "pair.bin") == made


def test_a_pair_without_description_has_none(prefix):
    assert describe(prefix) is None


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"vocabulary": 3})])
def test_a_description_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "pair.json").write_text(text)
    with pytest.raises(DataError, match="pair.json does not describe a token file\n.*\n.*remove it, or make the pair"):
        describe(tmp_path / "pair")
