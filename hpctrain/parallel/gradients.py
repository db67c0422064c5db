"""Gradients: on their way from the backward into what each rank owns of them.

A gradient goes to its place in its unit's flat buffer as soon as the backward has made it. When a unit has all of its
gradients, they leave for their owners, while the backward goes on with the unit before. Units leave in one fixed order
on every rank, the reverse of the module's, whatever was used on it. Buffers stay, or are lent from a pool of two where
ranks share the gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Handle
from hpctrain.errors import HpctrainError
from hpctrain.parallel.deferred import Notes
from hpctrain.parallel.travel import Hop, Travel
from hpctrain.parallel.units import Part
from hpctrain.plan.units import Slot
from hpctrain.precision.masters import accumulate

Kind = tuple[bool, torch.dtype, torch.device]


@dataclass(frozen=True)
class Sent:
    """A unit's gradients on their way into the own interval."""

    part: Part
    own: Tensor
    pooled: Tensor | None
    """The lent memory that they lie in."""
    handle: Handle
    then: Sequence[Hop]
    """The legs of the journey that are still to come."""
    last: bool


class Gradients:
    """Of the units of a model; live.

    ``complete`` is told of each unit that has all its gradients of a backward. ``shared`` says whether ranks share
    gradients, so that buffers do not stay.
    """

    def __init__(self, parts: Sequence[Part], travel: Travel, shared: bool, complete: Callable[[Part], None]) -> None:
        self.parts, self.travel, self.shared, self._complete = parts, travel, shared, complete
        self._place: dict[str, tuple[Part, Slot]] = {s.name: (part, s) for part in parts for s in part.unit.slots}
        self.pool = self._pool() if shared else {kind: [] for kind in map(_kind, parts)}
        self._sent: deque[Sent] = deque()  # on the first leg, in order
        self._near: deque[Sent] = deque()  # on the last one of several
        self._order: list[Part] = []  # whose gradients are still to be sent in this backward
        self._inside: set[Part] = set()  # whose gradients this backward completes
        self._last = False
        self.notes: Notes | None = None  # where gradients go that belong to a later moment
        for name, (part, _) in self._place.items():
            part.parameters[name].register_post_accumulate_grad_hook(partial(self._came, name))

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for part in self.parts:
            for parameter in part.parameters.values():
                parameter.grad = None
            part.stale, part.reduced = part.names, False
        self._inside, self._order = set(), []  # whatever a step before it that failed has left

    @contextmanager
    def reducing(self, last: bool, parts: Sequence[Part]) -> Iterator[None]:
        """Around a backward that completes the gradients of ``parts``. Collective."""
        if not (last or self.shared):
            yield
            return
        for part in parts:
            part.missing = part.names
        self._order, self._inside, self._last = list(parts), set(parts), last
        yield
        self._inside = set()
        while self._order:
            self._send(self._order.pop())

    def finish(self) -> None:
        """Return when every own interval has the sum over all ranks. Collective."""
        while self._sent:
            self._settle()
        while self._near:
            self._arrive(self._near.popleft())
        for part in self.parts:
            part.reducing.wait()
            if not part.reduced:
                part.gradient.zero_()

    def _came(self, name: str, parameter: nn.Parameter) -> None:
        """Take a gradient that the backward made; there is none where it is put off."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and self.notes is not None:
            self.notes.add(partial(self._take, name, gradient))
        elif gradient is not None:
            self._take(name, gradient)

    def _take(self, name: str, gradient: Tensor) -> None:
        """Bring a gradient to its place."""
        part, slot = self._place[name]
        if part in self._inside and name not in part.missing:
            raise _twice(name)
        if part.buffer is None:
            self._lend(part)
        accumulate(part.place(slot, part.buffer), gradient, name in part.stale)
        part.stale.discard(name)
        part.missing.discard(name)
        if part in self._inside and not part.missing:
            self._complete(part)
            while self._order and not self._order[-1].missing:
                self._send(self._order.pop())

    # ---- journeys ------------------------------------------------------------------------------------------------

    def _send(self, part: Part) -> None:
        """Start to sum a unit's gradients."""
        if part.buffer is None:
            self._lend(part)
        for slot in part.unit.slots:
            if slot.name in part.stale:  # not used on this rank
                part.place(slot, part.buffer).zero_()
        for start, stop in part.gaps():
            part.buffer[start:stop].zero_()
        own = self._target(part)
        first, *then = self.travel.reduce(part, own)
        handle = first()
        if self.travel.codes:  # nobody reads the buffer any more
            self._give_back(part, part.pooled)
            part.pooled = None
        self._sent.append(Sent(part, own, part.pooled, handle, then, self._last))
        if self.shared:
            part.buffer = part.pooled = None  # the next micro-batch may come before these are away
        while self._sent and self._sent[0].handle.done():  # later is as right: the order is the same
            self._settle()

    def _target(self, part: Part) -> Tensor:
        """Where the sum is to come: into the buffer, unless that is lent to others meanwhile."""
        apart = self.shared and self.travel.codes
        return torch.empty_like(part.gradient) if apart else part.buffer[part.start : part.stop]

    def _settle(self) -> None:
        """See what was sent first through its first leg; the second one is started then, and waited for at the end.

        When that is differs between ranks, so nothing but ``finish`` may wait for a second leg.
        """
        sent = self._sent.popleft()
        sent.handle.wait()
        if sent.then:
            self._near.append(replace(sent, handle=sent.then[0]()))
        else:
            self._arrive(sent)

    def _arrive(self, sent: Sent) -> None:
        """Bring gradients into the own interval."""
        part = sent.part
        sent.handle.wait()
        if part.gradient.data_ptr() != sent.own.data_ptr():
            accumulate(part.gradient, sent.own, not part.reduced)
        part.reduced = True
        self._give_back(part, sent.pooled)
        if sent.last:
            part.reducing = self.travel.ranks.outer.all_reduce(part.gradient, later=True)

    # ---- memory for gradients that do not stay -------------------------------------------------------------------

    def _lend(self, part: Part) -> None:
        """Give a unit memory for all its gradients: of the pool, or its own where more are at work than usual."""
        free = self.pool[_kind(part)]
        while not free and any(_kind(sent.part) == _kind(part) for sent in self._sent):
            self._settle()
        part.pooled = free.pop() if free else None
        memory = torch.empty(part.unit.total, dtype=part.gradient.dtype, device=part.gradient.device)
        part.buffer = memory if part.pooled is None else part.pooled[: part.unit.total]
        part.stale = part.names

    def _give_back(self, part: Part, pooled: Tensor | None) -> None:
        if pooled is not None:
            self.pool[_kind(part)].append(pooled)

    def _pool(self) -> dict[Kind, list[Tensor]]:
        """Memory for the gradients of two units at once, and of one that is held."""
        pool: dict[Kind, list[Tensor]] = {}
        for kind in dict.fromkeys(map(_kind, self.parts)):
            held, dtype, device = kind
            size = max(part.unit.total for part in self.parts if _kind(part) == kind)
            make = self.travel.ranks.inner.buffer
            pool[kind] = [make(size, dtype).to(device) for _ in range(1 if held else 2)]
        return pool


def _kind(part: Part) -> Kind:
    """What units that use the same lent memory have in common."""
    return part.unit.held, part.gradient.dtype, part.gradient.device


def _twice(name: str) -> HpctrainError:
    return HpctrainError(
        f"{name} got a second gradient while the first one was on its way to the other ranks",
        "reducing() sends a parameter's gradient as soon as a backward has made it",
        "put one backward in each reducing(), with last=False for all but the last, and recompute without re-entrance",
    )
