"""Errors that all ranks meet together: what fails on one is raised on every one, and none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpctrain import errors
from hpctrain.comm.group import Group
from hpctrain.errors import DataError, HpctrainError

MEND = "look at its space, quota and rights, and whether all ranks see this folder"


def led(group: Group, act: Callable[[], Any]) -> Any:
    """Do ``act`` on the leading rank; its JSON-able value, or its error, is every rank's. Collective."""
    told, error = _tried(act) if group.leads else (None, None)
    return _value(group.share(told), error)


def each(group: Group, act: Callable[[], Any]) -> list[Any]:
    """Do ``act`` on every rank; the JSON-able values of all, or the first rank's error, on every rank. Collective."""
    told, error = _tried(act)
    return [_value(one, error) for one in group.collect(told)]


def _tried(act: Callable[[], Any]) -> tuple[dict[str, Any], Exception | None]:
    try:
        return {"value": act()}, None
    except Exception as error:
        return {"error": _told(error)}, error


def _told(error: Exception) -> list[str]:
    if isinstance(error, HpctrainError):
        return [type(error).__name__, error.what, error.why, error.mend]
    if isinstance(error, OSError):
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        return [DataError.__name__, what, "the file system refused", MEND]
    return [DataError.__name__, "preparing the text met an error", f"{type(error).__name__}: {error}", ""]


def _value(told: dict[str, Any], error: Exception | None) -> Any:
    """The value; an error is raised anew, and on the rank where it happened with its traceback."""
    if "error" in told:
        kind, what, why, mend = told["error"]
        raise getattr(errors, kind)(what, why, mend) from error
    return told["value"]
