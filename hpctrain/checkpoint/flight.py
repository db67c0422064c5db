"""Flight: one save on its way to the disk, while its run trains on.

One thread of each rank does all that touches the disk. It makes no MPI call, since the run's own thread talks in the
same groups. Between steps the ranks tell each other how far they are, by one number, the least of all:

    WRITING    rank 0 makes the file; each rank writes its copy as soon as it sees the file, and digests it
    WRITTEN    every byte is in the file: a block that ranks share is digested from there
    CHECKED    all checksums are made: ranks bring them together, and rank 0 publishes
    PUBLISHED  the file has its name

A rank that shares no block goes from WRITING to CHECKED at once. So a save ends within the steps in which its writing
ends, and two more. FAILED is less than all: an error of one rank ends the save on all of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import numpy as np
import torch

from hpctrain.checkpoint import checksums, disk
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.checksums import Made, Torn, Written
from hpctrain.checkpoint.snapshot import turns
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError

FAILED, WRITING, WRITTEN, CHECKED, PUBLISHED = range(-1, 4)
TURN_BYTES = 256 << 20  # written, or read, before a thread looks whether its save was given up
SEEN_SECONDS = 600.0  # for a rank to see the file: a network file system may show it late
PAUSE_SECONDS = (0.005, 1.0)  # between two looks, at first and at most
STILL_SECONDS = 600.0  # for one turn, or for what else a thread does at once
MEET_SECONDS = 0.05  # between two meetings of ranks that wait for a save
CLOSE_SECONDS = 60.0  # for a thread to end when its save is given up


@dataclass(frozen=True)
class Acts:
    """What a save asks for, in a thread; all but ``written`` are asked of the leading rank alone."""

    make: Callable[[], None]
    """Make the file aside, laid out and with room for all of it."""
    written: Callable[[], list[Written]]
    """What this rank writes."""
    publish: Callable[[np.ndarray], None]
    """Complete the file with its checksums, and give it its name."""
    discard: Callable[[], None]
    """Leave nothing aside."""


class Flight:
    """A save on its way; live. All ranks make one and call ``advance`` and ``land`` in the same order."""

    def __init__(self, step: int, part: Path, acts: Acts, blocks: int, group: Group, sync: bool) -> None:
        self.step, self.part, self.group = step, part, group
        self._acts, self._sync, self._made = acts, sync, Made(blocks)
        self._written: list[Written] = []
        self._torn: list[Torn] = []
        self._given_up = Event()
        self._doing, self._moved = "", time.monotonic()
        self._thread = ThreadPoolExecutor(1, "save")
        self._start(WRITING, self._write)

    def advance(self) -> bool:
        """Go on as far as all ranks can, without waiting for the disk; whether the file has its name. Collective.

        An error of any rank is raised on all, once no rank writes any more. After it, as after any, ``close``.
        """
        ended = self._task.done()
        error = self._task.exception() if ended else self._still()
        own = FAILED if error else self._task.result() if ended else self._before
        told = torch.tensor([own], device=self.group.device)
        self.group.all_reduce(told, "min")
        least = int(told)
        if least == FAILED:
            self._fail(error)
        if least == PUBLISHED:
            self._thread.shutdown()
        elif ended and own == least:
            {WRITTEN: self._check_torn, CHECKED: self._meet}[least]()
        return least == PUBLISHED

    def land(self) -> bool:
        """Return, and say True, when the file has its name. Collective; errors as in ``advance``."""
        while not self.advance():
            wait([self._task], MEET_SECONDS)  # no longer: a rank may wait for a file that rank 0 could not make
        return True

    def close(self) -> None:
        """Give up: end this rank's thread, and leave nothing aside. Each rank calls it by itself; again is no harm."""
        self._stop()
        if self.group.leads:
            self._acts.discard()

    # ---- between steps ---------------------------------------------------------------------------------------------

    def _still(self) -> CheckpointError | None:
        """The error of a thread that a disk does not let go."""
        if time.monotonic() - self._moved < STILL_SECONDS:
            return None
        why = f"for {STILL_SECONDS:g} s the file system has not answered a call"
        return CheckpointError(f"{self._doing} does not go on", why, "see whether the file system is well")

    def _start(self, before: int, act: Callable[[], int]) -> None:
        self._moved = time.monotonic()
        self._before, self._task = before, self._thread.submit(act)

    def _check_torn(self) -> None:
        self._start(WRITTEN, self._digest_torn)

    def _meet(self) -> None:
        sums = checksums.met(self.part, self._written, self._made, self.group)
        self._start(CHECKED, lambda: self._publish(sums))

    def _fail(self, error: BaseException | None) -> None:
        """Raise the first rank's error on all ranks, once this rank's thread has ended."""
        self._stop()

        def act() -> None:
            if error:
                raise error

        together(self.group, act, self._doing)

    def _stop(self) -> None:
        self._given_up.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait([self._task], CLOSE_SECONDS)

    # ---- in the thread ---------------------------------------------------------------------------------------------

    def _write(self) -> int:
        if self.group.leads:
            self._doing = f"laying out step {self.step}"
            self._acts.make()
        self._doing = f"writing {self.part}"
        self._written = self._acts.written()
        self._see()
        for turn in turns((piece for _, pieces in self._written for piece in pieces), TURN_BYTES):
            self._rest(0)
            disk.write(self.part, turn, self._sync, self._made.see, self.group.rank / self.group.size)
        self._torn = checksums.add_whole(self._made, self._written)
        return WRITTEN if self._torn else CHECKED

    def _digest_torn(self) -> int:
        self._doing = f"checking {self.part}"
        turn = TURN_BYTES // BLOCK_BYTES
        for start in range(0, len(self._torn), turn):
            self._rest(0)
            checksums.add_torn(self.part, self._made, self._torn[start : start + turn])
        return CHECKED

    def _publish(self, sums: np.ndarray) -> int:
        if self.group.leads:
            self._doing = f"publishing step {self.step}"
            self._acts.publish(sums)
        return PUBLISHED

    def _see(self) -> None:
        """Wait until this rank can open the file that rank 0 makes. It is opened, not looked for: no listing is old."""
        until, (pause, longest) = time.monotonic() + SEEN_SECONDS, PAUSE_SECONDS
        while not _opens(self.part):
            if time.monotonic() > until:
                raise CheckpointError(
                    f"{self.part} cannot be seen after {SEEN_SECONDS:g} s",
                    "rank 0 has not made it yet, or this rank's node does not show it",
                    "see whether all nodes mount the run's folder (run.dir), or set checkpoint.background to false",
                )
            self._rest(pause)
            pause = min(2 * pause, longest)

    def _rest(self, seconds: float) -> None:
        """Show that this thread goes on, unless its save was given up."""
        self._moved = time.monotonic()
        if self._given_up.wait(seconds):
            raise _GivenUp


class _GivenUp(Exception):
    """Another rank failed: nobody hears this."""


def _opens(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_WRONLY))
    except FileNotFoundError:
        return False
    return True
