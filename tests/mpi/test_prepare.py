"""Preparing text on several ranks gives what one rank gives, and fails on all of them together."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import DataConfig
from hpctrain.data import prepare as preparing
from hpctrain.data.prepare import Request, prepare, ready
from hpctrain.data.tokens import Tokens
from hpctrain.errors import DataError

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.fixture
def folder(comm, tmp_path_factory):
    """A folder that all ranks see, with texts of very different lengths, empty ones, and lines of JSON."""
    folder = Path(comm.bcast(str(tmp_path_factory.mktemp("prepare")) if comm.rank == 0 else None))
    if comm.rank == 0:
        (folder / "text").mkdir()
        for i in range(9):
            (folder / "text" / f"{i}.txt").write_text(f"text {i} " * (i * i * i))
        lines = [json.dumps({"text": f"line {i} é" * (i % 5)}) + "\n" for i in range(200)]
        (folder / "lines.jsonl").write_text("".join(lines))
    comm.barrier()
    return folder


@pytest.fixture
def open_group(first):
    """Opens the group of the first ranks; None on the others."""
    opened = []

    def open_(size):
        part = first(size)
        if part is None:
            return None
        opened.append(MpiGroup(part, timeout_seconds=60))
        return opened[-1]

    yield open_
    for group in opened:
        group.close()


def sources(folder):
    return (str(folder / "text"), str(folder / "lines.jsonl"))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:280"])
def test_any_number_of_ranks_makes_the_same_files(comm, folder, open_group, monkeypatch, tokenizer):
    monkeypatch.setattr(preparing, "ROUND_BYTES", 700)
    for size in (1, 2, 3, 4):
        group = open_group(size)
        if group is not None:
            prepare(Request(sources(folder), tokenizer), folder / f"pair{size}", group)
    comm.barrier()
    suffixes = (".bin", ".idx", ".json") + (() if tokenizer == "bytes" else (".tokenizer.json",))
    for suffix in suffixes:
        assert len({(folder / f"pair{size}{suffix}").read_bytes() for size in (1, 2, 3, 4)}) == 1
    assert Tokens(folder / "pair4").documents == 8 + 160
    assert not list(folder.glob("*.tmp"))


def test_more_ranks_than_documents_make_the_same_files(comm, folder, open_group):
    for size in (1, 4):
        group = open_group(size)
        if group is not None:
            prepare(Request((str(folder / "text" / "1.txt"),)), folder / f"small{size}", group)
    comm.barrier()
    for suffix in (".bin", ".idx", ".json"):
        assert (folder / f"small1{suffix}").read_bytes() == (folder / f"small4{suffix}").read_bytes()


def test_what_fails_on_one_rank_is_raised_on_all_and_leaves_nothing(comm, folder, open_group):
    if comm.rank == 0:
        with open(folder / "lines.jsonl", "a") as file:
            file.write('{"body": 3}\n')
    comm.barrier()
    group = open_group(4)
    told = None
    if group is not None:
        with pytest.raises(DataError) as caught:
            prepare(Request(sources(folder)), folder / "out" / "pair", group)
        told = str(caught.value)
    comm.barrier()
    assert told is None or "lines.jsonl, line 201 cannot be used\n  it has no text under 'text'" in told
    assert os.listdir(folder / "out") == []


@pytest.mark.parametrize("step", ["_tokenizer", "_publish"])
def test_what_fails_on_the_leading_rank_alone_is_raised_on_all(comm, folder, open_group, monkeypatch, step):
    def fail(*_):
        raise OSError(28, "No space left on device", "pair")

    monkeypatch.setattr(preparing, step, fail)
    group = open_group(4)
    if group is not None:
        with pytest.raises(DataError, match="(?s)preparing the text failed.*pair: No space left on device.*free space"):
            prepare(Request(sources(folder)), folder / "full" / "pair", group)
    comm.barrier()
    assert os.listdir(folder / "full") == []


def test_a_run_prepares_its_text_on_all_its_ranks_once(comm, folder, open_group):
    group, told = open_group(4), io.StringIO()
    if group is not None:
        config = DataConfig(text=(str(folder / "text"),))
        found = [ready(config, folder / "run", group, told) for _ in range(2)]
        assert found[0] == found[1] and Tokens(found[0][0].path).documents == 8
        assert told.getvalue().count("\n") == (1 if group.leads else 0)


def test_two_jobs_of_two_ranks_that_start_at_once_take_the_same_tokens(comm, folder):
    half = comm.Split(comm.rank // 2, comm.rank)
    group = MpiGroup(half, timeout_seconds=60)
    config = DataConfig(text=(str(folder / "text"),), tokenizer="bpe:280")
    comm.barrier()
    (source,) = ready(config, folder / "run", group, io.StringIO())
    assert len(set(comm.allgather((source.path, Tokens(source.path).documents)))) == 1
    comm.barrier()  # the slower one has removed its own by now
    assert os.listdir(folder / "run") == [Path(source.path).parent.name]
    assert not list(Path(source.path).parent.glob("*.tmp"))
    group.close()
    half.Free()
