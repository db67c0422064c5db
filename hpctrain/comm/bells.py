"""Bells: how a rank wakes another one of its node that may be waiting for a message.

MPI can only be asked whether a message is there. So a rank that waits sleeps on a number in shared memory, its bell,
and whoever sent it something, or took something from it, changes that number, which wakes it at once. A ring can be
missed: there is none from another node, and one is lost where a rank rings while the other is about to look. So nobody
relies on it, and a rank that waits looks again after a short sleep all the same.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping

from hpctrain.comm import futex


class Bells:
    """The bells of those ranks of a group that are on this node, as ``rank`` has them; live.

    ``addresses`` says where their numbers are, 8 zeroed bytes each; where there are none a wait is a sleep.
    """

    def __init__(self, rank: int = 0, addresses: Mapping[int, int] | None = None) -> None:
        self._words = {peer: ctypes.c_uint64.from_address(at) for peer, at in (addresses or {}).items()}
        self._addresses = dict(addresses or {})
        self._own, self._own_address = self._words.get(rank), self._addresses.get(rank)

    @property
    def ours(self) -> bool:
        """Whether anyone can ring for this rank."""
        return self._own is not None

    def ring(self, peer: int) -> None:
        """Wake ``peer`` where it waits; nothing where it is on another node."""
        if peer in self._words:
            self._words[peer].value += 1  # of two that ring at once both wake, whatever the number is then
            futex.wake(self._addresses[peer])

    def rung(self) -> int:
        """What ``wait`` has to be told: to be asked before looking for what one waits for."""
        return 0 if self._own is None else self._own.value

    def wait(self, rung: int, seconds: float) -> None:
        """Return when this rank's bell has rung since ``rung`` was asked, or after ``seconds``."""
        if self._own is None:
            time.sleep(seconds)
        else:
            futex.wait(self._own_address, rung, seconds)


SILENT = Bells()
