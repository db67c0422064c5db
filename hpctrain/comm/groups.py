"""Groups: the communicators of a mesh, one for each distinct sequence of ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import CommConfig
from hpctrain.errors import CommError
from hpctrain.plan.mesh import Mesh

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.cluster.world import World

Opener = Callable[..., Group]


class Groups:
    """``groups["dp"]`` and ``groups["dp", "cp"]``: this rank's group along those axes of the mesh.

    Live: it holds the communicators. Those of each axis and of the whole mesh are there from the start; one of several
    axes is made when it is first asked for, which all its members must do, and no other rank.
    """

    def __init__(self, mesh: Mesh, rank: int, comm: MPI.Comm | None, open_group: Opener) -> None:
        self.mesh, self.rank = mesh, rank
        self._comm, self._open = comm, open_group
        self._by_ranks: dict[tuple[int, ...], Group] = {}
        self._parts: list[MPI.Comm] = []

    @classmethod
    def open(cls, mesh: Mesh, world: World, config: CommConfig | None = None) -> Groups:
        """Make the groups of ``mesh``. Collective over the world; all ranks must come with the same mesh."""
        config = config or CommConfig()
        mesh.fit(world.size)
        _compare(mesh, world.comm)
        groups = cls(mesh, world.rank, world.comm, _opener(config, world.comm))
        for axes in [tuple(name for name, _ in mesh.axes), *((name,) for name, _ in mesh.axes)]:
            groups._split(axes)
        return groups

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        axes = (axes,) if isinstance(axes, str) else axes
        ranks = self.mesh.ranks(self.rank, *axes)
        if len(ranks) == 1:
            return self._by_ranks.setdefault(ranks, SoloGroup(self.rank, "+".join(axes) or "solo"))
        if ranks not in self._by_ranks:
            members = self._comm.group.Incl(ranks)
            self._keep(axes, ranks, self._comm.Create_group(members, _tag(axes)))
        return self._by_ranks[ranks]

    @property
    def whole(self) -> Group:
        """The group of every rank of the mesh, in mesh order."""
        return self[tuple(name for name, _ in self.mesh.axes)]

    def regroup(self, mesh: Mesh) -> Groups:
        """The groups of the same ranks under other axes; those that are the same are shared. Collective as ``open``.

        They are closed with the groups that they come from.
        """
        other = Groups(mesh.fit(self.mesh.ranks_total), self.rank, self._comm, self._open)
        other._by_ranks, other._parts = self._by_ranks, self._parts
        for name, _ in mesh.axes:
            other._split((name,))
        return other

    def close(self) -> None:
        """Close every group. Collective."""
        for group in self._by_ranks.values():
            group.close()
        for part in self._parts:
            part.Free()
        self._by_ranks.clear()
        self._parts.clear()

    def _split(self, axes: tuple[str, ...]) -> None:
        """Split the world by colour. Collective over the world: whether to split is the same for all its ranks."""
        ranks = self.mesh.ranks(self.rank, *axes)
        if self._comm is None or self.mesh.size(*axes) == 1:
            self._by_ranks.setdefault(ranks, SoloGroup(self.rank, "+".join(axes)))
        elif ranks not in self._by_ranks:
            self._keep(axes, ranks, self._comm.Split(min(ranks), self.mesh.index(self.rank, *axes)))

    def _keep(self, axes: tuple[str, ...], ranks: Sequence[int], part: MPI.Comm) -> None:
        self._parts.append(part)
        self._by_ranks[tuple(ranks)] = self._open(part, name="+".join(axes), ranks=ranks)


def _compare(mesh: Mesh, comm: MPI.Comm | None) -> None:
    """Ranks with different meshes would wait for each other in groups that never meet."""
    text = json.dumps(mesh.to_json(), sort_keys=True)
    meshes = [str(mesh)] if comm is None else comm.allgather(f"{hashlib.sha256(text.encode()).hexdigest()[:8]} {mesh}")
    other = next((rank for rank, told in enumerate(meshes) if told != meshes[0]), None)
    if other is not None:
        raise CommError(
            f"rank 0 has the mesh {meshes[0]}, rank {other} has {meshes[other]}",
            "every rank must lay the same mesh over the ranks",
            "give all ranks the same configuration and the same version of hpctrain",
        )


def _tag(axes: Sequence[str]) -> int:
    """A tag that members of one group share; MPI promises tags up to 32767."""
    return int.from_bytes(hashlib.sha256("\0".join(axes).encode()).digest()[:2], "little") & 0x7FFF


# ---- which transport -------------------------------------------------------------------------------------------------


def _opener(config: CommConfig, comm: MPI.Comm | None) -> Opener:
    backend = config.backend if config.backend != "auto" else _best(comm)
    return partial(BACKENDS[backend], timeout_seconds=config.timeout_seconds)


def _best(comm: MPI.Comm | None) -> str:
    """The backend of the accelerator that every rank has, else MPI."""
    import torch

    mine = [backend for kind, backend in ACCELERATORS.items() if getattr(torch, kind).is_available()]
    everyone = [mine] if comm is None else comm.allgather(mine)
    return next((backend for backend in mine if all(backend in one for one in everyone)), "mpi")


def _open_mpi(comm: MPI.Comm, **more: Any) -> Group:
    from hpctrain.comm.mpi import MpiGroup

    return MpiGroup(comm, **more)


def _open_torch(backend: str) -> Opener:
    def opened(comm: MPI.Comm, **more: Any) -> Group:
        from hpctrain.comm.torch import open_torch_group

        return open_torch_group(comm, backend, **more)

    return opened


BACKENDS: dict[str, Opener] = {"mpi": _open_mpi} | {name: _open_torch(name) for name in ("gloo", "nccl", "xccl")}
ACCELERATORS = {"cuda": "nccl", "xpu": "xccl"}  # torch's name of a kind of device, and what its ranks talk by
