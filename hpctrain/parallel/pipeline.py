"""Runner: interprets a schedule of a pipeline; plain gradient accumulation is a pipeline of one stage on one rank.

Each rank along ``pp`` does its own line of the schedule, one action after another. A forward begins with what the stage
before made, and keeps where its backward will begin; a message is started where the schedule has it and waited for
before the action that needs it, so that it travels while something is computed. What a stage made goes away once it is
sent: its backward needs no more than the place in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hpctrain.comm.group import Group, Handle, SoloGroup
from hpctrain.data.batch import IGNORE, MicroBatch
from hpctrain.model.noise import Noise
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.deferred import Deferred, Notes
from hpctrain.parallel.units import Part
from hpctrain.parallel.zero import Sharded
from hpctrain.plan.spans import TIED, Span, whole
from hpctrain.schedule.action import Action, Schedule, accumulate
from hpctrain.watch.meter import Meter
from hpctrain.watch.trace import UNTRACED, Untraced

Place = tuple[int, int]
"""A stage and a micro-batch."""

FORWARDS = ("F", "SEND_F", "RECV_F")
BRINGS = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}  # what brings an action what it needs of another rank
TAGS = {"F": 1, "B": 2, "tied": 3}


@dataclass(frozen=True)
class Pipe:
    """The pipeline as one of its ranks sees it."""

    spans: tuple[Span, ...]
    """What each stage has of the model."""
    schedules: Callable[[int], Schedule]
    """The schedule for a number of micro-batches."""
    group: Group = field(default_factory=SoloGroup)
    """Its ranks; each has the stages that ``schedules`` give it."""
    by_tokens: bool = False
    """Whether activations between stages are those of a part of the tokens, ``[n, D]``, and not ``[B, T, D]``."""
    deferred: Deferred = field(default_factory=Deferred)
    """What the products of the model put their weights' gradients off with."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """Of the loss that is trained, as ``cross_entropy`` names them."""


@dataclass
class Pass:
    """One step on its way through the schedule; live: it holds what later actions need."""

    step: int
    microbatches: Sequence[MicroBatch]
    schedule: Schedule
    tokens: int
    """Targets that count in this step, over all ranks."""
    loss: Tensor
    """The sum so far, in fp64, and the number of targets where ``training`` is off."""
    scale: float = 1.0
    """What the loss is multiplied by before its backward, so that small gradients do not vanish."""
    training: bool = True
    trace: Untraced = UNTRACED
    given: dict[Place, Tensor] = field(default_factory=dict)
    """What a stage begins its forward with, where it is there."""
    returned: dict[Place, Tensor] = field(default_factory=dict)
    """The gradient of what a stage made."""
    coming: dict[tuple[str, Place], Handle] = field(default_factory=dict)
    """What is on its way here; the op says whether as ``given`` or as ``returned``."""
    inputs: dict[Place, Tensor] = field(default_factory=dict)
    made: dict[Place, Tensor | GradientEdge] = field(default_factory=dict)
    """Where a stage's backward begins; the activation itself until it is sent."""
    pulls: dict[Place, Tensor] = field(default_factory=dict)
    """What the experts of a stage add to the loss."""
    notes: dict[Place, Notes] = field(default_factory=dict)
    sent: list[tuple[Handle, Tensor]] = field(default_factory=list)


