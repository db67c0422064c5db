"""Saving and going on by ranks that are threads, with every element checked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import State
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Cut, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states, threads

ROWS = {"model/a": Layout((4, 1000, 1000), "float32", (Cut(0, ("dp",)),))}
"""Rank r of 4 is known by the first element that it holds, 1,000,000 r after the first of all."""

Layouts = dict[str, Layout]
"""What a rank holds, by name."""

# The ways to save: ``way(point, step, state)`` returns when the state may change again.
SAVES: dict[str, Callable[[Checkpoint, int, State], Any]] = {
    "at once": lambda point, step, state: point.save(step, state, {}),
    "background": lambda point, step, state: _behind(point, step, state),
}


def _behind(point: Checkpoint, step: int, state: State) -> Path:
    """Save in the background, while every tensor changes."""
    assert point.begin(step, state, {}) is None
    for held in state.values():
        held.tensor.zero_()
    return point.wait()


def save(
    folder: Path,
    layouts: Layouts | Callable[[int], Layouts],
    mesh: Mesh,
    step: int = 1,
    way: str = "at once",
    **config: Any,
) -> Path:
    """Save elements that count up from ``step``, by as many ranks as the mesh has."""

    def act(point: Checkpoint, rank: int) -> Path:
        return SAVES[way](point, step, states.filled(_of(layouts, rank), mesh, rank, step))

    return each(folder, mesh, act, config)[0]


def behind(point: Checkpoint, rank: int, layouts: Layouts, mesh: Mesh, step: int = 1) -> Path:
    """What one rank does to save elements that count up from ``step`` in the background."""
    return _behind(point, step, states.filled(layouts, mesh, rank, step))


def resume(folder: Path, layouts: Layouts | Callable[[int], Layouts], mesh: Mesh) -> int:
    """The step that was gone on from, once every element on every rank was found to be right."""

    def act(point: Checkpoint, rank: int) -> int:
        state = states.blank(_of(layouts, rank), mesh, rank)
        step = point.resume(state)
        assert step == 0 or states.wrong(state, mesh, rank, step) == []
        return step

    (step,) = set(each(folder, mesh, act))
    return step


def each(folder: Path, mesh: Mesh, act: Callable[[Checkpoint, int], Any], config: dict | None = None) -> list[Any]:
    """What ``act`` gives on each rank, for a checkpoint in ``folder`` and the rank."""
    knobs = CheckpointConfig(**{"sync": False} | (config or {}))

    def one(group: Group) -> Any:
        return act(Checkpoint(knobs, folder, mesh, group), group.rank)

    return threads.run(mesh.ranks_total, one)


def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every write waits until the event is set."""
    real, go = disk.write, threading.Event()

    def write(path: Path, pieces: Any, sync: bool, *more: Any) -> None:
        assert go.wait(60)
        real(path, pieces, sync, *more)

    monkeypatch.setattr(disk, "write", write)
    return go


def failing(monkeypatch: pytest.MonkeyPatch, rank: int, number: int, step: int = 2) -> list[bool]:
    """The write of this rank, known by its first value of ``ROWS``, fails while what is given is true."""
    real, broken = disk.write, [True]

    def write(path: Path, pieces: Any, sync: bool, *more: Any) -> None:
        found = list(pieces)
        if broken[0] and found[0].memory[:4].view(torch.float32)[0] == (rank * 1_000_000 + step) % states.MODULUS:
            raise OSError(number, os.strerror(number), str(path))
        real(path, found, sync, *more)

    monkeypatch.setattr(disk, "write", write)
    return broken


def _of(layouts: Layouts | Callable[[int], Layouts], rank: int) -> Layouts:
    """What a rank holds, where it is told for all of them or by rank."""
    return layouts(rank) if callable(layouts) else layouts
