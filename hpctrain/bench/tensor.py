"""Gradients of one micro-batch by ranks that share the model, timed beside torch's DTensor and beside one rank.

All contestants have the same weights and the same tokens in the same processes, and take turns, so that whatever else
the machine does meets them alike. A turn is a forward and a backward, from a barrier to the moment when the slowest
rank is done.

    one             rank 0 alone with the whole model, while the others sleep
    hpctrain        all ranks, tokens between the products shared
    hpctrain-whole  all ranks, every one with all tokens between the products
    dtensor         torch's tensor parallelism over gloo, with SequenceParallel and loss_parallel
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.bench.dtensor import Peer
from hpctrain.cluster.world import World
from hpctrain.comm.group import Group
from hpctrain.comm.groups import Groups
from hpctrain.comm.store import open_store
from hpctrain.config import Config
from hpctrain.errors import UsageError
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.tensor import tensor_parallel
from hpctrain.plan import rules
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.weights import ModelShape
from hpctrain.train import Site

VOCABULARY = 8192  # where the configuration leaves it to a tokenizer
Turn = Callable[[], float]
"""Makes the gradients once, and gives the mean loss."""


@dataclass(frozen=True)
class Scene:
    """What every contestant is made from."""

    shape: ModelShape
    seed: int
    tokens: Tensor
    world: World
    groups: Groups

    @classmethod
    def open(cls, config: Config, world: World) -> Scene:
        """Set the scene for all ranks as one tensor-parallel group. Collective. UsageError for a model with experts."""
        check(config)
        Site.settle(config, world)
        shape = replace(ModelShape.of(config.model, 1), tied=False, dropout=0.0, head_norm=False)  # as the peer
        if config.model.vocabulary == "auto":
            shape = replace(shape, vocabulary=VOCABULARY)
        groups = Groups.open(Mesh(rules.axes(shape, world.size)), world, config.comm)
        make = torch.Generator().manual_seed(config.run.seed)
        tokens = torch.randint(shape.vocabulary, (config.train.microbatch, shape.sequence), generator=make)
        return cls(shape, config.run.seed, tokens, world, groups)

    def model(self) -> Transformer:
        """The whole model, in fp32."""
        model = Transformer(self.shape)
        initialise(model, self.shape, self.seed)
        return model


def check(config: Config) -> None:
    """Raise UsageError for a model that torch's DTensor has no plan for here."""
    if config.model.experts:
        raise UsageError(
            f"bench tensor has no model with experts: model.experts is {config.model.experts}",
            "its peer, torch's tensor parallelism, has dense blocks alone",
            "give a dense configuration, such as configs/bench-34m.toml",
        )


@dataclass(frozen=True)
class Row:
    """A contestant's figures."""

    name: str
    seconds: float
    """Median of a turn."""
    tokens_per_second: float
    times_one: float
    """How many times as fast as one rank alone."""
    loss: float
    """Equal work gives equal losses."""


def run(scene: Scene, turns: int) -> list[Row]:
    """Time ``turns`` turns of each contestant, after one for warming up. All ranks call it; all get the rows."""
    contestants = {name: make(scene) for name, make in CONTESTANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses: dict[str, float] = {}
    for _ in range(turns + 1):
        for name, turn in contestants.items():
            taken, losses[name] = _timed(turn, scene.groups[rules.TENSOR])
            seconds[name].append(taken)
    medians = {name: median(taken[1:]) for name, taken in seconds.items()}
    count = scene.tokens.numel()
    return [Row(name, taken, count / taken, medians["one"] / taken, losses[name]) for name, taken in medians.items()]


def _timed(turn: Turn, group: Group) -> tuple[float, float]:
    group.barrier()
    began = time.perf_counter()
    loss = turn()
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    group.all_reduce(taken, "max")
    return float(taken), loss


def _one(scene: Scene) -> Turn:
    return _gradients(scene.model(), scene.tokens) if scene.world.leads else lambda: 0.0


def _ours(scene: Scene, sequence: bool) -> Turn:
    model = scene.model()
    tensor_parallel(model, scene.groups[rules.TENSOR], sequence, scene.groups[rules.COPY])
    return _gradients(model, scene.tokens)


def _gradients(model: Transformer, tokens: Tensor) -> Turn:
    targets = tokens.roll(-1, 1)

    def turn() -> float:
        model.zero_grad(set_to_none=True)
        loss, count = model.loss(tokens, targets)
        mean = loss / count
        mean.backward()
        return float(mean.detach())

    return turn


def _dtensor(scene: Scene) -> Turn:
    world = scene.world
    if not dist.is_initialized():
        store = open_store(world.comm, 600.0).store
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    peer = Peer(scene.model(), DeviceMesh("cpu", list(range(world.size))))
    return lambda: peer.gradients(scene.tokens, scene.tokens.roll(-1, 1))


CONTESTANTS: dict[str, Callable[[Scene], Turn]] = {
    "one": _one,
    "hpctrain": lambda scene: _ours(scene, True),
    "hpctrain-whole": lambda scene: _ours(scene, False),
    "dtensor": _dtensor,
}
