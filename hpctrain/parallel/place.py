"""Place: where the memory of all units lies, and what fills it at first.

Weights that every rank of a node keeps whole are one memory for all of them where that can be, and then a gather moves
nothing; what other ranks gather or reduce from lies in windows, where they read it without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group
from hpctrain.model.init import Fill
from hpctrain.parallel.units import Alone, Part, Ranks, Second
from hpctrain.plan.layout import Box
from hpctrain.plan.units import Slot, Stage, Unit
from hpctrain.precision.masters import Masters, wide

ALIGN_BYTES = 64  # units begin on a cache line

Make = Callable[[int, torch.dtype], Tensor]


def whole_box(slot: Slot) -> Box:
    """All of a parameter."""
    return Box((0,) * len(slot.shape), slot.shape)


def build(
    units: Sequence[Unit],
    parameters: Mapping[str, nn.Parameter],
    stage: Stage,
    ranks: Ranks,
    compute: torch.dtype | None = None,
    summed: torch.dtype | None = None,
    fill: Fill | None = None,
    box: Callable[[Slot], Box] = whole_box,
) -> list[Part]:
    """Give parameters flat memory. Collective over all groups.

    Weights multiply in ``compute``, their own format where not given, and gradients are added up in ``summed``, which
    is fp32 or wider where not given. ``fill`` says what the parameters are to be, their own values where not given; it
    is asked for what this rank owns alone. ``box`` says what of a cut parameter is here.
    """
    inner = ranks.inner
    formats = [compute or parameters[unit.slots[0].name].dtype for unit in units]
    devices = [parameters[unit.slots[0].name].device for unit in units]
    place = _Place(units, devices, inner)
    alone = place.apart(formats) if stage.weights else [None] * len(units)
    fulls = [one.tensor for one in alone] if stage.weights else place.arena(formats, common(inner))
    owns = place.owned(formats) if stage.weights else place.cut(fulls)
    readers = inner if inner.size > 1 else ranks.outer
    widths = [summed or wide(format) for format in formats]
    buffers = [None] * len(units) if stage.gradients else place.arena(widths, readers.buffer)
    gradients = [torch.zeros_like(own, dtype=width) for own, width in zip(owns, widths, strict=True)] \
        if stage.gradients else place.cut(buffers)  # fmt: skip
    made = []
    seconds = place.seconds(units, formats, ranks.near) if ranks.near and stage.weights else [None] * len(units)
    rows = zip(units, fulls, owns, gradients, buffers, seconds, alone, strict=True)
    for unit, full, own, gradient, buffer, second, place_at in rows:
        mine = {slot.name: parameters[slot.name] for slot in unit.slots}
        boxes = {slot.name: box(slot) for slot in unit.slots}
        made.append(_part(unit, mine, inner, full, own, gradient, buffer, boxes, second, place_at))
        _fill(made[-1], fill or _values(mine))
        made[-1].hide() if stage.weights else made[-1].bind()
    return made


def _part(
    unit, parameters, inner: Group, full: Tensor, own: Tensor, gradient, buffer, boxes, second, place_at
) -> Part:
    bounds = [unit.interval(inner.size, rank) for rank in range(inner.size)]
    sizes, start = tuple(stop - start for start, stop in bounds), bounds[inner.rank][0]
    return Part(unit, parameters, sizes, start, full, own, Masters([own]), gradient, buffer, boxes, second, place_at)


@torch.no_grad()
def _fill(part: Part, fill: Fill) -> None:
    """Write the own interval; only that, since the ranks may share the memory."""
    for slot in part.unit.slots:
        share = part.share(slot, part.master)
        if share.numel():
            fill(slot.name, part.first(slot), share)
    part.masters.round()


def _values(parameters: Mapping[str, nn.Parameter]) -> Fill:
    """Parameters' own elements, in row-major order whatever their strides are; none of them is cut."""

    def fill(name: str, first: int, out: Tensor) -> None:
        out.copy_(parameters[name].detach().reshape(-1)[first : first + out.numel()])

    return fill


class _Place:
    """Where the memory of all units is to lie."""

    def __init__(self, units: Sequence[Unit], devices: Sequence[torch.device], inner: Group) -> None:
        self.totals = [unit.total for unit in units]
        self.bounds = [unit.interval(inner.size, inner.rank) for unit in units]
        self.largest = [stop - start for start, stop in (unit.interval(inner.size, 0) for unit in units)]
        self.devices, self.inner = devices, inner

    def apart(self, formats: Sequence[torch.dtype]) -> list[Alone]:
        """Memory that comes and goes for each unit alone; hidden now, so that there never is a whole model."""
        rows = zip(self.totals, formats, self.devices, strict=True)
        return [Alone(total, format, device) for total, format, device in rows]

    def arena(self, formats: Sequence[torch.dtype], make: Make) -> list[Tensor]:
        """One memory for all units of a format."""
        return self._laid(self.totals, formats, make)

    def owned(self, formats: Sequence[torch.dtype]) -> list[Tensor]:
        """Memory for the own intervals, from which the other ranks gather."""
        laid = self._laid(self.largest, formats, self.inner.buffer)
        return [memory[: stop - start] for memory, (start, stop) in zip(laid, self.bounds, strict=True)]

    def seconds(self, units: Sequence[Unit], formats: Sequence[torch.dtype], near: Group) -> list[Second | None]:
        """Memory for what neighbours keep of units that come and go."""
        bounds = [[unit.interval(near.size, rank) for rank in range(near.size)] for unit in units]
        sizes = [tuple(stop - start for start, stop in edges) for edges in bounds]
        laid = self._laid(
            [0 if unit.held else rows[0] for unit, rows in zip(units, sizes, strict=True)], formats, near.buffer
        )
        return [
            None if unit.held else Second(memory[: rows[near.rank]], rows, edges[near.rank][0])
            for unit, memory, rows, edges in zip(units, laid, sizes, bounds, strict=True)
        ]

    def cut(self, memories: Sequence[Tensor]) -> list[Tensor]:
        """The own intervals of memory for whole units."""
        return [memory[start:stop] for memory, (start, stop) in zip(memories, self.bounds, strict=True)]

    def _laid(self, sizes: Sequence[int], formats: Sequence[torch.dtype], make: Make) -> list[Tensor]:
        laid: dict[int, Tensor] = {}
        for key in dict.fromkeys(zip(formats, self.devices, strict=True)):
            chosen = [i for i, own in enumerate(zip(formats, self.devices, strict=True)) if own == key]
            lengths = [_rounded(sizes[i], key[0]) for i in chosen]
            memory = make(sum(lengths), key[0]).to(key[1])
            laid |= {i: part[: sizes[i]] for i, part in zip(chosen, memory.split(lengths), strict=True)}
        return [laid[i] for i in range(len(sizes))]


def common(group: Group) -> Make:
    """Makes flat memory, one for all ranks of a node where these can share it. Collective."""

    def make(numel: int, dtype: torch.dtype) -> Tensor:
        memory = group.common(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=group.device) if memory is None else memory

    return make


def _rounded(size: int, dtype: torch.dtype) -> int:
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    return -(-size // step) * step
