"""A bar on the terminal while long work goes on, and a line now and then where nobody watches a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int, int], None]

LINE_SECONDS = 10.0


@contextmanager
def bar(title: str, speaks: bool) -> Iterator[Tell]:
    """What to tell how much is done, and of how much; it is shown on the error stream by the rank that ``speaks``."""
    from hpctrain.watch.terminal import columns

    width = columns() if speaks else None
    if width is None:
        yield _lines(title) if speaks else lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    parts = (TextColumn(title), BarColumn(width // 3), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr, force_terminal=True, width=width)  # through mpirun's pipe as well
    with Progress(*parts, console=console, transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _lines(title: str) -> Tell:
    """The first line comes after LINE_SECONDS, so short work leaves none."""
    last = [time.monotonic()]

    def tell(done: int, total: int) -> None:
        now = time.monotonic()
        if now - last[0] >= LINE_SECONDS:
            last[0] = now
            print(f"{title} {done / max(total, 1):4.0%}", file=sys.stderr, flush=True)

    return tell
