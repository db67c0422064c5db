"""Progress of preparing text: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from hpctrain.watch.terminal import columns

Tell = Callable[[Counter[str], int], None]
"""Told on the leading rank after each round: how many bytes, documents, tokens ... are done, and the bytes of all."""

LINE_SECONDS = 10.0  # between two lines of a log


@contextmanager
def shown(stream: TextIO) -> Iterator[Tell]:
    """What ``prepare`` tells, shown on ``stream`` in the way that suits it."""
    width = columns() if stream is sys.stderr else None
    with _lines(stream) if width is None else _bar(stream, width) as tell:
        yield tell


@contextmanager
def _bar(stream: TextIO, width: int) -> Iterator[Tell]:
    parts = (TextColumn("prepare"), BarColumn(width // 5), DownloadColumn(), TextColumn("{task.fields[text]}"))
    console = Console(file=stream, force_terminal=True, width=width)  # through mpirun's pipe as well
    with Progress(*parts, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("prepare", total=None, text="")

        def tell(done: Counter[str], total: int) -> None:
            progress.update(task, completed=min(done["bytes"], total), total=total, text=_told(done))

        yield tell


@contextmanager
def _lines(stream: TextIO) -> Iterator[Tell]:
    last = [float("-inf")]

    def tell(done: Counter[str], total: int) -> None:
        now = time.monotonic()
        if done["bytes"] >= total or now - last[0] >= LINE_SECONDS:
            last[0] = now
            part = min(done["bytes"] / max(total, 1), 1.0)
            print(f"prepare {part:4.0%} of {total / 2**20:.1f} MiB  {_told(done)}", file=stream, flush=True)

    yield tell


def _told(done: Counter[str]) -> str:
    return f"{done['documents']:,} documents  {done['tokens']:,} tokens"
