"""Progress of preparing text: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from hpctrain.watch import progress

Tell = Callable[[Counter[str], int], None]
"""Told on the leading rank after each round: how many bytes, documents, tokens ... are done, and the bytes of all."""


@contextmanager
def shown(stream: TextIO) -> Iterator[Tell]:
    """What ``prepare`` tells, shown on ``stream`` in the way that suits it."""
    with progress.shown(stream, "prepare") as show:
        yield lambda done, total: show(done["bytes"], total, _told(done))


def _told(done: Counter[str]) -> str:
    return f"{done['documents']:,} documents  {done['tokens']:,} tokens"
