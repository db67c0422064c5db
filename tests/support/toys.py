"""Whole jobs on ranks that are threads: a model of a few numbers, and samples that need no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.config import Config, parse
from hpctrain.data.batch import IGNORE, MicroBatch
from hpctrain.plan.plan import Plan, decide
from hpctrain.plan.topology import Topology
from hpctrain.train import Job
from tests.support import threads

VOCABULARY, LENGTH = 11, 5


def toy(*overrides: str) -> Config:
    """A run in fp64 of a model with as many layers as ``overrides`` say."""
    table = {
        "model": {"layers": 2, "width": 8, "heads": 2, "sequence": LENGTH, "dropout": 0.1, "init_std": 0.2},
        "precision": {"compute": "fp64"},
        "train": {"batch": 4, "microbatch": 1, "steps": 10},
        "optim": {"rate": 1e-2, "warmup": 0, "clip": 0.1},
        "log": {"peak_tflops": 1},
    }
    return parse(table, overrides)


@dataclass(frozen=True)
class Deck:
    """Samples of every step, dealt out as ``Batches`` does; later ones have fewer targets."""

    batch: int
    microbatch: int

    def part(self, step: int, rank: int, size: int) -> list[MicroBatch]:
        """A rank's micro-batches of a step."""
        share = self.batch // size
        mine = range(rank * share, (rank + 1) * share)
        return [self._micro(step, mine[i : i + self.microbatch]) for i in range(0, share, self.microbatch)]

    def _micro(self, step: int, rows: Sequence[int]) -> MicroBatch:
        make = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCABULARY, (self.batch, LENGTH + 1), generator=make)
        targets = tokens[:, 1:].clone()
        for row in range(self.batch):
            targets[row, LENGTH - row % LENGTH :] = IGNORE
        return MicroBatch(tokens[list(rows), :-1], targets[list(rows)], None, tuple(rows))


def deck(config: Config) -> Deck:
    """The samples that a configuration asks for."""
    return Deck(config.train.batch, config.train.microbatch)


def plan_of(config: Config) -> Plan:
    """The plan, for as many ranks as the configuration names."""
    parallel = config.parallel
    ranks = parallel.pp * parallel.tp * (1 if parallel.dp == "auto" else parallel.dp)
    return decide(config, Topology(("node",) * ranks), VOCABULARY)


def on_threads(config: Config, act: Callable[[Job], Any]) -> list[Any]:
    """What ``act`` gives on each rank of a run."""
    plan = plan_of(config)
    return threads.over(plan.mesh, lambda groups: act(Job.build(config, plan, groups, torch.device("cpu"))))


def alone(config: Config) -> Config:
    """The same run on one rank."""
    return config.model_copy(update={"parallel": type(config.parallel)()})


def gradients(job: Job) -> dict[str, Tensor]:
    """Of the parameters that a rank has whole."""
    return {s.name: part.share(s, part.gradient).clone() for part in job.sharded.parts for s in part.unit.slots}
