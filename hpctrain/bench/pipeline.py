"""Gradients of one step by a pipeline of all ranks, schedule by schedule, beside the simulator and torch's pipelining.

All contestants have the same weights and the same micro-batches in the same processes, and take turns, so that whatever
else the machine does meets them alike. A turn is a step without its update, from a barrier to the moment when the
slowest rank is done. Ours is the runner that trains.

    1f1b ...      ours, one for each kind of schedule
    torch-1f1b    torch.distributed.pipelining over gloo, Schedule1F1B
    torch-...     ScheduleInterleaved1F1B and, of blocks that compute, ScheduleZBVZeroBubble

Blocks compute, or each stage sleeps for a given time: then ranks may outnumber cores, and what is measured is what the
runner and its messages add to the schedule. A rank's blocks sleep as long with several chunks as with one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from hpctrain.bench.asleep import Bed, fall_asleep
from hpctrain.bench.peer import process_group
from hpctrain.bench.pipelining import IN_TWO, Pipelining
from hpctrain.bench.pipelining import SCHEDULES as PEERS
from hpctrain.bench.step import timed
from hpctrain.cluster.world import World
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.comm.groups import Groups
from hpctrain.config import Config, ModelConfig
from hpctrain.data.batch import MicroBatch
from hpctrain.errors import LaunchError
from hpctrain.model.init import fill
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.deferred import Deferred, split
from hpctrain.parallel.pipeline import Pipe, Runner
from hpctrain.parallel.zero import shard
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.spans import Span, mine, spans
from hpctrain.plan.units import PIPE
from hpctrain.plan.weights import ModelShape
from hpctrain.schedule.action import Schedule
from hpctrain.schedule.kinds import SCHEDULES, make
from hpctrain.schedule.passes import add_messages
from hpctrain.schedule.simulate import Costs, Timeline, simulate
from hpctrain.train import Site
from hpctrain.watch.meter import Meter
from hpctrain.watch.trace import Trace, bubbles, costs

COMPUTING = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")
ASLEEP = tuple(SCHEDULES)
VOCABULARY = 8192  # where the configuration leaves it to a tokenizer
SMALL = ModelConfig(width=64, heads=1, sequence=128, vocabulary=64)  # of stages that sleep: 128 KiB a message
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Scene:
    """What every contestant is made from."""

    shape: ModelShape
    seed: int
    tokens: Tensor
    """``[micro-batches, B, T]``."""
    world: World
    group: Group
    asleep: tuple[float, float, float] | None = None
    """Seconds that the blocks of a rank sleep in F, I and W of a micro-batch; None where they compute."""

    @classmethod
    def open(cls, config: Config, world: World) -> Scene:
        """Set the scene for all ranks as one pipeline of the configuration's model. Collective."""
        count = max(1, config.train.batch // config.train.microbatch)  # whole ones: the peer has equal ones only
        vocabulary = VOCABULARY if config.model.vocabulary == "auto" else config.model.vocabulary
        shape = replace(ModelShape.of(config.model, vocabulary), tied=False, dropout=0.0)  # as the peer can have it
        return cls._open(shape, config, world, (count, config.train.microbatch, shape.sequence))

    @classmethod
    def sleeping(cls, costs_seconds: tuple[float, float, float], count: int, world: World) -> Scene:
        """Set it with ``count`` micro-batches and stages that sleep. Collective. PlanError for less than no sleep."""
        Costs(*costs_seconds).fit(world.size)
        shape = replace(ModelShape.of(SMALL, SMALL.vocabulary), tied=False)
        return replace(cls._open(shape, Config(), world, (count, 4, shape.sequence)), asleep=costs_seconds)

    @classmethod
    def _open(cls, shape: ModelShape, config: Config, world: World, size: tuple[int, int, int]) -> Scene:
        if world.size < 2:
            raise LaunchError("one rank is no pipeline", "", "start it with mpirun -n 4, or with srun")
        Site.settle(config, world)
        make = torch.Generator().manual_seed(config.run.seed)
        tokens = torch.randint(shape.vocabulary, size, generator=make)
        group = Groups.open(Mesh(((PIPE, world.size),)), world, config.comm)[PIPE]
        return cls(shape, config.run.seed, tokens, world, group)


@dataclass(frozen=True)
class Row:
    """A contestant's figures."""

    name: str
    seconds: float
    """Median of a turn."""
    simulated_seconds: float | None
    """What the simulator says, of what stages sleep, or of what F, I and W took on average; of our own alone."""
    bubble: float | None
    """The part of all ranks' time in which they neither compute nor sleep; None where the peer does not tell."""
    simulated_bubble: float | None
    traced_bubble: float | None
    """As a run's trace has it, where all that an action takes is work; of our own alone."""
    traced_simulated: float | None
    """What the simulator says of the costs in the trace."""
    tokens_per_second: float
    times_torch: float | None
    """How many times as fast as the faster of torch's schedules."""
    loss: float
    norm: float
    """Of the gradients. Equal work gives equal losses and norms."""


def run(scene: Scene, turns: int, kinds: Sequence[str] = ()) -> list[Row]:
    """Time ``turns`` turns of each contestant, after one for warming up. All ranks call it; all get the rows.

    ``kinds`` are schedules of ours, by default all where stages sleep, else ``COMPUTING``. PlanError for one that is
    unknown, or needs more stages than the model has layers.
    """
    kinds = kinds or (ASLEEP if scene.asleep else COMPUTING)
    contestants: dict[str, Ours | Torchs] = {kind: Ours(scene, kind) for kind in kinds}
    peers = [kind for kind in PEERS if kind in kinds and not (scene.asleep and kind in IN_TWO)]
    contestants |= {f"torch-{kind}": Torchs(scene, kind) for kind in peers}
    taken: dict[str, list[Turn]] = {name: [] for name in contestants}
    for _ in range(turns + 1):
        for name, one in contestants.items():
            seconds, loss = timed(lambda _, one=one: one.turn(), 0, scene.group)
            bubble = _bubble(one.busy(), seconds, scene.group)
            taken[name].append(Turn(seconds, loss, bubble, one.simulated(), one.traced()))
    rows = [_row(name, one, taken[name][1:], scene) for name, one in contestants.items()]
    best = max((row.tokens_per_second for row in rows if row.name.startswith("torch-")), default=None)
    return [replace(row, times_torch=best and row.tokens_per_second / best) for row in rows]


@dataclass(frozen=True)
class Turn:
    """What was seen of one turn."""

    seconds: float
    loss: float
    bubble: float | None
    simulated: Timeline | None
    traced: dict[str, float]


def _bubble(busy: float | None, seconds: float, group: Group) -> float | None:
    if busy is None:
        return None
    mean = torch.tensor(busy, dtype=torch.float64)
    group.all_reduce(mean, "mean")
    return 1 - float(mean) / seconds


def _row(name: str, one: Ours | Torchs, turns: list[Turn], scene: Scene) -> Row:
    seconds = median(turn.seconds for turn in turns)
    return Row(
        name=name,
        seconds=seconds,
        simulated_seconds=_median(turn.simulated and turn.simulated.makespan for turn in turns),
        bubble=_median(turn.bubble for turn in turns),
        simulated_bubble=_median(turn.simulated and turn.simulated.bubble for turn in turns),
        traced_bubble=_median(turn.traced.get("bubble") for turn in turns),
        traced_simulated=_median(turn.traced.get("simulated_bubble") for turn in turns),
        tokens_per_second=scene.tokens.numel() / seconds,
        times_torch=None,
        loss=turns[-1].loss,
        norm=_norm(one.gradients(), scene.group),
    )


def _median(values: Iterable[float | None]) -> float | None:
    """The median, where the contestant tells any."""
    found = [value for value in values if value is not None]
    return median(found) if found else None


def _norm(gradients: Sequence[Tensor], group: Group) -> float:
    square = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum()
    group.all_reduce(square)
    return float(square.sqrt())


# ---- contestants -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """This rank's part of the model, cut for one schedule."""

    schedule: Schedule
    spans: tuple[Span, ...]
    """Of all stages."""
    model: Transformer
    deferred: Deferred
    bed: Bed | None

    @classmethod
    def of(cls, scene: Scene, kind: str, ours: bool = True) -> Part:
        """The part of a rank of ``scene``, with the weights of the first step; for our runner, or for a peer."""
        schedule = add_messages(make(kind, scene.group.size, scene.tokens.shape[0]))
        shape = replace(scene.shape, layers=schedule.stages) if scene.asleep else scene.shape
        parts = spans(shape, schedule, (1,) * schedule.stages if scene.asleep else None)
        own = [parts[stage] for stage in _own(schedule, scene.group.rank)]
        model = Transformer(shape, own)
        for weight in mine(shape, own):
            fill(model.get_parameter(weight.name).view(-1), weight, scene.seed)
        deferred, bed = split(schedule, model) if ours else Deferred(), None
        if scene.asleep:
            chunks = schedule.stages // scene.group.size
            bed = Bed(*(seconds / chunks for seconds in scene.asleep))
            fall_asleep(model, bed, deferred)
        return cls(schedule, parts, model, deferred, bed)

    def simulated(self) -> Timeline:
        """The schedule, at what a stage sleeps."""
        return simulate(self.schedule, Costs(self.bed.forward_seconds, self.bed.input_seconds, self.bed.weight_seconds))

    def slept(self) -> float:
        """Seconds slept since it was asked before."""
        slept, self.bed.slept_seconds = self.bed.slept_seconds, 0.0
        return slept


def _own(schedule: Schedule, rank: int) -> list[int]:
    return sorted(stage for stage, home in schedule.home.items() if home == rank)


class Ours:
    """Our runner with one kind of schedule; live. All ranks of the scene make it and call its methods."""

    def __init__(self, scene: Scene, kind: str) -> None:
        self.part, self.trace, self.group = Part.of(scene, kind), Trace(CPU), scene.group
        self.data, self.meter = shard(self.part.model, SoloGroup(), 0), Meter(CPU, 1.0, 1.0)
        schedule = self.part.schedule
        pipe = Pipe(self.part.spans, lambda _: schedule, scene.group, deferred=self.part.deferred)
        self.runner = Runner(schedule, self.part.model, self.data, SoloGroup(), self.meter, scene.seed, pipe)
        self.batch = [MicroBatch(tokens, tokens.roll(-1, -1), None) for tokens in scene.tokens]

    def turn(self) -> float:
        """Make the gradients, and give the mean loss."""
        self.meter.restart()
        self.trace = Trace(CPU)
        return self.runner.run(self.batch, 0, trace=self.trace)[0]

    def busy(self) -> float | None:
        """Seconds in which this rank has worked in the last turn."""
        if self.part.bed:
            return self.part.slept()
        both = zip(self.part.schedule.ranks[self.group.rank], self.trace.times, strict=True)
        return sum(end - begin for action, (begin, end) in both if not action.is_message)

    def simulated(self) -> Timeline | None:
        """The turn as the simulator sees it."""
        if self.part.bed:
            return self.part.simulated()
        return simulate(self.part.schedule, costs(self._timeline()))

    def traced(self) -> dict[str, float]:
        """What a run's log says of the turn."""
        return bubbles(self._timeline())

    def _timeline(self) -> Timeline:
        return self.trace.timeline(self.part.schedule, self.group.collect)

    def gradients(self) -> list[Tensor]:
        """This rank's own."""
        return [flat.gradient for flat in self.data.flats()]


class Torchs:
    """Torch's pipelining with one kind of schedule; live. As ``Ours``."""

    def __init__(self, scene: Scene, kind: str) -> None:
        self.part, group = Part.of(scene, kind, ours=False), process_group(scene.world, "gloo")
        spans, schedule = self.part.spans, self.part.schedule
        own = {stage: spans[stage] for stage in _own(schedule, scene.group.rank)}
        self.turn = Pipelining(self.part.model, own, schedule.stages, kind, scene.tokens, group).gradients

    def busy(self) -> float | None:
        return self.part.slept() if self.part.bed else None

    def simulated(self) -> Timeline | None:
        return self.part.simulated() if self.part.bed else None

    def traced(self) -> dict[str, float]:
        return {}

    def gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self.part.model.parameters() if parameter.grad is not None]
