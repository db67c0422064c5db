"""Parameters cut over ranks that are threads, as an optimizer gets them, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import Group, SoloGroup
from hpctrain.optim.flat import Flat, Piece
from hpctrain.optim.optimizer import Optimizer
from hpctrain.parallel.zero import Sharded
from tests.support import threads

Tensors = dict[str, Tensor]  # whole tensors by the parameter's name
States = dict[str, Tensors]  # state -> parameter -> the whole of it


def gradients(data: Sharded) -> Tensors:
    """Every parameter's reduced gradient, whole. Collective."""
    found = {}
    for part in data.parts:
        whole = torch.empty(part.unit.total, dtype=part.gradient.dtype)
        data.group.all_gather(whole, part.gradient, sizes=part.sizes)
        found |= {slot.name: part.place(slot, whole) for slot in part.unit.slots}
    return found


def random(shapes: dict[str, tuple[int, ...]], seed: int, dtype: torch.dtype = torch.float64) -> Tensors:
    """A tensor for each name, of numbers around 1 in size."""
    make = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def flat(parameters: Tensors, gradients: Tensors, part: tuple[float, float] = (0, 1), decay: bool = True) -> Flat:
    """Parameters end to end, and of that the elements of one part, given as two parts of the whole."""
    total = sum(x.numel() for x in parameters.values())
    low, high = (round(edge * total) for edge in part)
    pieces, offset = [], 0
    for name, x in parameters.items():
        start, stop = max(low, offset), min(high, offset + x.numel())
        if start < stop or start == stop == offset:  # what has no elements lies somewhere too
            pieces.append(Piece(name, tuple(x.shape), start - offset, start - low, stop - low))
        offset += x.numel()
    own = [torch.cat([x.reshape(-1) for x in xs.values()])[low:high].clone() for xs in (parameters, gradients)]
    return Flat(own[0], own[1], decay, tuple(pieces))


def flats(parameters: Tensors, gradients: Tensors, part: tuple[float, float] = (0, 1)) -> list[Flat]:
    """Two flat tensors: matrices, which decay, and the rest, which does not."""
    kinds = [{n: x for n, x in parameters.items() if (x.dim() > 1) == decay} for decay in (True, False)]
    rows = zip(kinds, (True, False), strict=True)
    return [flat(kind, {n: gradients[n] for n in kind}, part, decay) for kind, decay in rows if kind]


def course(
    make: Callable[[list[Flat], Group], Optimizer],
    parameters: Tensors,
    gradients: Sequence[Tensors],
    cuts: Sequence[float] = (),
    states: States | None = None,
    start: int = 0,
    rate: float = 0.01,
) -> tuple[Tensors, States]:
    """Weights and states after an update for each of the gradients, by one rank more than there are cuts."""
    edges = [0.0, *sorted(cuts), 1.0]

    def rank(group: Group) -> tuple[list[tuple[str, int, Tensor]], list[tuple[str, str, Any, Tensor]]]:
        part = (edges[group.rank], edges[group.rank + 1])
        own = flats(parameters, gradients[0], part)
        optimizer = make(own, group)
        if states is not None:
            fill(optimizer, states)
        for step, now in enumerate(gradients, start):
            for target, source in zip(own, flats(parameters, now, part), strict=True):
                target.gradient.copy_(source.gradient)
            optimizer.update(rate, step)
        return own_parameters(own), own_states(optimizer)

    found = threads.run(len(edges) - 1, rank) if cuts else [rank(SoloGroup())]
    return _weights(parameters, [one[0] for one in found]), _states(parameters, [one[1] for one in found])


def fill(optimizer: Optimizer, states: States) -> None:
    """Write whole states into an optimizer, as resuming from a checkpoint does."""
    for name, parts in optimizer.states().items():
        for part in parts:
            whole = states[name][part.parameter]
            if not part.whole:
                start, stop = optimizer.entries[part.parameter].runs[optimizer.group.rank]
                whole = whole.reshape(-1)[start:stop]
            part.tensor.copy_(whole)


def own_parameters(own: Sequence[Flat]) -> list[tuple[str, int, Tensor]]:
    """What a rank has: name, first element, elements."""
    return [(p.name, p.first, one.parameter[p.start : p.stop]) for one in own for p in one.pieces]


def own_states(optimizer: Optimizer) -> list[tuple[str, str, Any, Tensor]]:
    """What a rank has: state, parameter, first element (None where it has the whole), tensor."""
    return [
        (name, s.parameter, None if s.whole else optimizer.entries[s.parameter].runs[optimizer.group.rank][0], s.tensor)
        for name, parts in optimizer.states().items()
        for s in parts
    ]


def _weights(parameters: Tensors, ranks: Sequence[list[tuple[str, int, Tensor]]]) -> Tensors:
    found = {name: torch.zeros_like(x) for name, x in parameters.items()}
    for rank in ranks:
        for name, first, piece in rank:
            found[name].view(-1)[first : first + piece.numel()] = piece
    return found


def _states(parameters: Tensors, ranks: Sequence[list[tuple[str, str, Any, Tensor]]]) -> States:
    found: States = {}
    for rank in ranks:
        for state, name, first, tensor in rank:
            if first is None:
                assert torch.equal(found.setdefault(state, {}).setdefault(name, tensor), tensor)
                continue
            blank = torch.zeros(parameters[name].shape, dtype=tensor.dtype)
            whole = found.setdefault(state, {}).setdefault(name, blank)
            whole.view(-1)[first : first + tensor.numel()] = tensor
    return found
