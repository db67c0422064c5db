"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon; Liu 2025, Muon is Scalable for LLM Training).

The step of a hidden layer's matrix is its momentum made orthogonal: all directions move by as much. That needs the
whole matrix, so each has an owner among the ranks: pieces travel to it, and pieces of the step travel back. Matrices
go in waves of one for each rank, the dearest first, so that the ranks of a wave have about as much to do; a wave's
pieces travel while the one before it is worked on. Steps are scaled to the size of AdamW's (Liu 2025), so one rate and
one decay serve both; AdamW does the rest of the parameters. A parameter of three dims, as experts have, is a stack of
matrices, each with an owner of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hpctrain.comm.group import Group, Handle
from hpctrain.config import OptimConfig
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.flat import Flat
from hpctrain.optim.optimizer import Entry, Optimizer, State
from hpctrain.plan.states import orthogonal

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5: steep at zero, between 0.7 and 1.2 after five steps
FORMATS = {"cuda": torch.bfloat16}  # of the iteration and of what travels; elsewhere the parameter's own
STEP = 0.2  # root mean square of AdamW's usual step, as a part of the rate


@dataclass(frozen=True)
class Matrix:
    """A parameter, or one matrix of a stack."""

    name: str
    """The parameter's."""
    number: int
    """Its place in the stack."""
    shape: tuple[int, int]
    decay: bool
    runs: tuple[tuple[int, int], ...]
    """Start and stop of what each rank has of the flattened matrix, in rank order."""

    @classmethod
    def all_of(cls, entry: Entry) -> list[Matrix]:
        """Those of a parameter: itself, or each of a stack."""
        *stack, rows, columns = entry.shape
        size = rows * columns
        starts = range(0, prod(stack) * size, size)
        runs = [tuple(_within(run, start, size) for run in entry.runs) for start in starts]
        return [cls(entry.name, number, (rows, columns), entry.decay, one) for number, one in enumerate(runs)]

    @property
    def size(self) -> int:
        """Elements of the whole matrix."""
        return prod(self.shape)


def _within(run: tuple[int, int], start: int, size: int) -> tuple[int, int]:
    """What of a run of a stack's elements is in the matrix that starts there, counted from it."""
    first, last = (min(max(edge - start, 0), size) for edge in run)
    return first, last


@dataclass(frozen=True)
class Gathered:
    """A wave on its way to the owners."""

    wave: list[Matrix]
    matrix: Tensor  # this rank's own, its pieces in rank order; empty where the wave has none for it
    sent: Tensor  # belongs to the group until the handle is done
    handle: Handle


