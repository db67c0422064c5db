"""Bells: who waits is woken by who rings, and nobody else is.

Where a bell were not heard, these tests would run into their limit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from threading import Thread

import pytest

from hpctrain.comm import patience
from hpctrain.comm.bells import SILENT, Bells
from hpctrain.comm.patience import Patience

HOURS = 10_000.0


@pytest.fixture
def addresses() -> Iterator[dict[int, int]]:
    """Where the bells of ranks 0 and 2 are; rank 1 is on another node."""
    memory = (ctypes.c_uint64 * 2)()
    start = ctypes.addressof(memory)
    yield {0: start, 2: start + 8}
    del memory


@pytest.fixture
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause lasts for hours, unless it is ended."""
    monkeypatch.setattr(patience, "FIRST_SLEEP_SECONDS", HOURS)
    monkeypatch.setattr(patience, "LONGEST_SLEEP_SECONDS", HOURS)


def test_a_ring_before_the_wait_ends_it(addresses: dict[int, int]) -> None:
    ours, theirs = Bells(0, addresses), Bells(2, addresses)
    rung = ours.rung()
    theirs.ring(0)
    ours.wait(rung, HOURS)
    assert ours.rung() == rung + 1


def test_a_ring_wakes_a_rank_that_waits(addresses: dict[int, int], asleep: None) -> None:
    ours, theirs, came = Bells(0, addresses), Bells(2, addresses), []
    pauses = Patience(HOURS, ours)

    def wait() -> None:
        while not came:
            assert pauses.pause()

    waiting = Thread(target=wait)
    waiting.start()
    came.append("a message")
    theirs.ring(0)
    waiting.join()
    assert not waiting.is_alive()


def test_a_rank_is_not_woken_by_the_bell_of_another(addresses: dict[int, int]) -> None:
    first, third = Bells(0, addresses), Bells(2, addresses)
    rung = third.rung()
    third.ring(0)
    assert (third.rung(), first.rung()) == (rung, 1)


def test_a_rank_of_another_node_has_no_bell_here(addresses: dict[int, int]) -> None:
    ours = Bells(0, addresses)
    ours.ring(1)
    assert [Bells(rank, addresses).rung() for rank in addresses] == [0, 0]
    assert ours.ours and not Bells(1, addresses).ours


def test_without_bells_a_wait_is_a_sleep() -> None:
    SILENT.ring(0)
    SILENT.wait(SILENT.rung(), 0.0)
    assert SILENT.rung() == 0 and not SILENT.ours
