"""Whether somebody asked this run to stop: a signal of the scheduler, or a file named ``stop`` in the run's folder.

A handler runs between any two instructions, perhaps in the middle of a step, so it does nothing but set a flag; the
training loop asks at the end of each step, and all ranks agree. Which signal comes depends on the site: Slurm sends
TERM at the time limit and what ``--signal`` says before it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain.errors import ConfigError

SIGNALS = ("TERM", "USR1", "USR2")
STOP_FILE = "stop"


@contextmanager
def listening(folder: Path | None, signals: Sequence[str] = SIGNALS) -> Iterator[Callable[[], bool]]:
    """Listen for the signals while the block runs; gives a function that says whether to stop.

    Handlers that stood before are called too, and stand again afterwards. Call it in the main thread. One rank that
    looks for the file is enough, and spares the file system: the others give None for ``folder``. The file is taken
    away at the end of the block, so that the next start goes on.
    """
    file = folder / STOP_FILE if folder else None
    flag = Flag()
    numbers = [_number(name) for name in signals]
    for number in numbers:
        flag.listen(number)
    try:
        yield lambda: flag.raised or (file is not None and file.exists())
    finally:
        flag.restore()
        if file:
            file.unlink(missing_ok=True)


class Flag:
    """A flag that signals raise. It has state: the handlers that stood before."""

    def __init__(self) -> None:
        self.raised = False
        self._before: dict[int, Any] = {}

    def listen(self, number: int) -> None:
        """Raise the flag at this signal, then call the handler that stood before."""
        self._before.setdefault(number, signal.signal(number, self._handle))

    def restore(self) -> None:
        """Put the former handlers back. One that was not set from Python cannot be; the default takes its place."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.raised = True
        before = self._before.get(number)
        if callable(before):
            before(number, frame)


def _number(name: str) -> int:
    try:
        return signal.Signals["SIG" + name.upper().removeprefix("SIG")]
    except KeyError:
        raise ConfigError(f"{name!r} is not a signal", "", f"give names such as {', '.join(SIGNALS)}") from None
