"""Patience: how a rank waits without holding a core that others need, and not for ever."""

from __future__ import annotations

import os
import time

SPIN_SECONDS = 50e-6  # a rank that is about to come costs less to poll for than to sleep for
YIELDS = 200  # a few milliseconds of giving the core away before the first sleep
LONGEST_SLEEP_SECONDS = 1e-3

give_core_away = getattr(os, "sched_yield", lambda: time.sleep(0))


class Patience:
    """One wait: each ``pause`` is a little longer, and says False when the limit has passed."""

    def __init__(self, limit_seconds: float, spin: bool = False) -> None:
        now = time.monotonic()
        self._end, self._spin_end = now + limit_seconds, now + SPIN_SECONDS * spin
        self._pauses = 0

    @property
    def sleeps(self) -> bool:
        """Whether this has gone on for so long that other news may be looked for between two pauses."""
        return self._pauses > YIELDS

    def pause(self) -> bool:
        now = time.monotonic()
        if now < self._spin_end:
            return True
        self._pauses += 1
        if self._pauses <= YIELDS:
            give_core_away()
        else:
            time.sleep(min(LONGEST_SLEEP_SECONDS, 20e-6 * (self._pauses - YIELDS)))
        return now < self._end
