"""The peer of the pipeline benchmark: torch.distributed.pipelining over gloo, with our model cut where we cut it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

from hpctrain.model.frame import Frame, Tokens
from hpctrain.model.transformer import Transformer
from hpctrain.plan.spans import Span

SCHEDULES = {"1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}
"""Those that are of one kind with ours, by our name; each does the same actions in the same order."""
IN_TWO = ("zb-v",)
"""Those that take a backward in two: torch goes through a stage's graph twice, so it must be of torch's own parts."""


class Pipelining:
    """This rank's stages of a pipeline, ``own`` by number, of ``count``; live. All ranks of the group make it."""

    def __init__(
        self,
        model: Transformer,
        own: Mapping[int, Span],
        count: int,
        kind: str,
        tokens: Tensor,
        group: dist.ProcessGroup,
    ) -> None:
        """``tokens`` are those of all micro-batches, ``[micro-batches, B, T]``; the next token is the target."""
        self.model, self.group, self.starts, self.ends = model, group, 0 in own, count - 1 in own
        self.tokens, self.targets = tokens.flatten(0, 1), tokens.roll(-1, -1).flatten(0, 1)
        device = torch.device("cpu")
        stages = [PipelineStage(Stage(model, span), n, count, device, group=group) for n, span in own.items()]
        several = len(stages) > 1
        loss = self._plain_loss if kind in IN_TWO else self._loss
        self.schedule = SCHEDULES[kind](stages if several else stages[0], len(tokens), loss, scale_grads=False)

    def gradients(self) -> float:
        """Make the gradients of the mean loss, and give that. All ranks call it."""
        self.model.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        target, told = (self.targets, losses) if self.ends else (None, None)
        self.schedule.step(*([self.tokens] if self.starts else []), target=target, losses=told, return_outputs=False)
        loss = sum((one.detach() for one in losses), torch.zeros((), dtype=torch.float64))
        dist.all_reduce(loss, group=self.group)
        return float(loss)

    def _loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.model.price(hidden, targets)[0] / self.tokens.numel()

    def _plain_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(hidden.flatten(0, 1), self.model.head.logits.weight)
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / self.tokens.numel()


class Stage(nn.Module):
    """What torch's pipelining takes: one stage as a module."""

    def __init__(self, model: Transformer, span: Span) -> None:
        super().__init__()
        self.model, self.span = model, span

    def forward(self, x: Tensor) -> Tensor:
        return self.model.through(self.span, x, Frame(Tokens.whole(*x.shape[:2])))
