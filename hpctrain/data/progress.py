"""Progress of preparing text: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

Tell = Callable[[Counter[str], int], None]
"""Told on the leading rank after each round: how many bytes, documents, tokens ... are done, and the bytes of all."""

LINE_SECONDS = 10.0  # between two lines of a log


@contextmanager
def shown(stream: TextIO) -> Iterator[Tell]:
    """What ``prepare`` tells, shown on ``stream`` in the way that suits it."""
    with (_bar if stream.isatty() else _lines)(stream) as tell:
        yield tell


@contextmanager
def _bar(stream: TextIO) -> Iterator[Tell]:
    columns = (TextColumn("prepare"), BarColumn(), DownloadColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(file=stream)) as progress:
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
