"""Saving and going on by ranks that are threads, with every element checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states, threads


def save(folder: Path, layouts: dict[str, Layout], mesh: Mesh, step: int = 1, **config: Any) -> Path:
    """Save elements that count up from ``step``, by as many ranks as the mesh has."""

    def act(point: Checkpoint, rank: int) -> Path:
        return point.save(step, states.filled(layouts, mesh, rank, step), {})

    return each(folder, mesh, act, config)[0]


def resume(folder: Path, layouts: dict[str, Layout], mesh: Mesh) -> int:
    """The step that was gone on from, once every element on every rank was found to be right."""

    def act(point: Checkpoint, rank: int) -> int:
        state = states.blank(layouts, mesh, rank)
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
