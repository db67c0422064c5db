"""What a load costs: no more memory than the boxes of a rank and one buffer, and hardly a byte twice from the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from hpctrain.checkpoint import load as loading
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.state import Entry, State
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states

RANKS, BUFFER = 4, 1 << 20
MESH = Mesh((("dp", RANKS),))
SHAPE = (1536, 2048)
CUTS = {
    "rows": Layout(SHAPE, "float32", (Cut(0, ("dp",)),)),
    "columns": Layout(SHAPE, "float32", (Cut(1, ("dp",)),)),
    "flat": Layout(SHAPE, "float32", (), Flat(("dp",), 1001, 1536 * 2048 + 5000)),
    "whole": Layout(SHAPE, "float32"),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tensor of 12 MiB."""
    folder = tmp_path_factory.mktemp("memory")
    state = states.filled({"model/a": Layout(SHAPE, "float32")}, Mesh(()), 0, 1)
    return Checkpoint(CheckpointConfig(sync=False), folder, Mesh(()), SoloGroup()).save(1, state, {})


def taken(path: Path, layout: Layout, rank: int) -> tuple[State, Callable[[], None]]:
    """A rank's empty state, and what fills it."""
    state = states.blank({"model/a": layout}, MESH, rank)
    entries, index = [Entry("model/a", layout, MESH, rank, tuple(range(RANKS)))], read_index(path)
    return state, lambda: load(path, index, entries, state, SoloGroup())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_a_reader_takes_no_more_memory_than_its_box_and_one_buffer(
    path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, rank: int
):
    monkeypatch.setattr(loading, "TORN_BYTES", BUFFER)
    state, fill = taken(path, CUTS[cut], rank)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        fill()
    now, most = 0, 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert states.wrong(state, MESH, rank, 1) == []
    assert (cut == "whole") or most > 0  # torn blocks are counted
    assert most <= BUFFER + 2 * BLOCK_BYTES, most


@pytest.mark.parametrize("cut", ["rows", "flat", "whole"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_reads_little_more_than_what_it_holds(path: Path, monkeypatch: pytest.MonkeyPatch, cut: str, rank: int):
    counts: list[int] = []
    real = os.preadv

    def counted(opened: int, into: list, at: int) -> int:
        counts.append(real(opened, into, at))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    state, fill = taken(path, CUTS[cut], rank)
    fill()
    assert sum(counts) <= state["model/a"].tensor.nbytes + 2 * BLOCK_BYTES + 4096


def test_a_load_that_goes_through_many_buffers_is_the_same(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "TORN_BYTES", 1)
    for rank in range(RANKS):
        state, fill = taken(path, CUTS["columns"], rank)
        fill()
        assert states.wrong(state, MESH, rank, 1) == []
