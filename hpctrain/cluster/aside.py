"""Aside: names for what is not whole yet. Such a name tells whose it is, so that what the dead left can be removed.

Whoever writes makes a name that no other writer has, and gives the whole thing its right name last. Nobody holds a
lock, so a job that is killed leaves none.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from pathlib import Path

TAG = r"(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]+"
"""What a name has of its writer, as a regular expression."""

# What was written aside on another host, whose processes cannot be asked, is dead after this long without a write.
STALE_SECONDS = 3600.0


def tag() -> str:
    """What a name gets so that it tells this process, and differs from any other's."""
    return f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"


def dead(path: Path, host: str, pid: int) -> bool:
    """Whether nobody writes ``path``, a file or a folder of files, any longer; host and process are of its name."""
    if host == socket.gethostname() and not _alive(pid):
        return True
    try:
        last = max(one.stat().st_mtime for one in (path, *(path.iterdir() if path.is_dir() else ())))
    except FileNotFoundError:
        return False
    return time.time() - last > STALE_SECONDS


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
