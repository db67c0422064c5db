"""One training step, timed beside other frameworks and beside no communication at all.

All contestants train the same model on the same data in the same processes, turn by turn, so that whatever else the
machine does meets them alike. A turn is timed from a barrier to the moment when the slowest rank is done.

    one          rank 0 alone takes its part of the step while the others sleep; times the cores in use, this is
                 the communication-free rate that every other speed is a part of
    apart        every rank takes its part and none talks: what the machine itself loses, by sharing memory and caches
    hpctrain     the step that trains
    zero-0 ...   the same with parallel.zero set to 0, 1, 2 or 3
    ddp          torch's DDP over gloo, as in its tutorials: bucket views, fused AdamW, clip by norm
    fsdp2        torch's FSDP2 over gloo
    ...-mpi4py   either over our torch.distributed backend
    deepspeed-1  DeepSpeed's ZeRO over gloo, stage 1, 2 or 3
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import torch

from hpctrain.bench.peer import process_group
from hpctrain.cluster.world import World
from hpctrain.comm.group import Group
from hpctrain.comm.groups import Groups
from hpctrain.config import Config
from hpctrain.data.batch import Batches, MicroBatch
from hpctrain.errors import UsageError
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.plan import Plan, decide, lay
from hpctrain.train import Job, Site, open_data

Step = Callable[[int], float]
"""Takes the number of a step, takes that step, and gives its loss."""
Ready = Callable[[], Step]
"""A contestant that has its modules and its groups, and makes its model when it is called."""


@dataclass(frozen=True)
class Scene:
    """What every contestant is made from."""

    config: Config
    plan: Plan
    world: World
    groups: Groups
    batches: Batches

    @classmethod
    def open(cls, config: Config, world: World) -> Scene:
        """Set the scene as a run does. Collective."""
        site = Site.settle(config, world)
        groups = Groups.open(lay(config, site.topology), world, config.comm)
        batches = open_data(config, groups)
        return cls(config, decide(config, site.topology, batches.vocabulary), world, groups, batches)

    def sharing(self, stage: int) -> Scene:
        """The same with a stage of ZeRO. Collective."""
        config = with_stage(self.config, stage)
        groups = Groups.open(lay(config, self.plan.topology), self.world, config.comm)
        plan = decide(config, self.plan.topology, self.batches.vocabulary)
        return replace(self, config=config, plan=plan, groups=groups)


def with_stage(config: Config, stage: int) -> Config:
    """The same run with a stage of ZeRO."""
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero": stage})})


@dataclass(frozen=True)
class Row:
    """A contestant's figures, over all ranks that take part."""

    name: str
    seconds: float
    """Median of a turn."""
    tokens_per_second: float
    of_free: float
    """Its speed as a part of the communication-free rate."""
    loss: float
    """After the last turn: equal work gives equal losses."""


def run(scene: Scene, against: tuple[str, ...], turns: int) -> list[Row]:
    """Time ``turns`` steps of each contestant, after one for warming up. All ranks call it; all get the rows.

    Raises UsageError for a name that is not in ``CONTESTANTS``.
    """
    group = scene.groups.whole
    contestants = {name: contestant(name)(scene)() for name in ("one", "apart", "hpctrain", *against)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, float] = {}
    for turn in range(turns + 1):
        for name, step in contestants.items():
            taken, losses[name] = timed(step, turn, group)
            seconds[name].append(taken)
    return _rows({name: median(taken[1:]) for name, taken in seconds.items()}, losses, scene)


def _rows(seconds: dict[str, float], losses: dict[str, float], scene: Scene) -> list[Row]:
    ranks = scene.world.size
    tokens = dict.fromkeys(seconds, scene.config.train.batch * scene.config.model.sequence)
    tokens["one"] //= ranks
    free = tokens["one"] / seconds["one"] * min(ranks, len(os.sched_getaffinity(0)))
    rates = {name: tokens[name] / taken for name, taken in seconds.items()}
    return [Row(name, taken, rates[name], rates[name] / free, losses[name]) for name, taken in seconds.items()]


def timed(step: Step, number: int, group: Group) -> tuple[float, float]:
    """Take step ``number``: the seconds of the slowest rank, and the loss. Collective."""
    group.barrier()
    began = time.perf_counter()
    loss = step(number)
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    group.all_reduce(taken, "max")
    return float(taken), loss


# ---- contestants -----------------------------------------------------------------------------------------------------


def contestant(name: str) -> Callable[[Scene], Ready]:
    """The contestant of this name. Raises UsageError for an unknown one."""
    if name not in CONTESTANTS:
        raise UsageError(f"--against {name}: not a known peer", "", f"take some of {', '.join(CONTESTANTS)}")
    return CONTESTANTS[name]


def _ours(scene: Scene) -> Ready:
    def make() -> Step:
        job = Job.build(scene.config, scene.plan, scene.groups, torch.device("cpu"))
        return lambda number: job.step(number, scene.batches)["loss"]

    return make


def _stage(stage: int, scene: Scene) -> Ready:
    return _ours(scene.sharing(stage))


def _apart(scene: Scene) -> Ready:
    from mpi4py import MPI

    alone = Groups.open(Mesh((("dp", 1),)), World.of(MPI.COMM_SELF), scene.config.comm)
    parts = _Parts(scene.batches, scene.groups.whole)
    return _ours(replace(scene, groups=alone, batches=parts))


def _one(scene: Scene) -> Ready:
    return _apart(scene) if scene.world.leads else lambda: lambda number: 0.0


@dataclass(frozen=True)
class _Parts:
    """The batches for a rank that believes it is alone, cut as for all ranks."""

    batches: Batches
    group: Group

    def part(self, step: int, rank: int, size: int) -> list[MicroBatch]:
        return self.batches.part(step, self.group.rank, self.group.size)


def _ddp(backend: str, scene: Scene) -> Ready:
    from hpctrain.bench.ddp import Ddp

    group = process_group(scene.world, backend)
    return lambda: Ddp(scene.config, scene.plan.shape, scene.batches, group).step


def _fsdp2(backend: str, scene: Scene) -> Ready:
    from hpctrain.bench.fsdp2 import Fsdp2

    group = process_group(scene.world, backend)
    return lambda: Fsdp2(scene.config, scene.plan.shape, scene.batches, group).step


def _deepspeed(stage: int, scene: Scene) -> Ready:
    from hpctrain.bench.deepspeed import DeepSpeed, load_deepspeed

    deepspeed = load_deepspeed(scene.world.local_rank)
    process_group(scene.world, "gloo")
    return lambda: DeepSpeed(scene.config, scene.plan.shape, scene.batches, stage, deepspeed).step


CONTESTANTS: dict[str, Callable[[Scene], Ready]] = {
    "one": _one,
    "apart": _apart,
    "hpctrain": _ours,
    **{f"zero-{stage}": partial(_stage, stage) for stage in (0, 1, 2, 3)},
    "ddp": partial(_ddp, "gloo"),
    "ddp-mpi4py": partial(_ddp, "mpi4py"),
    "fsdp2": partial(_fsdp2, "gloo"),
    "fsdp2-mpi4py": partial(_fsdp2, "mpi4py"),
    **{f"deepspeed-{stage}": partial(_deepspeed, stage) for stage in (1, 2, 3)},
}
