"""Patience: how a rank waits without holding a core that others need, and not for ever."""

from __future__ import annotations

import os
import time

from hpctrain.comm.bells import SILENT, Bells

YIELD_SECONDS = 2e-3  # of giving the core away before the first sleep: a peer that is about to come costs no sleep
BELL_YIELD_SECONDS = 100e-6  # likewise, where a peer can end the sleep
FIRST_SLEEP_SECONDS, LONGEST_SLEEP_SECONDS = 20e-6, 1e-3

give_core_away = getattr(os, "sched_yield", lambda: time.sleep(0))


class Patience:
    """One wait: each ``pause`` is a little longer, and says False when the limit has passed.

    One is made before the first look. A ring of ``bells`` ends a pause, also where it rings before the pause begins.
    """

    def __init__(self, limit_seconds: float, bells: Bells = SILENT) -> None:
        self._start, self._limit_seconds = time.monotonic(), limit_seconds
        self._sleep_seconds = FIRST_SLEEP_SECONDS
        self._bells, self._rung = bells, bells.rung()
        self._yield_seconds = BELL_YIELD_SECONDS if bells.ours else YIELD_SECONDS

    def pause(self) -> bool:
        waited = time.monotonic() - self._start
        if waited < self._yield_seconds:
            give_core_away()
        else:
            self._bells.wait(self._rung, self._sleep_seconds)
            self._sleep_seconds = min(LONGEST_SLEEP_SECONDS, 1.2 * self._sleep_seconds)
        self._rung = self._bells.rung()
        return waited < self._limit_seconds
