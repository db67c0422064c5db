"""Errors that all ranks meet together: what fails on one rank is raised on every one, and none is left waiting."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from hpctrain import errors
from hpctrain.comm.group import Group
from hpctrain.errors import HpctrainError

Kind = type[HpctrainError]

LOOK = "look at the folder's name and rights, and whether all ranks see it"
MENDS = dict.fromkeys(("EACCES", "EEXIST", "ENOENT", "ENOTDIR", "EPERM", "EROFS"), LOOK) | {
    "ENOSPC": "free space there, or give another folder (run.dir)",
    "EDQUOT": "your quota is used up there: free space, or give another folder (run.dir)",
    "ENOLCK": "the file system has no lock service: mount it with locks, or set checkpoint.writer to direct",
}


def led(group: Group, act: Callable[[], Any], doing: str, kind: Kind = HpctrainError) -> Any:
    """Do ``act`` on the leading rank, and give its JSON-able value to all; its error is raised on all. Collective.

    An error that is not of our own tree is told as ``kind``; ``doing`` says what was done when it came.
    """
    value, error = _tried(act) if group.leads else (None, None)
    told = group.share({"value": value, "error": error and _told(error, doing, kind)})
    if told["error"]:
        raise _made(told["error"]) from error
    return told["value"]


def together(group: Group, act: Callable[[], Any], doing: str, kind: Kind = HpctrainError) -> Any:
    """Do ``act`` on every rank and give its own value; the first rank's error is raised on all. Collective.

    ``doing`` and ``kind`` as in ``led``.
    """
    value, error = _tried(act)
    told = group.collect(error and _told(error, doing, kind))
    failed = [rank for rank, one in enumerate(told) if one]
    if failed:
        raise _of_rank(failed, told[failed[0]], group.size) from error
    return value


def _tried(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return act(), None
    except Exception as error:
        return None, error


def _told(error: Exception, doing: str, kind: Kind) -> dict[str, str]:
    if isinstance(error, HpctrainError):
        return {"kind": type(error).__name__, "what": error.what, "why": error.why, "mend": error.mend}
    mend = MENDS.get(errno.errorcode.get(getattr(error, "errno", None) or 0, ""), "")
    return {"kind": kind.__name__, "what": f"{doing} failed", "why": _cause(error), "mend": mend}


def _cause(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return f"{type(error).__name__}: {error}"


def _made(told: dict[str, str]) -> HpctrainError:
    return getattr(errors, told["kind"])(told["what"], told["why"], told["mend"])


def _of_rank(failed: list[int], told: dict[str, str], size: int) -> HpctrainError:
    if size == 1:
        return _made(told)
    others = f" and {len(failed) - 1} more of {size}" if len(failed) > 1 else ""
    return _made(told | {"what": f"rank {failed[0]}{others}: {told['what']}"})
