"""Sharded: a model whose optimizer states, gradients and weights ranks share instead of each having them all.

Data parallelism and the stages of ZeRO (Rajbhandari 2020) are one mechanism with three switches, the rows of
``hpctrain.plan.units.STAGES``. Ranks of one group share a copy of the model: each owns an interval of every unit.
Ranks of a second group have replicas of the same intervals; either group may be of one rank. A step is

    gather          the weights of a unit before it is used (``conveyor.py``)
    backward        each gradient goes to its place in the unit's flat buffer
    reduce-scatter  a unit's gradients into the own interval, as soon as they are there, while the backward goes on
    all-reduce      the own interval over the replicas
    update          of the own interval, by any optimizer over ``flats()``

With nothing shared, gather and reduce-scatter run over a group of one, and what is left is data parallelism.

Gradients are sums: the loss is divided by the number of tokens of the whole step before the backward, so the sum over
ranks and micro-batches is the gradient of the mean over all tokens, however they are dealt out. They are summed over
micro-batches in fp32 or wider, and are in ``flats()``, not in ``parameter.grad``.

What stays whole on every rank: frozen parameters, parameters without elements, and buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group, SoloGroup
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.model.init import Fill
from hpctrain.optim.flat import Flat
from hpctrain.optim.optimizer import Optimizer
from hpctrain.parallel.conveyor import Conveyor
from hpctrain.parallel.deferred import Notes
from hpctrain.parallel.gradients import Gradients
from hpctrain.parallel.place import build, whole_box
from hpctrain.parallel.travel import Travel
from hpctrain.parallel.units import Part, Ranks
from hpctrain.plan.layout import Box, Layout
from hpctrain.plan.units import SHARD, STAGES, Member, Slot, Stage, Unit, arrange, room

Kept = dict[str, tuple[Layout, Tensor]]
"""What a checkpoint keeps, by name: as ``hpctrain.checkpoint.state.Held`` takes it."""


@dataclass(frozen=True)
class Formats:
    """In what numbers are; their own format where None."""

    compute: torch.dtype | None = None
    """In which weights multiply."""
    summed: torch.dtype | None = None
    """In which gradients are added up, and travel; fp32 or wider where None."""
    gathered: str | None = None
    """A key of ``precision.coded.FORMS``: weights on their way to other ranks."""
    reduced: str | None = None
    """Likewise gradients."""


class Sharded:
    """A module's parameters, shared by the ranks of ``ranks.inner``, with replicas on those of ``ranks.outer``; live.

    Collective: all ranks of all groups make it, from modules with the same parameters in the same order, and take the
    same steps. ``units`` cover just the parameters that have a gradient and elements. ``fill`` gives the weights of the
    first step, by default what the parameters are; ``box`` what of a parameter is on this rank, where tensor
    parallelism cuts it.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[Unit],
        stage: Stage,
        ranks: Ranks,
        formats: Formats = Formats(),
        gather_bytes: int | None = None,
        fill: Fill | None = None,
        box: Callable[[Slot], Box] = whole_box,
    ) -> None:
        self.module, self.stage, self.group, self.outer = module, stage, ranks.inner, ranks.outer
        self._parameters = dict(module.named_parameters())
        units, compute = tuple(units), formats.compute
        self.parts = build(units, self._parameters, stage, ranks, compute, formats.summed, fill, box)
        self._place = {slot.name: (part, slot) for part in self.parts for slot in part.unit.slots}
        self.kinds = _kinds(self.parts)
        self._buffers = [buffer for name, buffer in module.named_buffers() if name in module.state_dict()]
        travel = Travel(ranks, formats.gathered, formats.reduced)
        self.conveyor = Conveyor(self.parts, travel, not stage.weights, room(units, _name(compute), gather_bytes))
        self.conveyor.attach(module, dict(module.named_modules()))
        self.gradients = Gradients(self.parts, travel, stage.gradients, self.conveyor.release)

    def flats(self) -> list[Flat]:
        """What this rank owns, as an optimizer takes it; ``group`` is who owns the rest."""
        return [flat for flats in self.kinds.values() for flat in flats]

    @property
    def dtype(self) -> torch.dtype:
        """In which weights multiply."""
        return self.parts[0].full.dtype

    def begin(self) -> None:
        """Forget the gradients of the step before; call it before the first micro-batch. Collective."""
        self.gradients.begin()
        self.conveyor.begin()

    @contextmanager
    def reducing(self, last: bool = True, parts: Sequence[Part] | None = None) -> Iterator[None]:
        """Put every backward inside; ``last`` says whether it is the step's last one. Collective.

        Units are reduced in one fixed order on every rank, also those that got no gradient on this one. ``parts`` are
        those that this backward is about, where it is not all of them.
        """
        parts = self.parts if parts is None else parts
        with self.gradients.reducing(last, parts):
            yield
        if last or self.stage.gradients:
            self.release(parts)

    @contextmanager
    def aside(self, notes: Notes) -> Iterator[None]:
        """Inside, gradients are noted and not taken; ``notes.done()`` in a ``reducing`` takes them."""
        self.gradients.notes = notes
        try:
            yield
        finally:
            self.gradients.notes = None

    def release(self, parts: Iterable[Part]) -> None:
        """The weights of these units are not in use any more. Collective."""
        for part in parts:
            self.conveyor.release(part)

    def finish(self) -> None:
        """Return when every gradient is the sum over all ranks; the weights may be updated then. Collective."""
        self.gradients.finish()
        for buffer in self._buffers:  # as they are on the first rank, so that a checkpoint has one of them
            _share(buffer, self.group, self.outer)
        self.conveyor.finish()

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """The module with all its weights, to look at or to run, between steps. Collective."""
        with self.conveyor.pinned():
            yield self.module

    def state(self, optimizer: Optimizer | None = None, axes: tuple[str, ...] = (SHARD,)) -> Kept:
        """Every tensor that a run goes on from; ``axes`` are those of the mesh along which ``group`` runs.

        To be read, or to be filled before the first step.
        """
        axes = axes if self.stage.states else ()
        kept = {f"model/{name}": _plain(tensor) for name, tensor in self._rest()}
        for name, (part, slot) in self._place.items():
            kept[f"model/{name}"] = _cut(part, name, part.share(slot, part.master), axes)
        for kind, states in optimizer.states().items() if optimizer else ():
            for state in states:
                part, _ = self._place[state.parameter]
                place = f"optim/{kind}/{state.parameter}"
                kept[place] = _plain(state.tensor) if state.whole else _cut(part, state.parameter, state.tensor, axes)
        return kept

    def _rest(self) -> Iterator[tuple[str, Tensor]]:
        """What every rank has whole."""
        saved = self.module.state_dict(keep_vars=True)
        known = {id(self._parameters[name]) for name in self._place}
        return ((name, tensor.detach()) for name, tensor in saved.items() if id(tensor) not in known)


