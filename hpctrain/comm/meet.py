"""Meeting: the ranks of a node come together, through numbers in memory that they share.

Each rank counts its meetings in a number of its own. Whoever comes and sees that all have come says so in one more
number, ``gone``, and wakes those who sleep for it. Two that come at the same moment may both say so: they write the
same. No atomic operation is needed, only that numbers of 64 bits are written whole, and a fence (``Win.Sync``) so that
what was written before a meeting is seen after it on processors that order nothing by themselves. Should two ranks
that come at one instant each miss the other, they find out when they look again a millisecond later.

MPI's own barrier is not used: it can neither stop waiting nor tell for whom, and with many libraries it keeps a core.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import get_ident

from hpctrain.comm import futex
from hpctrain.comm.operation import Ledger
from hpctrain.comm.patience import give_core_away

SPIN_SECONDS = 50e-6
YIELDS = 4  # where ranks outnumber cores three of four meetings end within these: the core goes round once
FIRST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 1e-3, 50e-3
NUMBER_BYTES = 8


class Meeting:
    """Counts the meetings of ``size`` ranks in ``memory``, which holds ``bytes_for(size)`` zeroed bytes.

    ``members`` are the ranks in the ledger's group; ``doing`` says what was last seen of a rank of the node; ``spins``
    whether a core may be kept for some microseconds, which is wrong where ranks outnumber cores.
    """

    def __init__(
        self,
        memory: memoryview,
        address: int,
        rank: int,
        members: tuple[int, ...],
        ledger: Ledger,
        fence: Callable[[], None],
        spins: bool,
    ) -> None:
        size = len(members)
        numbers = memory.cast("Q")
        self._gone, self._given_up, self._come = numbers[0:1], numbers[8:9], numbers[16 : 16 + size]
        self._gone_address = address
        self._rank, self._members, self._ledger, self._fence = rank, members, ledger, fence
        self._count = 0
        self._spins, self._thread = spins, get_ident()

    def meet(self) -> None:
        """Return when all ranks have come as often as this one; LateError when they do not in time."""
        if self._given_up[0]:
            raise self._ledger.given_up(self._members[self._given_up[0] - 1])
        self._count = count = self._count + 1
        self._come[self._rank] = count
        self._fence()
        if min(self._come) >= count:
            self._gone[0] = count
            futex.wake(self._gone_address)
        else:
            self._wait(count)
        self._fence()

    def _wait(self, count: int) -> None:
        if self._thread == get_ident():  # another thread would keep the interpreter's lock meanwhile
            self._linger(count)
        self._sleep(count)

    def _linger(self, count: int) -> None:
        """Wait a little for a rank that is about to come, which costs less than to sleep for it."""
        if self._spins:
            self._spin(count)
        for _ in range(YIELDS):
            if self._met(count):
                return
            give_core_away()

    def _met(self, count: int) -> bool:
        return self._gone[0] >= count or min(self._come) >= count

    def _spin(self, count: int) -> None:
        end = time.monotonic() + SPIN_SECONDS
        while not self._met(count) and time.monotonic() < end:
            pass

    def _sleep(self, count: int) -> None:
        end = time.monotonic() + self._ledger.limit_seconds
        nap = FIRST_SLEEP_SECONDS
        while (seen := self._gone[0]) < count and min(self._come) < count:
            if self._given_up[0] or time.monotonic() >= end:
                raise self._give_up(count)
            futex.wait(self._gone_address, seen, nap)
            nap = min(2 * nap, LONGEST_SLEEP_SECONDS)

    def _give_up(self, count: int) -> Exception:
        """Tell the others, those who wait and those who are still to come."""
        self._given_up[0] = self._given_up[0] or self._rank + 1
        self._fence()
        futex.wake(self._gone_address)
        return self._ledger.late([self._members[rank] for rank, come in enumerate(self._come) if come < count])


def bytes_for(size: int) -> int:
    """The memory that a meeting of ``size`` ranks takes."""
    return (16 + size) * NUMBER_BYTES


def room_to_spin(cores: list[set[int]]) -> bool:
    """Whether ranks that may run on these cores, a set a rank, have one each."""
    return len(set().union(*cores)) >= len(cores)


def own_cores() -> set[int]:
    """The cores on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
