"""Prepare: text to a token file pair, on one rank. (tests/mpi has the same on several.)"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hpctrain.comm.group import SoloGroup
from hpctrain.config import DataConfig, SourceConfig
from hpctrain.data import prepare as preparing
from hpctrain.data.prepare import Request, prepare, ready
from hpctrain.data.progress import shown
from hpctrain.data.tokenizer import beside, train
from hpctrain.data.tokens import Tokens, describe
from hpctrain.errors import ConfigError, DataError
from hpctrain.watch import progress

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path):
    """Three texts, one of them empty, and two lines of JSON."""
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text("the first")
    (folder / "b.txt").write_text("")
    (folder / "c.txt").write_text("the third é")
    (folder / "d.jsonl").write_text('{"text": "fourth"}\n{"text": ""}\n')
    return folder


@pytest.fixture
def request_all(folder):
    return Request((str(folder), str(folder / "d.jsonl")))


def texts(prefix) -> list[str]:
    """The documents of a pair, back as text; each ends with the end-of-document token."""
    tokens, made = Tokens(prefix), describe(prefix)
    found = [tokens.document(i) for i in range(tokens.documents)]
    assert all((document == made.eod).nonzero()[0].tolist() == [len(document) - 1] for document in found)
    return [beside(prefix, made).decode(document) for document in found]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:260"])
def test_every_document_is_there_in_order_and_ends_once(tmp_path, request_all, tokenizer):
    made = prepare(Request(request_all.sources, tokenizer), tmp_path / "out" / "pair")
    assert texts(tmp_path / "out" / "pair") == ["the first", "the third é", "fourth"]
    assert (made.files, made.documents, made.empty, made.skipped) == (4, 3, 2, 0)
    assert made.bytes == 9 + 12 + 19 + 13
    assert made.tokens == Tokens(tmp_path / "out" / "pair").total
    assert describe(tmp_path / "out" / "pair") == made


def test_an_empty_file_at_the_end_is_counted_too(tmp_path, folder):
    made = prepare(Request((str(folder / "a.txt"), str(folder / "b.txt"))), tmp_path / "pair")
    assert (made.files, made.documents, made.empty) == (2, 1, 1)


def test_nothing_but_the_pair_is_left(tmp_path, request_all):
    prepare(Request(request_all.sources, "bpe:260"), tmp_path / "out" / "pair")
    assert sorted(os.listdir(tmp_path / "out")) == ["pair.bin", "pair.idx", "pair.json", "pair.tokenizer.json"]
    prepare(request_all, tmp_path / "out" / "pair")
    assert sorted(os.listdir(tmp_path / "out")) == ["pair.bin", "pair.idx", "pair.json"]


@pytest.mark.parametrize("round_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize("characters", [1, 1 << 20])
def test_the_pair_is_the_same_however_the_work_is_cut(tmp_path, request_all, monkeypatch, round_bytes, characters):
    prepare(request_all, tmp_path / "whole")
    monkeypatch.setattr(preparing, "ROUND_BYTES", round_bytes)
    monkeypatch.setattr(preparing, "BATCH_CHARACTERS", characters)
    told = []
    prepare(request_all, tmp_path / "cut", tell=lambda done, total: told.append((Counter(done), total)))
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"cut{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()
    assert len(told) == -(-53 // round_bytes)
    assert told[-1][0]["documents"] == 3 and told[-1][0]["bytes"] >= told[-1][1] == 53


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path, request_all):
    model = json.loads(train(["the first third fourth"], 260).json)
    model["model"]["vocab"]["far"] = 70000
    (tmp_path / "large.json").write_text(json.dumps(model))
    made = prepare(Request(request_all.sources, str(tmp_path / "large.json")), tmp_path / "pair")
    assert made.vocabulary == 70001
    assert Tokens(tmp_path / "pair").dtype == np.int32
    assert texts(tmp_path / "pair") == ["the first", "the third é", "fourth"]


def test_a_tokenizer_is_trained_on_text_from_everywhere_when_there_is_much(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "TRAINING_BYTES", 4)
    words = [f"{chr(97 + i)}" * 12 for i in range(26)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": word * 20}) + "\n" for word in words))
    prepare(Request((str(tmp_path / "x.jsonl"),), "bpe:400"), tmp_path / "pair")
    known = json.loads((tmp_path / "pair.tokenizer.json").read_text())["model"]["vocab"]
    assert all(letter * 2 in known for letter in "amz")


def test_a_tokenizer_is_trained_on_no_more_of_a_long_text_than_it_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "TRAINING_BYTES", 4)
    (tmp_path / "x.txt").write_text("a" * 2000 + "b" * 2000)
    prepare(Request((str(tmp_path / "x.txt"),), "bpe:300"), tmp_path / "pair")
    known = json.loads((tmp_path / "pair.tokenizer.json").read_text())["model"]["vocab"]
    assert "aa" in known and "bb" not in known


def test_a_document_that_cannot_be_read_fails_the_work_and_leaves_nothing(tmp_path, folder, request_all):
    (folder / "c.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="c.txt is not UTF-8 text: byte 0xff at 0"):
        prepare(request_all, tmp_path / "out" / "pair")
    assert os.listdir(tmp_path / "out") == []


def test_a_failure_leaves_the_pair_before_as_it_was(tmp_path, folder, request_all):
    prepare(request_all, tmp_path / "pair")
    (folder / "d.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match="d.jsonl, line 1 cannot be used"):
        prepare(request_all, tmp_path / "pair")
    assert texts(tmp_path / "pair") == ["the first", "the third é", "fourth"]


def test_documents_that_cannot_be_read_are_left_out_and_counted_when_asked(tmp_path, folder, request_all):
    (folder / "c.txt").write_bytes(b"\xff")
    made = prepare(Request(request_all.sources, on_error="skip"), tmp_path / "pair")
    assert texts(tmp_path / "pair") == ["the first", "fourth"]
    assert (made.documents, made.skipped, made.empty) == (2, 1, 2)


def test_text_without_a_document_is_refused(tmp_path, folder):
    with pytest.raises(DataError, match="no document has any text\n.*empty or were left out"):
        prepare(Request((str(folder / "b.txt"),)), tmp_path / "out" / "pair")
    assert os.listdir(tmp_path / "out") == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path, request_all):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="(?s)preparing the text failed.*/file: File exists.*look at the folder"):
        prepare(request_all, tmp_path / "file" / "pair")


def test_a_killed_run_leaves_no_pair_and_the_next_one_cleans_up(tmp_path, request_all):
    program = f"""
