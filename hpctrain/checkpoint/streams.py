"""Streams: bytes from any rank to any other, of any length, with little of them in memory at once.

They flow in rounds. All ranks take part in every round that there is, and between two they agree whether to go on: an
error of one rank ends the streams on all. What came is taken by a thread while the next round travels. Work that goes
on so, a bit at a time, is a generator: between two of its bits a run may train.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
from torch import Tensor

from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group

ROUND_BYTES = 64 << 20  # that a rank sends in a round, and that it takes
MEET_SECONDS = 0.05  # between two meetings of ranks that wait for threads

Value = TypeVar("Value")
Bits = Generator[Sequence[Future], None, Value]
"""Work in bits, collective; it yields what this rank's thread has yet to do before the next one is of use."""


class Ends(ABC):
    """The ends of this rank's streams: ``out_bytes`` go to each rank of the group, and ``in_bytes`` come from each."""

    out_bytes: Sequence[int]
    in_bytes: Sequence[int]

    @abstractmethod
    def give(self, to: int, start: int, into: Tensor) -> None:
        """Fill ``into``, flat bytes on the host, with what the stream to a rank has from its byte ``start`` on."""

    @abstractmethod
    def take(self, source: int, start: int, data: Tensor) -> None:
        """Take the bytes that the stream of a rank has from its byte ``start`` on. Called in a thread."""


def flow(ends: Ends, group: Group, doing: str) -> None:
    """Let every stream flow to its end. Collective; the first error of ``give`` or ``take`` is raised on all ranks."""
    with ThreadPoolExecutor(1, "take") as thread:
        finish(flowing(ends, group, doing, thread))


def flowing(ends: Ends, group: Group, doing: str, thread: Executor) -> Bits[None]:
    """As ``flow``, a round at a time; ``thread`` takes what came, one call after another."""
    step, rounds = _rounds(ends, group)
    away, rooms = _room(_most(ends.out_bytes, step)), [_room(_most(ends.in_bytes, step)) for _ in range(2)]
    taking: list[Sequence[Future]] = [(), ()]
    for number in range(rounds):
        start, room = number * step, number % 2
        yield from met(taking[room], group, doing)  # what came there before is taken
        taking[room] = _round(ends, start, step, (away, rooms[room]), group, thread)
        yield ()
    yield from met([*taking[0], *taking[1]], group, doing)


def met(tasks: Sequence[Future], group: Group, doing: str) -> Bits[list[Any]]:
    """Wait until the tasks of every rank are done, and give what this rank's gave; an error of one is raised on all."""
    while not _everywhere(all(task.done() for task in tasks), group):
        yield tasks
    return together(group, lambda: [task.result() for task in tasks], doing)


def finish(bits: Bits[Value]) -> Value:
    """Do all that is left of ``bits``, and give what they give. Collective."""
    while True:
        try:
            wait(next(bits), MEET_SECONDS)
        except StopIteration as end:
            return end.value


def _round(
    ends: Ends, start: int, step: int, memory: tuple[Tensor, Tensor], group: Group, thread: Executor
) -> list[Future]:
    """Send what there is from ``start`` on, and let the thread take what came; an error of giving is told as its."""
    sizes, out_sizes = _sizes(ends.out_bytes, start, step), _sizes(ends.in_bytes, start, step)
    given, taken = (whole[: sum(some)] for whole, some in zip(memory, (sizes, out_sizes), strict=True))
    error = _error(_calls(ends.give, start, given, sizes))
    came = taken.to(group.device)
    group.all_to_all(came, given.to(group.device), out_sizes=out_sizes, sizes=sizes)
    if error is None:
        return [thread.submit(call) for call in _calls(ends.take, start, came.cpu(), out_sizes)]
    failed: Future = Future()
    failed.set_exception(error)
    return [failed]


def _rounds(ends: Ends, group: Group) -> tuple[int, int]:
    """How much goes from rank to rank in a round, and how many rounds there are: the same on all ranks."""
    peers = max(sum(size > 0 for size in sizes) for sizes in (ends.out_bytes, ends.in_bytes))
    most = torch.tensor([peers, max(*ends.out_bytes, *ends.in_bytes)], device=group.device)
    group.all_reduce(most, "max")
    peers, longest = most.tolist()
    step = ROUND_BYTES // max(1, peers)
    return step, -(-longest // step)


def _everywhere(true: bool, group: Group) -> bool:
    told = torch.tensor([int(true)], device=group.device)
    group.all_reduce(told, "min")
    return bool(told)


def _most(totals: Sequence[int], step: int) -> int:
    return sum(_sizes(totals, 0, step))


def _sizes(totals: Sequence[int], start: int, step: int) -> list[int]:
    return [max(0, min(step, total - start)) for total in totals]


def _room(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _calls(
    act: Callable[[int, int, Tensor], None], start: int, memory: Tensor, sizes: Sequence[int]
) -> list[Callable[[], None]]:
    """A call for each rank that there is something for."""

    def call(rank: int, piece: Tensor) -> Callable[[], None]:
        return lambda: act(rank, start, piece)

    return [call(rank, piece) for rank, piece in enumerate(memory.split(list(sizes))) if piece.numel()]


def _error(calls: Sequence[Callable[[], None]]) -> Exception | None:
    """Make the calls up to one that fails, and give its error: this rank has to take part in the round all the same."""
    try:
        for call in calls:
            call()
    except Exception as error:
        return error
    return None
