"""Write the parts of a save: each rank's part goes to the disk of its own node, and to that of a partner.

A rank writes its own part from where it lies in memory, and sends it in windows to the partner, who writes each as it
comes. So a rank holds some windows at a time, whatever the size of its part. The disk is a thread's; what travels goes
in rounds, between which a run may train.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.blocks import Digests
from hpctrain.checkpoint.checksums import HOST_BYTES
from hpctrain.checkpoint.disk import Piece
from hpctrain.checkpoint.near_file import Chain, Head, gather
from hpctrain.checkpoint.snapshot import turns
from hpctrain.checkpoint.streams import Bits, Ends, flowing, met
from hpctrain.checkpoint.together import FULL, together
from hpctrain.comm.group import Group
from hpctrain.errors import FullError
from hpctrain.plan.topology import Topology

TURN_BYTES = 256 << 20  # of a rank's own part, written between two looks at whether its save was given up


@dataclass(frozen=True)
class Coming:
    """A part that this rank writes: where, and how much of it is head and data."""

    path: Path
    data_at: int
    nbytes: int

    @property
    def aside(self) -> Path:
        """What it is called until all of it is there."""
        return self.path.with_name(f".{self.path.name}.aside")


def keepers(topology: Topology, copies: int) -> list[tuple[int, ...]]:
    """The ranks that write each rank's part: itself, and with two copies one on the next node."""
    return [(rank, *_partner(topology, rank)) if copies > 1 else (rank,) for rank in range(len(topology.hosts))]


def part_name(step: int, save: str, rank: int, own: bool) -> str:
    """The name of a part's file on the node of ``rank``, or on its partner's."""
    return f"step-{step:08d}.{save}.{rank}.{'own' if own else 'copy'}"


def writing(
    head: Head,
    pieces: Sequence[Piece],
    folder: Path,
    writers: Sequence[Sequence[int]],
    group: Group,
    thread: ThreadPoolExecutor,
) -> Bits[None]:
    """Write this rank's part, of ``pieces`` in the order of the head's runs, on all nodes that ``writers`` says.

    ``thread`` is one thread, which does what touches a disk and talks to no rank; the memory of ``pieces`` may not
    change meanwhile. Collective. On an error of one rank all raise it, and none of the files of this save is left,
    nor are they when it is given up. FullError where there is no room.
    """
    told = group.collect([head.data_at, head.nbytes])
    coming = {
        rank: Coming(folder / part_name(head.step, head.save, rank, rank == group.rank), *told[rank])
        for rank, keeping in enumerate(writers)
        if group.rank in keeping
    }
    doing, memories = f"writing to {folder}", [piece.memory for piece in pieces]
    try:
        room = thread.submit(_each, coming.values(), _reserve)
        yield from met([room], group, f"making room in {folder}")
        own = _write_own(coming[group.rank], head, memories, thread)
        yield from flowing(Sending(memories, writers, coming, group, at_head=False), group, doing, thread)
        made, *_ = yield from met(own, group, doing)
        yield from flowing(Sending([made], writers, coming, group, at_head=True), group, doing, thread)
        together(group, lambda: _each(coming.values(), _publish), doing)
    except BaseException:
        thread.shutdown(cancel_futures=True)
        discard(coming.values())
        raise


def discard(files: Iterable[Coming]) -> None:
    """Remove what a save has made. Without talking: after an error others may not answer."""
    for one in files:
        one.aside.unlink(missing_ok=True)
        one.path.unlink(missing_ok=True)


def _write_own(own: Coming, head: Head, memories: Sequence[Tensor], thread: Executor) -> list[Future]:
    """Let the thread write this rank's part on its own node, in turns; the first task gives the head of it."""
    places = accumulate((memory.numel() for memory in memories), initial=own.data_at)
    pieces = [Piece(at, memory) for at, memory in zip(places, memories, strict=False)]
    made = thread.submit(_write_head, own, head, memories)
    return [made, *(thread.submit(_write, own, turn) for turn in turns(pieces, TURN_BYTES))]


def _write_head(own: Coming, head: Head, memories: Sequence[Tensor]) -> Tensor:
    digests = Digests()
    for memory in memories:
        for start in range(0, memory.numel(), HOST_BYTES):
            digests.add(memoryview(memory[start : start + HOST_BYTES].cpu().numpy()))
    made = torch.frombuffer(bytearray(head.to_bytes(digests.end())), dtype=torch.uint8)
    _write(own, [Piece(0, made)])
    return made


def _write(one: Coming, pieces: list[Piece]) -> None:
    with _room_for(one):
        disk.write(one.aside, pieces, sync=False)


class Sending(Ends):
    """The head or the data of every rank's part, on the way to the other ranks that write it."""

    def __init__(
        self,
        memories: Sequence[Tensor],
        writers: Sequence[Sequence[int]],
        coming: dict[int, Coming],
        group: Group,
        at_head: bool,
    ) -> None:
        self._memories, self._chain = memories, Chain([memory.numel() for memory in memories])
        self._coming, self._at_head = coming, at_head
        others = set(writers[group.rank]) - {group.rank}
        self.out_bytes = [self._chain.total if rank in others else 0 for rank in range(group.size)]
        self.in_bytes = [self._length(coming.get(rank), rank == group.rank) for rank in range(group.size)]

    def give(self, to: int, start: int, into: Tensor) -> None:
        gather(self._chain, self._memories, start, into)

    def take(self, source: int, start: int, data: Tensor) -> None:
        one = self._coming[source]
        _write(one, [Piece(start if self._at_head else one.data_at + start, data)])

    def _length(self, one: Coming | None, own: bool) -> int:
        if one is None or own:
            return 0
        return one.data_at if self._at_head else one.nbytes


@contextmanager
def _room_for(one: Coming) -> Iterator[None]:
    """Tell of a full disk with the mends that there are for this one."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise FullError(
            f"{one.path.parent}: a part of {one.data_at + one.nbytes} bytes has no room",
            f"{error.strerror}; the last parts stay until the next are whole, so there must be room for both",
            "free space there, give another folder (checkpoint.near), or set checkpoint.near_copies to 1",
        ) from error


def _partner(topology: Topology, rank: int) -> Iterator[int]:
    """The rank at the same place on the next node, counted round where that has fewer ranks; none on one node."""
    if len(topology.nodes) > 1:
        beside = topology.ranks_of((topology.node_of(rank) + 1) % len(topology.nodes))
        yield beside[topology.local_rank(rank) % len(beside)]


def _each(files: Iterable[Coming], act: Callable[[Coming], None]) -> None:
    for one in files:
        with _room_for(one):
            act(one)


def _reserve(one: Coming) -> None:
    """Make the file in its full length, with room for it set aside: so a full disk is met before anything travels."""
    os.close(os.open(one.aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    os.truncate(one.aside, one.data_at + one.nbytes)
    disk.reserve(one.aside)


def _publish(one: Coming) -> None:
    os.replace(one.aside, one.path)
