"""Patience: how a rank waits without holding a core that others need, and not for ever."""

from __future__ import annotations

import os
import time

YIELD_SECONDS = 2e-3  # of giving the core away before the first sleep: a peer that is about to come costs no sleep
FIRST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 20e-6, 1e-3

give_core_away = getattr(os, "sched_yield", lambda: time.sleep(0))


class Patience:
    """One wait: each ``pause`` is a little longer, and says False when the limit has passed."""

    def __init__(self, limit_seconds: float) -> None:
        self._start, self._limit_seconds = time.monotonic(), limit_seconds
        self._sleep_seconds = FIRST_SLEEP_SECONDS

    def pause(self) -> bool:
        waited = time.monotonic() - self._start
        if waited < YIELD_SECONDS:
            give_core_away()
        else:
            time.sleep(self._sleep_seconds)
            self._sleep_seconds = min(LONGEST_SLEEP_SECONDS, 1.2 * self._sleep_seconds)
        return waited < self._limit_seconds
