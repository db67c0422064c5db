"""Streams: bytes from any rank to any other, of any length, with little of them in memory at once.

All ranks take part in every round, whatever befalls one of them: an error waits until the last round is over, and is
then an error of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import cycle

import torch
from torch import Tensor

from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group

ROUND_BYTES = 64 << 20  # that a rank sends in a round, and that it takes


class Ends(ABC):
    """The ends of this rank's streams: ``out_bytes`` go to each rank of the group, and ``in_bytes`` come from each."""

    out_bytes: Sequence[int]
    in_bytes: Sequence[int]

    @abstractmethod
    def give(self, to: int, start: int, into: Tensor) -> None:
        """Fill ``into``, flat bytes on the host, with what the stream to a rank has from its byte ``start`` on."""

    @abstractmethod
    def take(self, source: int, start: int, data: Tensor) -> None:
        """Take the bytes that the stream of a rank has from its byte ``start`` on."""


def flow(ends: Ends, group: Group, doing: str) -> None:
    """Let every stream flow to its end. Collective; the first error of ``give`` or ``take`` is raised on all ranks.

    What came in a round is taken while the next one travels.
    """
    step, rounds = _rounds(ends, group)
    errors: list[Exception] = []
    came: list[Callable[[], None]] = []
    away, rooms = _room(_most(ends.out_bytes, step)), cycle([_room(_most(ends.in_bytes, step)) for _ in range(2)])
    for start in range(0, rounds * step, step):
        sizes, out_sizes = _sizes(ends.out_bytes, start, step), _sizes(ends.in_bytes, start, step)
        given, taken = away[: sum(sizes)], next(rooms)[: sum(out_sizes)].to(group.device)
        _each(_calls(ends.give, start, given, sizes), errors)
        handle = group.all_to_all(taken, given.to(group.device), out_sizes=out_sizes, sizes=sizes, later=True)
        _each(came, errors)
        handle.wait()
        came = _calls(ends.take, start, taken.cpu(), out_sizes)
    _each(came, errors)
    together(group, lambda: _raise(errors), doing)


def _rounds(ends: Ends, group: Group) -> tuple[int, int]:
    """How much goes from rank to rank in a round, and how many rounds there are: the same on all ranks."""
    peers = max(sum(size > 0 for size in sizes) for sizes in (ends.out_bytes, ends.in_bytes))
    most = torch.tensor([peers, max(*ends.out_bytes, *ends.in_bytes)], device=group.device)
    group.all_reduce(most, "max")
    peers, longest = most.tolist()
    step = ROUND_BYTES // max(1, peers)
    return step, -(-longest // step)


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


def _each(calls: Sequence[Callable[[], None]], errors: list[Exception]) -> None:
    """Make the calls, unless there was an error before."""
    for call in calls:
        try:
            if not errors:
                call()
        except Exception as error:
            errors.append(error)


def _raise(errors: Sequence[Exception]) -> None:
    for error in errors[:1]:
        raise error
