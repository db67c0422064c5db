"""A job that goes on from its newest checkpoint, checks every element of it, and then saves without end."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path

import torch
from mpi4py import MPI

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import Held
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support.saving import SAVES

LAYOUTS = {
    "model/rows": Layout((1200, 1000), "float32", (Cut(0, ("dp",)),)),
    "model/replicated": Layout((700, 1000), "float32"),
    **{f"model/small.{number}": Layout((number,), "float32") for number in range(20)},
    "optim/exp_avg/rows": Layout((1200, 1000), "float32", (), Flat(("dp",), 0, 1_200_000)),
}


def main(folder: Path, writer: str, told: Path, way: str) -> None:
    """Save until somebody ends it; each element is the number of its step. What was done is appended to ``told``."""
    group = MpiGroup(MPI.COMM_WORLD)
    mesh = Mesh((("dp", group.size),))
    checkpoint = Checkpoint(CheckpointConfig(writer=writer, sync=False), folder, mesh, group)
    state = {name: Held(layout, _piece(layout, mesh, group.rank)) for name, layout in LAYOUTS.items()}
    start = checkpoint.resume(state)
    wrong = [name for name, held in state.items() if not bool((held.tensor == start).all())]
    aside = [name for name in group.share(os.listdir(folder)) if name.endswith(".part")]
    assert not wrong and not aside, (wrong, aside)
    _say(group, told, f"resumed {start}")
    for step in count(start + 1):
        for held in state.values():
            held.tensor.fill_(step)
        SAVES[way](checkpoint, step, state)
        _say(group, told, f"saved {step}")


def _piece(layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    start, stop = layout.interval(mesh, rank)
    return torch.zeros(stop - start).reshape(-1 if layout.flat else layout.box(mesh, rank).shape)


def _say(group: MpiGroup, told: Path, line: str) -> None:
    """Into a file: what goes through the launcher's pipes may be lost when ranks are killed."""
    if group.leads:
        with told.open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4])