def shard(
    module: nn.Module,
    group: Group,
    stage: int = 1,
    *,
    replicas: Group | None = None,
    units: type | tuple[type, ...] | Collection[str] | None = None,
    decay: Callable[[str, nn.Parameter], bool] = lambda name, parameter: parameter.dim() > 1,
    gather_bytes: int | None = None,
    formats: Formats = Formats(),
    near: tuple[Group, Group] | None = None,
    fill: Fill | None = None,
) -> Sharded:
    """Share any module over the ranks of ``group``, in a stage of ZeRO; all start from the first rank's weights.

    ``replicas`` are the ranks that have the same part as this one, in other copies of ``group``. ``units`` are classes
    of modules, or names of modules; the members of the outermost lists and dicts of modules when not given. In stage 3
    a unit's weights are there while its forward or backward runs, ``gather_bytes`` of them at once; every rank runs
    the units in the same order. ``near`` are two groups: the neighbours in ``group`` that keep a second copy between a
    step's first gather and its end, and the ranks at the same place among theirs (``travel.py``). ``decay`` says which
    parameters have weight decay. Where ``fill`` says what trained parameters are to be, they need no memory
    (``hpctrain.model.init.hollow``). Collective.
    """
    if stage not in STAGES:
        raise ConfigError(f"stage = {stage} is none of ZeRO's", "", f"use one of {', '.join(map(str, STAGES))}")
    switches, replicas = STAGES[stage], replicas or SoloGroup()
    inner, outer = (group, replicas) if switches.states else (SoloGroup(), group)
    for tensor in (*module.parameters(), *module.buffers()):
        if fill is None or not tensor.requires_grad:
            _share(tensor.detach(), group, replicas)
    members = _members(module, _names(module, units), decay)
    ranks = Ranks(inner, outer, *(near or ()))
    return Sharded(module, arrange(members), switches, ranks, formats, gather_bytes, fill)


def _names(module: nn.Module, units: Any) -> list[str]:
    """The names of the modules that are units."""
    named = dict(module.named_modules())
    if units is None:
        lists = [name for name, one in named.items() if isinstance(one, nn.ModuleList | nn.ModuleDict)]
        outer = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
        return [f"{name}.{child}".lstrip(".") for name in outer for child, _ in named[name].named_children()]
    if isinstance(units, type | tuple) and all(isinstance(one, type) for one in _several(units)):
        return [name for name, one in named.items() if name and isinstance(one, units)]
    unknown = [name for name in units if name not in named or not name]
    if unknown:
        raise ShapeError(
            f"the module has no part named {unknown[0]!r}", "a unit is a module inside of it", "see named_modules()"
        )
    return list(units)


def _several(units: Any) -> tuple[Any, ...]:
    return units if isinstance(units, tuple) else (units,)


def _members(module: nn.Module, modules: list[str], decay: Callable[[str, nn.Parameter], bool]) -> list[Member]:
    """The parameters that are trained; one that several units use is held."""
    every = list(module.named_parameters(remove_duplicate=False))
    around: dict[int, set[str]] = {}
    for name, parameter in every:
        around.setdefault(id(parameter), set()).add(Member.of(name, (), False, "", modules).unit)
    found = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            own = modules if len(around[id(parameter)]) == 1 else ()
            found.append(Member.of(name, tuple(parameter.shape), decay(name, parameter), _name(parameter.dtype), own))
    return found


def _kinds(parts: Iterable[Part]) -> dict[tuple[str, ...], list[Flat]]:
    """What this rank owns of all units, by the axes along which others own other elements of it."""
    found: dict[tuple[str, ...], list[Flat]] = {}
    for part in parts:
        for kind, flats in part.flats().items():
            found.setdefault(kind.axes, []).extend(flats)
    return found


def _share(tensor: Tensor, *groups: Group) -> None:
    for group in groups:
        group.broadcast(tensor)


def _name(dtype: torch.dtype | None) -> str | None:
    return dtype and str(dtype).removeprefix("torch.")


def _plain(tensor: Tensor) -> tuple[Layout, Tensor]:
    return Layout(tuple(tensor.shape), _name(tensor.dtype)), tensor


def _cut(part: Part, name: str, tensor: Tensor, axes: tuple[str, ...]) -> tuple[Layout, Tensor]:
    slot = next(slot for slot in part.unit.slots if slot.name == name)
    return part.unit.layout(slot, axes, _name(tensor.dtype)), tensor
