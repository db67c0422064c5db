"""A bar on the terminal while a command works on long files, and lines where nobody watches a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tell = Callable[[int, int], None]


@contextmanager
def bar(title: str, speaks: bool = True, ranks: int = 1, lasting: bool = False) -> Iterator[Tell]:
    """What to tell the bytes that are done of this rank's share, and all of it; ``ranks`` have equal shares.

    It is shown on the error stream by the rank that ``speaks``; ``lasting`` as in ``watch.progress.shown``.
    """
    if not speaks:
        yield lambda done, total: None
        return
    from hpctrain.watch.progress import shown

    with shown(sys.stderr, title, lasting) as show:
        yield lambda done, total: show(done * ranks, total * ranks, "")