class Muon(Optimizer):
    """Holds the momentum of this rank's elements of the matrices, and an AdamW for the other parameters."""

    def __init__(self, flats: Sequence[Flat], config: OptimConfig, group: Group, seed: int = 0) -> None:
        super().__init__(flats, config, group, seed)
        taken = [entry for entry in self.entries.values() if orthogonal(entry.name, entry.shape, config.muon_except)]
        self.waves = waves([matrix for entry in taken for matrix in Matrix.all_of(entry)], group.size)
        self.momentum = {entry.name: torch.zeros_like(self.here(entry.name)) for entry in taken}
        self.rest = AdamW(self.parts(lambda entry: entry.name not in self.momentum), config, group)
        self.format = FORMATS.get(self.like.device.type, self.like.dtype)

    def states(self) -> dict[str, list[State]]:
        return {"momentum": [State(name, x) for name, x in self.momentum.items()], **self.rest.states()}

    @torch.no_grad()
    def update(self, rate: float, step: int) -> None:
        self.rest.update(rate, step)
        coming = [self._gather(wave) for wave in self.waves[:1]]
        for number in range(1, len(self.waves) + 1):
            coming += [self._gather(wave) for wave in self.waves[number : number + 1]]
            gathered = coming.pop(0)
            self._move(gathered.wave, self._orthogonal(gathered), rate)

    def _gather(self, wave: list[Matrix]) -> Gathered:
        """Send this rank's pieces of a wave to the owners."""
        sent = torch.cat([self._pull(one).to(self.format) for one in wave])
        own = wave[self.group.rank] if self.group.rank < len(wave) else None
        matrix = sent.new_empty(own.size if own else 0)
        sizes = {"sizes": self._sizes(wave), "out_sizes": self._parts(wave)}
        return Gathered(wave, matrix, sent, self.group.all_to_all(matrix, sent, **sizes, later=True))

    def _mine(self, one: Matrix, whole: Tensor) -> Tensor:
        """This rank's elements of a matrix, out of those of its parameter."""
        start, stop = one.runs[self.group.rank]
        before = max(one.number * one.size - self.entries[one.name].runs[self.group.rank][0], 0)
        return whole[before : before + stop - start]

    def _pull(self, one: Matrix) -> Tensor:
        """Take the gradient of this rank's elements into their momentum, and give it looking one step ahead.

        The operations round once each, so that an element has the same bits whatever lies beside it.
        """
        whole, part = self.here(one.name, [flat.gradient for flat in self.flats]), self.config.momentum
        gradient = self._mine(one, whole).to(self.like.dtype)
        mean = self._mine(one, self.momentum[one.name]).mul_(part).add_(gradient * (1 - part))
        return (gradient * (1 - part)).add_(mean * part)

    def _orthogonal(self, gathered: Gathered) -> Tensor:
        """This rank's matrix of a wave made orthogonal, and the pieces of all of them sent back: its own elements."""
        gathered.handle.wait()
        wave, matrix, back = gathered.wave, gathered.matrix, torch.empty_like(gathered.sent)
        if matrix.numel():
            own = wave[self.group.rank]
            order = sorted(range(self.group.size), key=lambda rank: own.runs[rank])
            pieces = matrix.split(self._parts(wave))
            whole = torch.cat([pieces[rank] for rank in order]).view(own.shape)
            whole = newton_schulz(whole, self.config.ns_steps).reshape(-1)
            matrix = torch.cat([whole[start:stop] for start, stop in own.runs])
        self.group.all_to_all(back, matrix, sizes=self._parts(wave), out_sizes=self._sizes(wave))
        return back

    def _move(self, wave: list[Matrix], steps: Tensor, rate: float) -> None:
        sizes = self._sizes(wave)[: len(wave)]
        for one, step in zip(wave, steps.split(sizes), strict=True):
            x = self._mine(one, self.here(one.name))
            x.mul_(1 - rate * self.config.decay * one.decay)
            x.sub_(step.to(x.dtype).mul_(rate * STEP * math.sqrt(max(one.shape))))

    def _sizes(self, wave: list[Matrix]) -> list[int]:
        """Elements of this rank in the matrix of each owner."""
        runs = [one.runs[self.group.rank] for one in wave]
        return [stop - start for start, stop in runs] + [0] * (self.group.size - len(wave))

    def _parts(self, wave: list[Matrix]) -> list[int]:
        """Elements of each rank in the matrix of this one."""
        if self.group.rank >= len(wave):
            return [0] * self.group.size
        return [stop - start for start, stop in wave[self.group.rank].runs]


def waves(matrices: Sequence[Matrix], ranks: int) -> list[list[Matrix]]:
    """The matrices in rounds, at each place the owner's; the dearest first, so that those of a round cost alike."""
    order = sorted(matrices, key=lambda one: (-min(one.shape) * one.size, one.name, one.number))
    return [order[start : start + ranks] for start in range(0, len(order), ranks)]


def newton_schulz(x: Tensor, steps: int) -> Tensor:
    """``x`` with all singular values brought near 1, by a polynomial that is applied again and again.

    The format of ``x`` is that of all products: bf16 is enough, as the iteration corrects itself.
    """
    wide = x.T if x.shape[0] > x.shape[1] else x
    wide = wide / wide.norm().clamp(min=1e-7)  # no singular value is larger than this norm
    one, three, five = COEFFICIENTS
    for _ in range(steps):
        gram = wide @ wide.T
        factor = torch.addmm(gram, gram, gram, beta=three, alpha=five)
        wide = torch.addmm(wide, factor, wide, beta=one)
    return wide.T if x.shape[0] > x.shape[1] else wide
