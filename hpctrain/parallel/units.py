"""Part: a unit of parameters on this rank, and where its memory lies.

The ``nn.Parameter`` of each slot is a view into the unit's flat weights. A rank owns an interval of them: what it
updates, and whose reduced gradient it has. Where memory lies is up to the groups: weights that every rank of a node
keeps whole are one memory for all of them where that can be, and then a gather moves nothing; gradients lie in windows
that the ranks of a node reduce without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group, Handle, SoloGroup
from hpctrain.errors import ShapeError
from hpctrain.model.init import Fill
from hpctrain.optim.flat import Flat, Piece
from hpctrain.plan.units import Slot, Stage, Unit
from hpctrain.precision.masters import Masters, wide

ALIGN_BYTES = 64  # units begin on a cache line

Make = Callable[[int, torch.dtype], Tensor]


@dataclass(frozen=True)
class Ranks:
    """The groups that a model is shared by, as this rank is in them."""

    inner: Group
    """Share one copy of the model."""
    outer: Group = field(default_factory=SoloGroup)
    """Have the same part, in other copies."""
    near: Group | None = None
    """Of ``inner`` those with quick links, in its order and next to each other: the ranks of a node."""
    far: Group | None = None
    """Of ``inner`` those at the same place among their neighbours; given where ``near`` is."""

    def __post_init__(self) -> None:
        if self.near and self.far and self.far.rank * self.near.size + self.near.rank != self.inner.rank:
            raise ShapeError(
                f"rank {self.inner.rank} is number {self.near.rank} of its {self.near.size} neighbours, and these are"
                f" number {self.far.rank} of {self.far.size}",
                "neighbours follow one another in the group that shares a copy",
                "make both groups from the mesh, or split the group by rank // neighbours and rank % neighbours",
            )


@dataclass
class Second:
    """A copy of a unit's weights that neighbours share; live."""

    own: Tensor
    """This rank's interval of it."""
    sizes: tuple[int, ...]
    """Elements of each neighbour's interval."""
    start: int
    kept: bool = False
    """Whether it holds the weights of this step."""

    def keep(self, full: Tensor) -> None:
        """Take the own interval out of the whole weights."""
        self.own.copy_(full[self.start : self.start + self.own.numel()])
        self.kept = True


@dataclass(eq=False)
class Part:
    """A unit on this rank; live: its weights come and go, and it counts the gradients that have come."""

    unit: Unit
    parameters: Mapping[str, nn.Parameter]
    sizes: tuple[int, ...]
    """Elements of each rank's interval."""
    start: int
    """Where this rank's own interval begins."""
    full: Tensor
    """All weights; without memory while they are away."""
    own: Tensor
    """This rank's interval of the weights."""
    masters: Masters
    """The own interval in the format in which it is updated."""
    gradient: Tensor
    """The own interval of the reduced gradients."""
    buffer: Tensor | None
    """All gradients, as they come; None while there is no memory for them."""
    near: Second | None = None
    """What neighbours keep of the weights; None where they keep nothing."""
    pooled: Tensor | None = None
    """The lent memory that ``buffer`` is in."""
    whole: bool = False
    """Whether all weights are here, or on their way."""
    busy: bool = False
    """Whether its backward goes on; a forward then is a second one, made inside of it."""
    gathering: Handle = field(default_factory=Handle)
    reducing: Handle = field(default_factory=Handle)
    stale: set[str] = field(default_factory=set)
    """Names whose place in ``buffer`` holds nothing of this step."""
    missing: set[str] = field(default_factory=set)
    """Names whose gradient has not come in this backward."""
    reduced: bool = False
    """Whether ``gradient`` holds something of this step."""

    @property
    def names(self) -> set[str]:
        return {slot.name for slot in self.unit.slots}

    @property
    def stop(self) -> int:
        """Where this rank's own interval ends."""
        return self.start + self.own.numel()

    @property
    def master(self) -> Tensor:
        """What the optimizer updates."""
        return self.masters.tensors[0]

    def place(self, slot: Slot, whole: Tensor) -> Tensor:
        """A parameter's elements in a tensor of the whole unit, in the parameter's shape."""
        return whole[slot.start : slot.stop].view(slot.shape)

    def share(self, slot: Slot, own: Tensor) -> Tensor:
        """A parameter's elements in a tensor of the own interval: none, a run of them, or all."""
        start, stop = (min(max(edge, self.start), self.stop) - self.start for edge in (slot.start, slot.stop))
        return own[start:stop]

    def flats(self) -> list[Flat]:
        """What is to be updated, with and without decay; the same kinds on every rank, perhaps without an element."""
        edge = min(max(self.unit.decayed, self.start), self.stop) - self.start
        kinds = sorted({slot.decay for slot in self.unit.slots}, reverse=True)
        bounds = {True: (0, edge), False: (edge, self.own.numel())}
        return [self._flat(kind, *bounds[kind]) for kind in kinds]

    def _flat(self, decay: bool, first: int, last: int) -> Flat:
        pieces = []
        for slot in self.unit.slots:
            start, stop = max(slot.start, self.start + first), min(slot.stop, self.start + last)
            if slot.decay == decay and start < stop:
                offset = self.start + first
                pieces.append(Piece(slot.name, slot.shape, start - slot.start, start - offset, stop - offset))
        return Flat(self.master[first:last], self.gradient[first:last], decay, tuple(pieces))

    def show(self) -> None:
        """Give the weights their memory back."""
        self.full.untyped_storage().resize_(self.full.nbytes)
        self.bind()

    def bind(self) -> None:
        """Make every parameter a view of the weights."""
        for slot in self.unit.slots:
            self.parameters[slot.name].data = self.place(slot, self.full)

    def hide(self) -> None:
        """Take the weights' memory away. Views that a graph saved are whole again when the weights come back."""
        nothing = torch.full((), torch.nan, dtype=self.full.dtype, device=self.full.device)
        for slot in self.unit.slots:
            self.parameters[slot.name].data = nothing.expand(slot.shape)  # a read finds NaN, not somebody's memory
        self.full.untyped_storage().resize_(0)


