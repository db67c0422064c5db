"""Data parallelism: each rank takes other samples, and gradients are summed over the ranks.

Parameters and gradients live in flat buckets: a bucket is one piece of memory for the weights and one for their
gradients, and each ``nn.Parameter`` is a view into it. Buckets are filled from the model's end, the order in which
the backward makes gradients, so that one bucket is reduced while the backward goes on with the next. Gradient
memory comes from the group, which can place it where the ranks of a node reduce it without a copy.

Gradients are sums: the loss is divided by the number of tokens of the whole step before the backward, so the sum over
ranks and micro-batches is the gradient of the mean over all tokens, however they are dealt out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group, Handle
from hpctrain.optim.flat import Flat, Piece


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its bucket, in elements."""

    name: str
    shape: torch.Size
    start: int
    stop: int

    def of(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat tensor, in the parameter's own shape."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass
class Bucket:
    """Parameters that are reduced together; live, since it counts the gradients that have come."""

    slots: tuple[Slot, ...]
    flat: Flat
    stale: set[str] = field(default_factory=set)
    """Names whose gradient has not come in this step: their memory still holds the step before."""
    missing: set[str] = field(default_factory=set)
    """Names whose gradient has not come in this backward."""
    handle: Handle | None = None


class DataParallel:
    """The parameters of a model in flat buckets, their gradients summed over ``group``.

    Parameters with and without weight decay go to different buckets. Collective: all ranks of the group build it,
    from models whose parameters have the same names and shapes in the same order; the weights are not sent, since
    every rank makes the same ones.
    """

    def __init__(self, model: nn.Module, decays: dict[str, bool], group: Group, bucket_bytes: int) -> None:
        self.group = group
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.buckets = [_fill(names, self._parameters, decays[names[0]], group) for names in
                        _fit(self._parameters, decays, bucket_bytes)]  # fmt: skip
        self._place = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        self._last = False
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._came(name))

    def flats(self) -> list[Flat]:
        """The buckets as an optimizer takes them."""
        return [bucket.flat for bucket in self.buckets]

    def begin(self) -> None:
        """Forget the gradients of the step before; call it before the first micro-batch."""
        for parameter in self._parameters.values():
            parameter.grad = None
        for bucket in self.buckets:
            bucket.stale = {slot.name for slot in bucket.slots}

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Reduce each bucket as soon as its gradients are made; put the step's last backward inside.

        Collective. Buckets leave in one fixed order on every rank, also those that got no gradient on this one.
        """
        for bucket in self.buckets:
            bucket.missing, bucket.handle = {slot.name for slot in bucket.slots}, None
        self._next, self._last = 0, True
        yield
        self._last = False
        for bucket in self.buckets[self._next :]:
            self._send(bucket)

    def finish(self) -> None:
        """Return when every gradient is the sum over the group."""
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None

    def _came(self, name: str) -> None:
        """Take in a gradient: autograd makes a step's first one aside, and adds the others to it where it then lies."""
        bucket, slot = self._place[name]
        if name in bucket.stale:
            bucket.stale.discard(name)
            parameter, place = self._parameters[name], slot.of(bucket.flat.gradient)
            place.copy_(parameter.grad)
            parameter.grad = place
        if self._last:
            bucket.missing.discard(name)
            while self._next < len(self.buckets) and not self.buckets[self._next].missing:
                self._send(self.buckets[self._next])
                self._next += 1

    def _send(self, bucket: Bucket) -> None:
        for name in bucket.stale:  # not used in this step
            self._place[name][1].of(bucket.flat.gradient).zero_()
        bucket.handle = self.group.all_reduce(bucket.flat.gradient, later=True)


def _fit(parameters: dict[str, nn.Parameter], decays: dict[str, bool], limit: int) -> Iterable[list[str]]:
    """Deal the names, last first, into buckets of one dtype and one kind of decay, each below ``limit`` bytes."""
    open_buckets: dict[tuple[torch.dtype, bool], tuple[list[str], int]] = {}
    for name, parameter in reversed(parameters.items()):
        kind = (parameter.dtype, decays[name])
        names, size = open_buckets.get(kind, ([], 0))
        if names and size + parameter.nbytes > limit:
            yield names
            names, size = [], 0
        open_buckets[kind] = ([*names, name], size + parameter.nbytes)
    yield from (names for names, _ in open_buckets.values())


def _fill(names: list[str], parameters: dict[str, nn.Parameter], decay: bool, group: Group) -> Bucket:
    """Move parameters into one flat piece of memory and give their gradients another."""
    slots, stop = [], 0
    for name in names:
        start, stop = stop, stop + parameters[name].numel()
        slots.append(Slot(name, parameters[name].shape, start, stop))
    example = parameters[names[0]]
    pieces = tuple(Piece(slot.name, tuple(slot.shape), 0, slot.start, slot.stop) for slot in slots)
    flat = Flat(example.new_empty(stop), group.buffer(stop, example.dtype).to(example.device), decay, pieces)
    for slot in slots:
        slot.of(flat.parameter).copy_(parameters[slot.name].data)
        parameters[slot.name].data = slot.of(flat.parameter)
    return Bucket(tuple(slots), flat)
