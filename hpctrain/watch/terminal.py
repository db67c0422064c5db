"""Terminal: whether a person is watching, also where a launcher carries the error stream to the screen.

A rank that mpirun started writes into a pipe, whatever is at its other end. So a rank on the machine of its launcher
looks at the launcher's own error stream; ranks elsewhere see no terminal, and neither does a batch job.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

import psutil

LAUNCHERS = ("mpirun", "mpiexec", "orterun", "prterun", "prted", "hydra_pmi_proxy", "mpiexec.hydra")
UNKNOWN = 80  # columns of a terminal that does not say


def columns() -> int | None:
    """The width of the terminal on which the error stream is seen; None where none is known of."""
    with suppress(OSError):
        return os.get_terminal_size(sys.stderr.fileno()).columns or UNKNOWN
    with suppress(OSError, psutil.Error):
        for process in psutil.Process().parents():
            if process.name() not in LAUNCHERS:
                break
            with suppress(OSError):
                return _columns(f"/proc/{process.pid}/fd/2")
    return None


def _columns(path: str) -> int:
    """The width of the terminal behind a path; OSError where it is none."""
    file = os.open(path, os.O_WRONLY | os.O_NOCTTY)
    try:
        return os.get_terminal_size(file).columns or UNKNOWN
    finally:
        os.close(file)
