"""One training step, timed beside torch's DistributedDataParallel and beside no communication at all.

All contestants train the same model on the same data in the same processes, turn by turn, so that whatever else the
machine does meets them alike. A turn is timed from a barrier to the moment when the slowest rank is done.

    one          rank 0 alone takes its part of the step while the others sleep; times the cores in use, this is
                 the communication-free rate that every other speed is a part of
    apart        every rank takes its part and none talks: what the machine itself loses, by sharing memory and caches
    hpctrain     the step that trains
    ddp          torch's DDP over gloo, as in its tutorials: bucket views, fused AdamW, clip by norm
    ddp-mpi4py   the same over our torch.distributed backend
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from hpctrain.bench.ddp import Ddp
from hpctrain.cluster.world import World
from hpctrain.comm.group import Group
from hpctrain.comm.groups import Groups
from hpctrain.comm.store import open_store
from hpctrain.config import Config
from hpctrain.data.batch import Batches, MicroBatch
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.plan import Plan, decide, lay
from hpctrain.train import Job, open_data, set_up_device

Step = Callable[[int], float]
"""Takes the number of a step, takes that step, and gives its loss."""


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
        set_up_device(world)
        groups = Groups.open(lay(config, world.topology), world, config.comm)
        batches = open_data(config, groups)
        return cls(config, decide(config, world.topology, batches.vocabulary), world, groups, batches)


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
    """Time ``turns`` steps of each contestant, after one for warming up. All ranks call it; all get the rows."""
    group = scene.groups.whole
    contestants = {name: CONTESTANTS[name](scene) for name in ("one", "apart", "hpctrain", *against)}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, float] = {}
    for turn in range(turns + 1):
        for name, step in contestants.items():
            taken, losses[name] = _timed(step, turn, group)
            seconds[name].append(taken)
    return _rows({name: median(taken[1:]) for name, taken in seconds.items()}, losses, scene)


def _rows(seconds: dict[str, float], losses: dict[str, float], scene: Scene) -> list[Row]:
    ranks = scene.world.size
    tokens = dict.fromkeys(seconds, scene.config.train.batch * scene.config.model.sequence)
    tokens["one"] //= ranks
    free = tokens["one"] / seconds["one"] * min(ranks, len(os.sched_getaffinity(0)))
    rates = {name: tokens[name] / taken for name, taken in seconds.items()}
    return [Row(name, taken, rates[name], rates[name] / free, losses[name]) for name, taken in seconds.items()]


def _timed(step: Step, number: int, group: Group) -> tuple[float, float]:
    group.barrier()
    began = time.perf_counter()
    loss = step(number)
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    group.all_reduce(taken, "max")
    return float(taken), loss


# ---- contestants -----------------------------------------------------------------------------------------------------


def _ours(scene: Scene) -> Step:
    job = Job.build(scene.config, scene.plan, scene.groups, torch.device("cpu"))
    return lambda number: job.step(number, scene.batches)["loss"]


def _apart(scene: Scene) -> Step:
    from mpi4py import MPI

    alone = Groups.open(Mesh((("dp", 1),)), World.of(MPI.COMM_SELF), scene.config.comm)
    job = Job.build(scene.config, scene.plan, alone, torch.device("cpu"))
    parts = _Parts(scene.batches, scene.groups.whole)
    return lambda number: job.step(number, parts)["loss"]


def _one(scene: Scene) -> Step:
    step = _apart(scene)
    return step if scene.world.leads else lambda number: 0.0


@dataclass(frozen=True)
class _Parts:
    """The batches for a rank that believes it is alone, cut as for all ranks."""

    batches: Batches
    group: Group

    def part(self, step: int, rank: int, size: int) -> list[MicroBatch]:
        return self.batches.part(step, self.group.rank, self.group.size)


def _ddp(scene: Scene, backend: str) -> Step:
    return Ddp(scene.config, scene.plan.shape, scene.batches, _process_group(scene.world, backend)).step


def _process_group(world: World, backend: str) -> dist.ProcessGroup:
    import hpctrain.comm.backend  # noqa: F401 - registers "mpi4py"

    if not dist.is_initialized():
        store = open_store(world.comm, 600.0).store
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return dist.new_group(backend=backend)


CONTESTANTS: dict[str, Callable[[Scene], Step]] = {
    "one": _one,
    "apart": _apart,
    "hpctrain": _ours,
    "ddp": lambda scene: _ddp(scene, "gloo"),
    "ddp-mpi4py": lambda scene: _ddp(scene, "mpi4py"),
}