def build(
    units: Sequence[Unit],
    parameters: Mapping[str, nn.Parameter],
    stage: Stage,
    ranks: Ranks,
    compute: torch.dtype | None = None,
    summed: torch.dtype | None = None,
    fill: Fill | None = None,
) -> list[Part]:
    """Give parameters flat memory. Collective over all groups.

    Weights multiply in ``compute``, their own format where not given, and gradients are added up in ``summed``, which
    is fp32 or wider where not given. ``fill`` says what the parameters are to be, their own values where not given; it
    is asked for what this rank owns alone.
    """
    inner = ranks.inner
    formats = [compute or parameters[unit.slots[0].name].dtype for unit in units]
    devices = [parameters[unit.slots[0].name].device for unit in units]
    place = _Place(units, devices, inner)
    fulls = place.apart(formats) if stage.weights else place.arena(formats, _common(inner))
    owns = place.owned(formats) if stage.weights else place.cut(fulls)
    readers = inner if inner.size > 1 else ranks.outer
    widths = [summed or wide(format) for format in formats]
    buffers = [None] * len(units) if stage.gradients else place.arena(widths, readers.buffer)
    gradients = [torch.zeros_like(own, dtype=width) for own, width in zip(owns, widths, strict=True)] \
        if stage.gradients else place.cut(buffers)  # fmt: skip
    made = []
    seconds = place.seconds(units, formats, ranks.near) if ranks.near and stage.weights else [None] * len(units)
    rows = zip(units, fulls, owns, gradients, buffers, seconds, strict=True)
    for unit, full, own, gradient, buffer, second in rows:
        mine = {slot.name: parameters[slot.name] for slot in unit.slots}
        made.append(_part(unit, mine, inner, full, own, gradient, buffer, second))
        _fill(made[-1], fill or _values(mine))
        made[-1].hide() if stage.weights else made[-1].bind()
    return made


def _part(unit, parameters, inner: Group, full: Tensor, own: Tensor, gradient, buffer, second) -> Part:
    bounds = [unit.interval(inner.size, rank) for rank in range(inner.size)]
    sizes, start = tuple(stop - start for start, stop in bounds), bounds[inner.rank][0]
    return Part(unit, parameters, sizes, start, full, own, Masters([own]), gradient, buffer, second)


@torch.no_grad()
def _fill(part: Part, fill: Fill) -> None:
    """Write the own interval; only that, since the ranks may share the memory."""
    for slot in part.unit.slots:
        share = part.share(slot, part.master)
        if share.numel():
            fill(slot.name, max(part.start - slot.start, 0), share)
    part.masters.round()


def _values(parameters: Mapping[str, nn.Parameter]) -> Fill:
    """Parameters' own elements, in row-major order whatever their strides are."""

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

    def apart(self, formats: Sequence[torch.dtype]) -> list[Tensor]:
        """Memory that comes and goes for each unit alone; gone now, so that there never is a whole model."""
        rows = zip(self.totals, formats, self.devices, strict=True)
        return [_gone(torch.empty(total, dtype=format, device=device)) for total, format, device in rows]

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


def _gone(memory: Tensor) -> Tensor:
    memory.untyped_storage().resize_(0)
    return memory


def _common(group: Group) -> Make:
    def make(numel: int, dtype: torch.dtype) -> Tensor:
        memory = group.common(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=group.device) if memory is None else memory

    return make


def _rounded(size: int, dtype: torch.dtype) -> int:
    step = max(1, ALIGN_BYTES // dtype.itemsize)
    return -(-size // step) * step
