"""Runs that go on from each other's checkpoints, under any mesh: what they load, and their losses after it."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpi4py import MPI

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.keep import file_name
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CheckpointConfig, Config
from hpctrain.data.batch import Batches
from hpctrain.train import Job
from tests.support.runs import job

# What else than AdamW's states in fp64 a checkpoint can hold, and how near the losses after it come to one rank's: see
# tests.support.matrix. Adafactor divides by the root of squares however small, which enlarges the last bits.
KINDS: dict[str, tuple[tuple[str, ...], float]] = {
    "adamw in bf16": (("optim.states=bf16",), 1e-10),
    "adafactor": (("optim.kind=adafactor",), 1e-8),
    "adamw8bit": (("optim.kind=adamw8bit",), 1e-10),
    "muon": (("optim.kind=muon",), 1e-10),
    "fp16": (("precision.compute=fp16", "precision.scale=1024", "precision.scale_interval=5"), 2e-4),
}


class Leg:
    """A run under one mesh, which loads and saves in any folder. Live."""

    def __init__(self, run: Job, batches: Batches, comm: MPI.Comm) -> None:
        self.run, self.batches, self.everyone = run, batches, MpiGroup(comm)

    def save(self, folder: Path, step: int) -> Path:
        """Save as of this step. Collective."""
        return self._point(folder).save(step, self.run.state, {})

    def load(self, folder: Path) -> int:
        """Go on from what is there, and from nothing that was here before. Collective."""
        for held in self.run.state.values():
            held.tensor.zero_()
        return self._point(folder).resume(self.run.state)

    def same(self, folder: Path, again: Path) -> bool:
        """Whether what is loaded from a folder and saved again is the same, byte by byte. Collective."""
        step = self.load(folder)
        return filecmp.cmp(folder / file_name(step), self.save(again, step), shallow=False)

    def losses(self, steps: range) -> list[float]:
        """Of these steps. Collective."""
        return [self.run.step(step, self.batches)["loss"] for step in steps]

    def _point(self, folder: Path) -> Checkpoint:
        return Checkpoint(CheckpointConfig(sync=False), folder, self.run.plan.mesh, self.everyone)


@contextmanager
def leg(config: Config, comm: MPI.Comm) -> Iterator[Leg]:
    """A run on the ranks of ``comm``. Collective."""
    with job(config, comm) as (run, batches):
        one = Leg(run, batches, comm)
        yield one
        one.everyone.close()
