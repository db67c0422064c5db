"""Ranks that are threads of one process: a whole job inside a unit test, with a Group that really meets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier, BrokenBarrierError
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.group import DONE, Group, Handle, Op, SoloGroup
from hpctrain.plan.mesh import Mesh

SECONDS = 60


class Room:
    """Where the threads of one group meet."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size)
        self.places: list[Any] = [None] * size
        self.mail: dict[tuple[int, int, int], Queue] = {
            (source, to, tag): Queue() for source in range(size) for to in range(size) for tag in range(4)
        }


class ThreadGroup(Group):
    """One rank of a group whose ranks are threads."""

    def __init__(self, room: Room, rank: int) -> None:
        super().__init__(range(len(room.places)), rank, "threads")
        self._room = room

    def barrier(self) -> None:
        self._room.barrier.wait(SECONDS)

    def _all(self, value: Any) -> list[Any]:
        """Every rank's value. It is the very object: copy before the next meeting."""
        self._room.places[self.rank] = value
        self.barrier()
        found = list(self._room.places)
        self.barrier()
        return found

    def _reduced(self, x: Tensor, op: Op) -> Tensor:
        stack = torch.stack(self._all(x.clone()))
        return {"sum": stack.sum, "mean": stack.mean, "max": stack.amax, "min": stack.amin}[op](0)

    def _all_reduce(self, x: Tensor, op: Op, later: bool) -> Handle:
        x.copy_(self._reduced(x, op))
        return DONE

    def _all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], later: bool) -> Handle:
        out.copy_(torch.cat(self._all(x.clone())))
        return DONE

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int], later: bool) -> Handle:
        out.copy_(self._reduced(x, op).split(list(sizes))[self.rank])
        return DONE

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], later: bool
    ) -> Handle:
        out.copy_(torch.cat([pieces[self.rank] for pieces in self._all(x.clone().split(list(sizes)))]))
        return DONE

    def _broadcast(self, x: Tensor, source: int, later: bool) -> Handle:
        x.copy_(self._all(x.clone())[source])
        return DONE

    def _send(self, x: Tensor, to: int, tag: int, later: bool) -> Handle:
        self._room.mail[self.rank, to, tag].put(x.clone())
        return DONE

    def _recv(self, x: Tensor, source: int, tag: int, later: bool) -> Handle:
        x.copy_(self._room.mail[source, self.rank, tag].get(timeout=SECONDS))
        return DONE


def run(size: int, act: Callable[[Group], Any]) -> list[Any]:
    """Call ``act`` with its group on each of ``size`` ranks; the results in rank order, or the cause of failure."""
    return grid(size, 1, lambda group, near, far: act(group))


def grid(far: int, near: int, act: Callable[[Group, Group, Group], Any]) -> list[Any]:
    """As ``run`` with ``far`` x ``near`` ranks: ``act`` also gets the group of each rank's neighbours, and of those at
    the same place among theirs."""
    size = far * near
    room, rows, columns = Room(size), [Room(near) for _ in range(far)], [Room(far) for _ in range(near)]

    def one(rank: int) -> Any:
        row, column = divmod(rank, near)
        groups = ThreadGroup(room, rank), ThreadGroup(rows[row], column), ThreadGroup(columns[column], row)
        try:
            return act(*groups)
        except BaseException:
            for each in (room, *rows, *columns):
                each.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class ThreadGroups:
    """The groups of a mesh whose ranks are threads, as ``hpctrain.comm.groups.Groups`` gives them."""

    def __init__(self, mesh: Mesh, rank: int, rooms: dict[tuple[int, ...], Room]) -> None:
        self.mesh, self.rank, self._rooms = mesh, rank, rooms
        self._groups: dict[tuple[int, ...], Group] = {}

    def __getitem__(self, axes: str | tuple[str, ...]) -> Group:
        ranks = self.mesh.ranks(self.rank, *((axes,) if isinstance(axes, str) else axes))
        if ranks not in self._groups:
            alone = len(ranks) == 1
            room = None if alone else self._rooms.setdefault(ranks, Room(len(ranks)))
            self._groups[ranks] = SoloGroup(self.rank) if alone else ThreadGroup(room, ranks.index(self.rank))
        return self._groups[ranks]

    @property
    def whole(self) -> Group:
        """All ranks."""
        return self[tuple(name for name, _ in self.mesh.axes)]


def over(mesh: Mesh, act: Callable[[ThreadGroups], Any]) -> list[Any]:
    """As ``run`` with the ranks of a mesh: ``act`` gets the groups of each."""
    rooms: dict[tuple[int, ...], Room] = {}

    def one(group: Group) -> Any:
        try:
            return act(ThreadGroups(mesh, group.rank, rooms))
        except BaseException:
            for room in list(rooms.values()):
                room.barrier.abort()
            raise

    return run(mesh.ranks_total, one)
