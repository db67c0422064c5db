"""Whether this run is to stop, and why: a signal, a file named ``stop`` in its folder, or the end of the job's time.

A handler runs between any two instructions, perhaps in the middle of a step, so it does nothing but note the signal.
The run asks between steps, between the batches of a validation and between the parts of its set-up, and all ranks
agree. Which signal comes depends on the site: Slurm sends TERM at the time limit, and what ``--signal`` says before it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from hpctrain.cluster.deadline import Deadline, Pace, pressing
from hpctrain.cluster.jobs import NO_REQUEUE
from hpctrain.config import RunConfig
from hpctrain.errors import EXIT_REQUEUE, ConfigError

SIGNALS = ("TERM", "USR1", "USR2")
STOP_FILE = "stop"


class Ranks(Protocol):
    """What of the World is needed here."""

    rank: int
    leads: bool

    def agree(self, value: bool) -> bool: ...

    def collect(self, value: Any) -> list[Any]: ...


class Flag:
    """Notes the first of some signals, from now on; live. Make it in the main thread.

    Handlers that stood before are called too. A forked child has those again: to end it is its parent's affair.
    """

    def __init__(self, signals: Sequence[str] = SIGNALS) -> None:
        self.heard: int | None = None
        numbers = [_number(name) for name in signals]
        self._before: dict[int, Any] = {}
        for number in numbers:
            self._before.setdefault(number, signal.signal(number, self._handle))
        _FLAGS.append(self)

    def restore(self) -> None:
        """Put the former handlers back. One that was not set from Python cannot be; the default takes its place."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _FLAGS.remove(self)

    def ignore(self) -> None:
        """Let no signal change anything any more: the process has done its work, and is about to end."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.heard is None:
            self.heard = number
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


_FLAGS: list[Flag] = []
_MASKS: list[set[int]] = []


def _forking() -> None:
    """Hold signals back, so that none meets a child that has not put its handlers back yet."""
    numbers = {number for flag in _FLAGS for number in flag._before}
    _MASKS.append(signal.pthread_sigmask(signal.SIG_BLOCK, numbers))


def _forked() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASKS.pop())


def _born() -> None:
    for flag in reversed(_FLAGS[:]):
        flag.restore()
    _forked()


os.register_at_fork(before=_forking, after_in_parent=_forked, after_in_child=_born)


class Stop:
    """What all ranks ask whether to go on; live. ``file`` and ``deadline`` are rank 0's alone."""

    def __init__(
        self, world: Ranks, flag: Flag, pace: Pace, file: Path | None = None, deadline: Deadline | None = None
    ) -> None:
        self.world, self.flag, self.pace, self.file, self.deadline = world, flag, pace, file, deadline
        self.why: str | None = None
        """What all ranks agreed to stop for."""

    def agreed(self) -> bool:
        """Whether all ranks stop now. Once they have agreed it stays so. Collective."""
        return self._agreed(self._asked() or self._pressed())

    def heed(self) -> None:
        """Leave with all ranks, where nothing is to be saved yet, if a signal or the file asks for it. Collective.

        The end of the time does not: a life that is too short for a step would be followed by others like it.
        """
        if not self._agreed(self._asked()):
            return
        if self.world.leads:
            line = f"stopped before the first step: {self.why}; start the same command again to go on"
            print(line, file=sys.stderr, flush=True)
        raise SystemExit(EXIT_REQUEUE)

    def close(self) -> None:
        """Take the file away, so that the next start goes on; a batch script finds another, and does not requeue."""
        with suppress(OSError):  # as a rule there is none
            if self.file and self.why:
                self.file.replace(self.file.with_name(NO_REQUEUE))
            elif self.file:
                self.file.unlink()

    def _agreed(self, own: str | None) -> bool:
        if self.why is None and self.world.agree(own is not None):
            self.why = next(why for why in self.world.collect(own) if why)
        return self.why is not None

    def _asked(self) -> str | None:
        if self.flag.heard is not None:
            name = signal.Signals(self.flag.heard).name.removeprefix("SIG")
            return f"signal {name} at rank {self.world.rank}"
        return f"the file {self.file}" if self.file and self.file.exists() else None

    def _pressed(self) -> str | None:
        return self.deadline and pressing(time.time(), self.deadline.ends_at(), self.pace.reserve())


@contextmanager
def listening(run: RunConfig, world: Ranks, flag: Flag, deadline: Deadline | None = None) -> Iterator[Stop]:
    """Listen to whoever asks the run to stop, while the block runs. All ranks do; one looks for the file.

    So the file system is spared. ``deadline`` is rank 0's.
    """
    file = run.folder / STOP_FILE if world.leads else None
    stop = Stop(world, flag, Pace(run.margin_seconds), file, deadline)
    try:
        yield stop
    finally:
        stop.close()


def _number(name: str) -> int:
    try:
        return signal.Signals["SIG" + name.upper().removeprefix("SIG")]
    except KeyError:
        raise ConfigError(f"{name!r} is not a signal", "", f"give names such as {', '.join(SIGNALS)}") from None
