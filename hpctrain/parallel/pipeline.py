"""Runner: interprets a schedule of forwards and backwards; plain gradient accumulation is a pipeline of one stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.data.batch import MicroBatch
from hpctrain.model.noise import Noise
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.zero import Sharded
from hpctrain.schedule.action import Schedule
from hpctrain.watch.meter import Meter


@dataclass
class Pass:
    """One step on its way through the schedule; live: it holds the losses that wait for their backward."""

    step: int
    microbatches: Sequence[MicroBatch]
    tokens: int
    """Targets that count in this step, over all ranks."""
    loss: Tensor
    """The sum so far, in fp64."""
    scale: float
    """What the loss is multiplied by before its backward, so that small gradients do not vanish."""
    waiting: dict[int, Tensor] = field(default_factory=dict)


class Runner:
    """Takes the micro-batches of a step through the model by a schedule.

    ``group`` is all the ranks whose samples make one step; ``seed`` is what dropout comes from.
    """

    def __init__(
        self, schedule: Schedule, model: Transformer, data: Sharded, group: Group, meter: Meter, seed: int
    ) -> None:
        self.model, self.data, self.group, self.meter, self.seed = model, data, group, meter, seed
        self.actions = schedule.ranks[0]
        self._last_backward = max(i for i, action in enumerate(self.actions) if action.op == "B")

    def run(self, microbatches: Sequence[MicroBatch], step: int, scale: float = 1.0) -> tuple[float, int]:
        """Make the gradients of step ``step``; its mean loss and number of tokens over all ranks. Collective.

        The mean is over the tokens of all ranks and micro-batches, so none weighs more for being shorter. Gradients
        are ``scale`` times those of the mean loss.
        """
        self.data.begin()
        now = Pass(step, microbatches, self._count(microbatches), self._zeros(()), scale)
        for index, action in enumerate(self.actions):
            self._OPS[action.op](self, now, action.microbatch, index == self._last_backward)
        with self.meter.phase("communication"):
            self.data.finish()
            self.group.all_reduce(now.loss)
        return float(now.loss), now.tokens

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[MicroBatch]) -> float:
        """The mean loss over the tokens of all ranks, without gradients. Collective."""
        sums = self._zeros((2,))
        for m in microbatches:
            loss, tokens = self.model.loss(m.tokens, m.targets, m.documents)
            sums += torch.stack((loss.double(), tokens.double()))
        self.group.all_reduce(sums)
        return float(sums[0] / sums[1].clamp(min=1))

    def _forward(self, now: Pass, microbatch: int, last: bool) -> None:
        m = now.microbatches[microbatch]
        with self.meter.phase("forward"):
            loss, _ = self.model.loss(m.tokens, m.targets, m.documents, Noise(self.seed, now.step, m.samples))
        now.waiting[microbatch] = loss / max(now.tokens, 1)

    def _backward(self, now: Pass, microbatch: int, last: bool) -> None:
        loss = now.waiting.pop(microbatch)
        with self.meter.phase("backward"), self.data.reducing(last):
            (loss * now.scale).backward()
        now.loss += loss.detach()

    def _count(self, microbatches: Sequence[MicroBatch]) -> int:
        tokens = torch.tensor(sum(m.predicted for m in microbatches), device=self.meter.device)
        with self.meter.phase("communication"):
            self.group.all_reduce(tokens)
        return int(tokens)

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=self.meter.device)

    _OPS = {"F": _forward, "B": _backward}
