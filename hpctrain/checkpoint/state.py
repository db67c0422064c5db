"""What a checkpoint is made of: named pieces of global tensors, and the ranks' agreement on all the names.

A rank may hold any subset of the names (a pipeline stage holds its blocks, a rank may hold none). Names are
``model/<parameter>`` and ``optim/<state>/<parameter>``; ranks meet by name, never by number or order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh

WEIGHTS = "model/"  # what the names of a model's parameters begin with


@dataclass(frozen=True)
class Held:
    """This rank's piece of a global tensor: in the shape of its box, or flat."""

    layout: Layout
    tensor: Tensor


State = Mapping[str, Held]
View = tuple[Mesh, int | None, tuple[int, ...]]


@dataclass(frozen=True)
class Entry:
    """A tensor as all ranks agreed on it: its name, its layout, and who holds it.

    ``mesh`` spans the holders alone, which are the group's ranks ``holders``, in the mesh's order; ``rank`` is this
    rank's number in it, None when it holds nothing of the tensor.
    """

    name: str
    layout: Layout
    mesh: Mesh
    rank: int | None
    holders: tuple[int, ...]


def agree(state: State, mesh: Mesh, group: Group) -> tuple[Entry, ...]:
    """All names of all ranks, sorted, each with one layout. Collective.

    Ranks with the same names and layouts are told apart by a digest alone, so only one of them sends its list.
    Raises CheckpointError on all ranks when two disagree about a name, or when holders leave elements out.
    """
    together(group, lambda: _check(state, mesh, group), "checking what is saved")
    mine = catalog({name: held.layout for name, held in state.items()})
    digests = group.collect(digest(mine))
    distinct = list(dict.fromkeys(digests))
    shared = {digest: group.share(mine, digests.index(digest)) for digest in distinct if len(distinct) > 1}
    layouts, sides = _merged(shared or {distinct[0]: mine}, digests)
    views: dict[frozenset[str], View] = {}
    return tuple(_entry(name, layouts[name], sides[name], digests, mesh, group.rank, views) for name in sorted(layouts))


class Agreement:
    """What the ranks of one run have agreed on, as long as all of them have the same tensors; live."""

    def __init__(self, mesh: Mesh, group: Group) -> None:
        self.mesh, self.group = mesh, group
        self._seen: dict[str, Any] | None = None
        self._entries: tuple[Entry, ...] = ()

    def on(self, state: State) -> tuple[Entry, ...]:
        """As ``agree``; the very entries of the call before, where no rank has other tensors than then. Collective."""
        seen = {name: (held.layout, held.tensor.numel(), held.tensor.dtype) for name, held in state.items()}
        same = torch.tensor([int(seen == self._seen)], device=self.group.device)
        self.group.all_reduce(same, "min")
        if not int(same):
            self._seen = None
            self._entries = agree(state, self.mesh, self.group)
            self._seen = seen
        return self._entries


def catalog(layouts: Mapping[str, Layout]) -> dict[str, dict[str, Any]]:
    """What a rank tells the others of its tensors."""
    return {name: layout.to_json() for name, layout in sorted(layouts.items())}


def digest(catalog: Mapping[str, dict[str, Any]]) -> str:
    """What tells catalogs apart."""
    return hashlib.sha256(json.dumps(catalog).encode()).hexdigest()


def dtype_name(tensor: Tensor) -> str:
    """The tensor's dtype as layouts and files name it."""
    return str(tensor.dtype).removeprefix("torch.")


def _check(state: State, mesh: Mesh, group: Group) -> None:
    mesh.fit(group.size)
    for name, held in state.items():
        start, stop = held.layout.interval(mesh, group.rank)
        if held.tensor.numel() != stop - start or dtype_name(held.tensor) != held.layout.dtype:
            raise CheckpointError(
                f"{name}: a tensor of {held.tensor.numel()} {dtype_name(held.tensor)}, where the layout"
                f" has {stop - start} {held.layout.dtype}",
                "a rank holds just the piece that the layout gives it",
            )


def _merged(
    catalogs: dict[str, dict[str, Any]], digests: list[str]
) -> tuple[dict[str, dict[str, Any]], dict[str, frozenset[str]]]:
    """Each name's layout, and the digests of the catalogs that have it."""
    layouts: dict[str, dict[str, Any]] = {}
    sides: dict[str, list[str]] = {}
    for digest, catalog in catalogs.items():
        for name, layout in catalog.items():
            if layouts.setdefault(name, layout) != layout:
                first = digests.index(sides[name][0])
                raise _conflict(name, first, layouts[name], digests.index(digest), layout)
            sides.setdefault(name, []).append(digest)
    return layouts, {name: frozenset(side) for name, side in sides.items()}


def _conflict(name: str, first: int, one: dict[str, Any], second: int, other: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{name}: ranks {first} and {second} have different layouts for it",
        f"rank {first}: {json.dumps(one)}; rank {second}: {json.dumps(other)}",
        "give one name one global shape, dtype and cut on all ranks",
    )


def _entry(
    name: str,
    layout: dict[str, Any],
    side: frozenset[str],
    digests: list[str],
    mesh: Mesh,
    rank: int,
    views: dict[frozenset[str], View],
) -> Entry:
    if side not in views:
        holders = [one for one, digest in enumerate(digests) if digest in side]
        views[side] = _view(name, holders, mesh, rank)
    view, place, ranks = views[side]
    agreed = Layout.from_json(layout)
    lost = [axis for axis in agreed.axes if view.size(axis) < mesh.size(axis)]
    if lost:
        raise CheckpointError(
            f"{name}: {view.size(*lost)} of {mesh.size(*lost)} ranks along {', '.join(lost)} hold it",
            "its layout cuts it over all of them, so elements would be missing",
            "give the tensor to every rank along these axes",
        )
    return Entry(name, agreed, view, place, ranks)


def _view(name: str, holders: list[int], mesh: Mesh, rank: int) -> View:
    """The mesh of the holders alone, numbered in mesh order, this rank's number in it, and the holders."""
    if len(holders) == mesh.ranks_total:
        return mesh, rank, tuple(holders)
    axes = [axis for axis, _ in mesh.axes]
    sizes = {axis: len({mesh.index(holder, axis) for holder in holders}) for axis in axes}
    if prod(sizes.values()) != len(holders):
        raise CheckpointError(
            f"{name}: ranks {holders} hold it, which is no sub-grid of the mesh {mesh}",
            "who writes which part follows from the mesh's axes",
            "give it to all ranks along an axis, or to those at some of its coordinates",
        )
    holders.sort(key=lambda holder: mesh.index(holder, *axes))
    return Mesh(tuple(sizes.items())), holders.index(rank) if rank in holders else None, tuple(holders)
