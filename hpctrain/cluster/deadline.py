"""The end of the job's time: when it comes, and what must still fit before it.

A batch system kills a job whose time is over, and gives it some seconds at most to save. So a run minds the time by
itself: it stops while a step, a save and a margin still fit, and no warning has to be asked for. Rank 0 alone looks at
its clock, and asks the queue now and then, since the limit may be moved while the job runs.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.cluster import slurm
from hpctrain.cluster.slurm_commands import CommandQueue
from hpctrain.config import RunConfig

CAUTIOUS_BYTES_PER_SECOND = 200e6  # that a node writes, before a save was measured; a tenth of what is usual
STEPS, SAVES = 20, 4  # how many of the last ones are looked at
WARNED_AT = 2  # failures of the queue: the first may be that a signal meant for this job has met the question
WORDS = ("auto", "none")

log = logging.getLogger(__name__)

Ask = Callable[[], float | None]
"""When the job ends, in seconds since 1970, as the queue says now; None where it does not say."""


@dataclass(frozen=True)
class Reserve:
    """What has to fit before the end, in seconds."""

    step: float
    saves: float
    margin: float

    @property
    def seconds(self) -> float:
        return self.step + self.saves + self.margin


def pressing(now: float, ends_at: float | None, reserve: Reserve) -> str | None:
    """Why a run must stop now, and not after one more step; None while there is time. Both times count from 1970."""
    if ends_at is None or ends_at - now > reserve.seconds:
        return None
    return f"the job's time ends in {told(max(ends_at - now, 0))}, and a save takes {told(reserve.saves)}"


def told(seconds: float) -> str:
    """Seconds for a person."""
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def after(text: str) -> float | None:
    """The seconds of ``run.deadline``, such as ``1:30:00`` or ``2-12:00:00``; None where it has a word."""
    if text in WORDS:
        return None
    days, _, clock = text.rpartition("-")
    hours, minutes, seconds = map(int, clock.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def deadline(run: RunConfig, environ: Mapping[str, str]) -> Deadline:
    """The end of this job's time: as the batch system tells it, and as the configuration gives it, from now on."""
    if run.deadline == "none":
        return Deadline()
    given, job = after(run.deadline), slurm.job(environ)
    latest = None if given is None else time.time() + given
    return Deadline(job and job.ends_at, _queue(job), run.ask_seconds, latest)


class Pace:
    """How long steps and saves take here; live. It is told of each one."""

    def __init__(self, margin_seconds: float = 0.0) -> None:
        self._margin = margin_seconds
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._saves: deque[float] = deque(maxlen=SAVES)
        self._expected = 0.0
        self.saving = False

    def expect(self, nbytes: int, nodes: int) -> None:
        """Until a save was measured: it has so many bytes, and so many nodes write them."""
        self._expected = nbytes / (nodes * CAUTIOUS_BYTES_PER_SECOND)

    def stepped(self, seconds: float) -> None:
        """A step took so long."""
        self._steps.append(seconds)

    def saved(self, seconds: float) -> None:
        """A save took so long, from its beginning to the file's name."""
        self._saves.append(seconds)

    def reserve(self) -> Reserve:
        """The longest of the last steps and of the last saves; a save that is under way has to end before another."""
        save = max(self._saves, default=self._expected)
        return Reserve(max(self._steps, default=0.0), save * (2 if self.saving else 1), self._margin)


class Deadline:
    """When the job's time ends, as far as this rank knows; live. No look at it waits for the queue.

    ``ask`` is called in a thread, every so many seconds. Where it fails or says nothing, what was ``known`` before
    holds. ``latest`` is an end that a person gave.
    """

    def __init__(
        self,
        known: float | None = None,
        ask: Ask | None = None,
        every_seconds: float = 60.0,
        latest: float | None = None,
    ) -> None:
        self._known, self._ask, self._every, self._latest = known, ask, every_seconds, latest
        self._asked_at = float("-inf")
        self._thread: threading.Thread | None = None
        self._failed = 0

    def ends_at(self) -> float | None:
        """The earlier of the end last heard of and the one that was given; asks again, for later, where that is due."""
        idle = self._thread is None or not self._thread.is_alive()
        if self._ask and idle and time.monotonic() - self._asked_at >= self._every:
            self._asked_at = time.monotonic()
            self._thread = threading.Thread(target=self._hear, name="deadline", daemon=True)
            self._thread.start()
        return min((end for end in (self._known, self._latest) if end is not None), default=None)

    def _hear(self) -> None:
        try:
            heard = self._ask()
        except Exception as error:  # whatever a site's tools do: the run goes on
            self._failed += 1
            if self._failed == WARNED_AT:
                line = "; ".join(part.strip() for part in str(error).splitlines())
                log.warning("the queue does not say when this job ends, and the run goes on: %s", line)
        else:
            self._known = self._known if heard is None else heard


def _queue(job: slurm.Job | None) -> Ask | None:
    """What asks the queue when this job ends; None outside Slurm, and where its commands are not there.

    Commands, and no library: a call of one may hold the interpreter, and so the run, while the controller is slow.
    """
    if job is None:
        return None
    if shutil.which("squeue") is None:  # as in many containers
        if job.ends_at is None:
            log.warning("when this job ends is not known: no squeue is on PATH; run.deadline can tell it")
        return None
    queue = CommandQueue(lambda advice: None)

    def ask() -> float | None:
        found = queue.job(job.id)
        return found and found.ends_at

    return ask