class Runner:
    """Takes the micro-batches of a step through the model by a schedule.

    ``group`` is all the ranks whose samples make one step; ``seed`` is what dropout comes from.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: Transformer,
        data: Sharded,
        group: Group,
        meter: Meter,
        seed: int,
        pipe: Pipe | None = None,
    ) -> None:
        self.model, self.data, self.group, self.meter, self.seed = model, data, group, meter, seed
        self.schedule, self.pipe = schedule, pipe or Pipe(whole(model.shape), accumulate)
        self.actions = schedule.ranks[self.pipe.group.rank]
        self._last = {a.stage: i for i, a in enumerate(self.actions) if a.op in ("B", "W")}
        self._parts = _by_stage(data.parts, self.pipe.spans, [stage for stage in schedule.home if stage in self._last])

    def run(
        self, microbatches: Sequence[MicroBatch], step: int, scale: float = 1.0, trace: Untraced = UNTRACED
    ) -> tuple[float, int]:
        """Make the gradients of step ``step``; its mean loss and number of tokens over all ranks. Collective.

        The mean is over the tokens of all ranks and micro-batches, so none weighs more for being shorter. Gradients
        are ``scale`` times those of the mean loss. ``trace`` is told when each action runs.
        """
        self.data.begin()
        now = Pass(step, microbatches, self.schedule, self._count(microbatches), self._zeros((1,)), scale, trace=trace)
        trace.begin(self.pipe.group.barrier)
        for index, action in enumerate(self.actions):
            self._do(now, action, index == self._last.get(action.stage))
        with self.meter.phase("communication"):
            self._sent(now)
            self.data.finish()
            self._tie()
            self._everywhere(now.loss)
        return float(now.loss), now.tokens

    def evaluate(self, microbatches: Sequence[MicroBatch]) -> float:
        """The mean loss over the tokens of all ranks, without gradients. Collective."""
        loss, tokens = self.price(microbatches)
        return loss / max(tokens, 1)

    @torch.no_grad()
    def price(self, microbatches: Sequence[MicroBatch]) -> tuple[float, int]:
        """The loss summed over the tokens of all ranks, without gradients, and how many these are. Collective."""
        schedule = self.pipe.schedules(len(microbatches))
        now = Pass(0, microbatches, schedule, 1, self._zeros((2,)), training=False)
        for action in schedule.ranks[self.pipe.group.rank]:
            if action.op in FORWARDS:
                self._do(now, action)
        self._sent(now)
        self._everywhere(now.loss)
        return float(now.loss[0]), int(now.loss[1])

    def _do(self, now: Pass, action: Action, last: bool = False) -> None:
        """Do an action once what it needs of other ranks is there."""
        coming = now.coming.pop((BRINGS.get(action.op, ""), (action.stage, action.microbatch)), None)
        if coming is not None:
            with self.meter.phase("communication"):
                coming.wait()
        with now.trace.recording(action):
            self._OPS[action.op](self, now, action, last)

    # ---- computing -----------------------------------------------------------------------------------------------

    def _forward(self, now: Pass, action: Action, last: bool) -> None:
        place, span = (action.stage, action.microbatch), self.pipe.spans[action.stage]
        m = now.microbatches[action.microbatch]
        x = m.tokens if span.embed else self._given(now, place)
        noise = Noise(self.seed, now.step, m.samples) if now.training else None
        with self.meter.phase("forward"):
            frame = self.model.frame(m.tokens, m.documents, noise, balanced=now.training)
            made = self.model.through(span, x, frame)
            self._balance(now, place, self.model.imbalance(frame), m)
            if span.head:
                return self._price(now, place, made, m)
        crosses = now.schedule.crosses(action.stage)
        if now.training or crosses:
            now.made[place] = made
        if not crosses:
            now.given[action.stage + 1, action.microbatch] = made.detach()

    def _price(self, now: Pass, place: Place, made: Tensor, m: MicroBatch) -> None:
        """What the last stage ends with: the loss."""
        loss, tokens = self.model.price(made, m.targets, **(self.pipe.terms if now.training else {}))
        if now.training:
            loss = loss / max(now.tokens, 1)
            now.made[place] = loss * now.scale
            now.loss += loss.detach()
        else:
            now.loss += torch.stack((loss.double(), tokens.double()))

    def _balance(self, now: Pass, place: Place, more: Tensor | None, m: MicroBatch) -> None:
        """Count in what a stage's experts add to the loss of each of the micro-batch's targets, without waiting."""
        if more is not None:
            more = more.double() * (m.targets != IGNORE).sum() / max(now.tokens, 1)
            now.pulls[place] = more * now.scale
            now.loss += more.detach()

    def _backward(self, now: Pass, action: Action, last: bool) -> None:
        parts = self._parts[action.stage]
        with self.meter.phase("backward"), self.data.reducing(last, parts):
            self._back(now, (action.stage, action.microbatch))

    def _input_gradient(self, now: Pass, action: Action, last: bool) -> None:
        place = (action.stage, action.microbatch)
        notes = now.notes[place] = Notes()
        with self.meter.phase("backward"), self.pipe.deferred.put_off(notes), self.data.aside(notes):
            self._back(now, place)
            self.data.release(self._parts[action.stage])

    def _weight_gradient(self, now: Pass, action: Action, last: bool) -> None:
        notes = now.notes.pop((action.stage, action.microbatch))
        with self.meter.phase("backward"), self.data.reducing(last, self._parts[action.stage]):
            notes.done()

    def _back(self, now: Pass, place: Place) -> None:
        """Take the gradient of what a stage made back to what it began with."""
        stage, microbatch = place
        span, made = self.pipe.spans[stage], now.made.pop(place)
        gradient, pull = None if span.head else now.returned.pop(place), now.pulls.pop(place, None)
        if pull is None:
            torch.autograd.backward(made, gradient)
        else:
            torch.autograd.backward((made, pull), (gradient, None))
        if not span.embed:
            found = now.inputs.pop(place).grad
            now.returned[stage - 1, microbatch] = found

    def _given(self, now: Pass, place: Place) -> Tensor:
        x = now.given.pop(place)
        if now.training:
            now.inputs[place] = x.requires_grad_()
        return x

    # ---- messages ------------------------------------------------------------------------------------------------

    def _send_activation(self, now: Pass, action: Action, last: bool) -> None:
        place = (action.stage, action.microbatch)
        made = now.made[place]
        if now.training:
            now.made[place] = get_gradient_edge(made)
        else:
            del now.made[place]
        self._send(now, made.detach(), action, "F")

    def _send_gradient(self, now: Pass, action: Action, last: bool) -> None:
        self._send(now, now.returned.pop((action.stage - 1, action.microbatch)), action, "B")

    def _send(self, now: Pass, x: Tensor, action: Action, kind: str) -> None:
        to = now.schedule.home[action.peer.stage]
        now.sent.append((self.pipe.group.send(x, to, tag=TAGS[kind], later=True), x))
        while now.sent and now.sent[0][0].done():
            now.sent.pop(0)

    def _receive_activation(self, now: Pass, action: Action, last: bool) -> None:
        place = (action.stage, action.microbatch)
        now.given[place], now.coming[action.op, place] = self._receive(now, action, "F")

    def _receive_gradient(self, now: Pass, action: Action, last: bool) -> None:
        place = (action.stage, action.microbatch)
        now.returned[place], now.coming[action.op, place] = self._receive(now, action, "B")

    def _receive(self, now: Pass, action: Action, kind: str) -> tuple[Tensor, Handle]:
        m, width = now.microbatches[action.microbatch], self.model.shape.width
        tokens = self.model.between(*m.tokens.shape)
        shape = (tokens.stop - tokens.start,) if self.pipe.by_tokens else m.tokens.shape
        x = torch.empty(*shape, width, dtype=self.data.dtype, device=self.meter.device)
        source = now.schedule.home[action.peer.stage]
        return x, self.pipe.group.recv(x, source, tag=TAGS[kind], later=True)

    def _sent(self, now: Pass) -> None:
        while now.sent:
            now.sent.pop(0)[0].wait()

    def _tie(self) -> None:
        """Add up the gradients of a weight that the first and the last stage both use, where two ranks have it."""
        first, last = self.schedule.home[0], self.schedule.home[len(self.pipe.spans) - 1]
        group = self.pipe.group
        if first == last or not self.model.shape.tied or group.rank not in (first, last):
            return
        gradient = next(part.gradient for part in self.data.parts if TIED in part.names)
        theirs, peer = torch.empty_like(gradient), first + last - group.rank
        going = group.send(gradient.clone(), peer, tag=TAGS["tied"], later=True)
        group.recv(theirs, peer, tag=TAGS["tied"])
        going.wait()
        gradient.add_(theirs)  # of two numbers the sum is the same either way round

    def _everywhere(self, sums: Tensor) -> None:
        self.group.all_reduce(sums)
        self.pipe.group.all_reduce(sums)

    def _count(self, microbatches: Sequence[MicroBatch]) -> int:
        tokens = torch.tensor(sum(m.predicted for m in microbatches), device=self.meter.device)
        with self.meter.phase("communication"):
            self.group.all_reduce(tokens)
        return int(tokens)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.meter.device)

    _OPS = {
        "F": _forward,
        "B": _backward,
        "I": _input_gradient,
        "W": _weight_gradient,
        "SEND_F": _send_activation,
        "RECV_F": _receive_activation,
        "SEND_B": _send_gradient,
        "RECV_B": _receive_gradient,
    }


def _by_stage(parts: Sequence[Part], spans: Sequence[Span], stages: Sequence[int]) -> dict[int, list[Part]]:
    """The units whose gradients are all there when a stage has had its last backward, for each stage of a rank.

    The first stage's come last; it has a tied weight also where the last stage is on the same rank.
    """
    found: dict[int, list[Part]] = {stage: [] for stage in stages}
    for part in parts:
        names = part.names
        owners = (stage for stage in sorted(stages) if any(spans[stage].has(name, tied=True) for name in names))
        found[next(owners)].append(part)
    return found
