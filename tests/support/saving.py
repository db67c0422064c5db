"""Saving and going on by ranks that are threads, with every element checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import State
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states, threads

Layouts = dict[str, Layout]
"""What a rank holds, by name."""

# The ways to save: ``way(point, step, state)`` returns when the state may change again.
SAVES: dict[str, Callable[[Checkpoint, int, State], Any]] = {
    "at once": lambda point, step, state: point.save(step, state, {}),
}


def save(folder: Path, layouts: Layouts | Callable[[int], Layouts], mesh: Mesh, step: int = 1, **config: Any) -> Path:
    """Save elements that count up from ``step``, by as many ranks as the mesh has."""

    def act(point: Checkpoint, rank: int) -> Path:
        return point.save(step, states.filled(_of(layouts, rank), mesh, rank, step), {})

    return each(folder, mesh, act, config)[0]


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


def _of(layouts: Layouts | Callable[[int], Layouts], rank: int) -> Layouts:
    """What a rank holds, where it is told for all of them or by rank."""
    return layouts(rank) if callable(layouts) else layouts