import os, signal
from hpctrain.data import prepare
from hpctrain.data.prepare import Request
prepare.publish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
prepare.prepare(Request({request_all.sources!r}), {str(tmp_path / "out" / "pair")!r})
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=60)
    assert done.returncode == -signal.SIGKILL
    left = os.listdir(tmp_path / "out")
    assert left and all(name.endswith(".tmp") for name in left)
    prepare(request_all, tmp_path / "out" / "pair")
    assert sorted(os.listdir(tmp_path / "out")) == ["pair.bin", "pair.idx", "pair.json"]


def test_a_run_prepares_its_text_once_and_again_when_it_changes(tmp_path, folder):
    config, group = DataConfig(text=(str(folder),)), SoloGroup()
    told = io.StringIO()
    for _ in range(2):
        (source,) = ready(config, tmp_path / "run", group, told)
    assert texts(source.path) == ["the first", "the third é"]
    assert told.getvalue() == "prepare 100% of 0.0 MiB  2 documents  23 tokens\n"
    (folder / "a.txt").write_text("another first")
    (changed,) = ready(config, tmp_path / "run", group)
    assert texts(changed.path)[0] == "another first"
    assert texts(source.path)[0] == "the first"  # which a job that began before may still read
    (cut,) = ready(config.model_copy(update={"tokenizer": "bpe:260"}), tmp_path / "run", group)
    assert describe(cut.path).vocabulary == 260


def test_a_run_with_sources_prepares_nothing(tmp_path):
    sources = (SourceConfig(path="a"), SourceConfig(path="b", weight=2))
    assert ready(DataConfig(sources=sources, text=("c",)), tmp_path / "run", SoloGroup()) == sources
    assert not (tmp_path / "run").exists()


def test_a_run_with_nothing_to_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="data.sources and data.text are empty\n"):
        ready(DataConfig(), tmp_path, SoloGroup())


def test_in_a_log_progress_is_plain_lines_the_last_one_complete():
    stream = io.StringIO()
    with shown(stream) as tell:
        for done in (10, 20, 90, 101):
            tell(Counter(bytes=done, documents=done * 1000, tokens=done), 100)
    first, last = stream.getvalue().splitlines()
    assert first == "prepare  10% of 0.0 MiB  10,000 documents  10 tokens"
    assert last == "prepare 100% of 0.0 MiB  101,000 documents  101 tokens"


def test_on_a_terminal_progress_is_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "columns", lambda: 100)
    with shown(stream) as tell:
        tell(Counter(bytes=101, documents=1234, tokens=99), 100)
    assert "━" in stream.getvalue() and "1,234 documents" in stream.getvalue()


def test_whoever_is_heeded_between_rounds_may_end_the_work_and_nothing_is_left(tmp_path, request_all, monkeypatch):
    monkeypatch.setattr(preparing, "ROUND_BYTES", 8)
    asked = []

    def heed() -> None:
        asked.append(sorted(path.name for path in tmp_path.glob("out/*")))
        if len(asked) == 3:
            raise SystemExit(75)

    with pytest.raises(SystemExit):
        prepare(request_all, tmp_path / "out" / "pair", heed=heed)
    assert asked[-1] != [] and list(tmp_path.glob("out/*")) == []
