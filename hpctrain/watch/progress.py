"""Progress of bytes: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hpctrain.watch.terminal import columns

Show = Callable[[int, int, str], None]
"""Given the bytes that are done, all of them, and what else there is to say."""

LINE_SECONDS = 10.0  # between two lines of a log


@contextmanager
def shown(stream: TextIO, title: str, lasting: bool = True) -> Iterator[Show]:
    """What shows progress on ``stream`` in the way that suits it; one rank calls it.

    What is ``lasting`` has a first line at once and a last one when all is done, and a bar that stays; else short work
    leaves nothing.
    """
    width = columns() if stream is sys.stderr else None
    with _lines(stream, title, lasting) if width is None else _bar(stream, title, width, lasting) as show:
        yield show


@contextmanager
def _bar(stream: TextIO, title: str, width: int, lasting: bool) -> Iterator[Show]:
    parts = (TextColumn(title), BarColumn(width // 5), DownloadColumn(), TextColumn("{task.fields[text]}"))
    console = Console(file=stream, force_terminal=True, width=width)  # through mpirun's pipe as well
    with Progress(*parts, TimeRemainingColumn(), console=console, transient=not lasting) as progress:
        task = progress.add_task(title, total=None, text="")

        def show(done: int, total: int, text: str = "") -> None:
            progress.update(task, completed=min(done, total), total=total, text=text)

        yield show


@contextmanager
def _lines(stream: TextIO, title: str, lasting: bool) -> Iterator[Show]:
    last = [float("-inf") if lasting else time.monotonic()]

    def show(done: int, total: int, text: str = "") -> None:
        now = time.monotonic()
        if (lasting and done >= total) or now - last[0] >= LINE_SECONDS:
            last[0] = now
            part = min(done / max(total, 1), 1.0)
            print(f"{title} {part:4.0%} of {total / 2**20:.1f} MiB  {text}".rstrip(), file=stream, flush=True)

    yield show
