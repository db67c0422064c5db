"""What all ranks meet together while they save or load: an error of one is a CheckpointError of all.

One that says that there is no room is a FullError of all: a run may choose to go on without that save.
"""

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

from hpctrain.comm import together as comm
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError, FullError

FULL = (errno.ENOSPC, errno.EDQUOT)


def led(group: Group, act: Callable[[], Any], doing: str) -> Any:
    """As ``comm.together.led``."""
    return comm.led(group, partial(_tried, act, doing), doing, CheckpointError)


def together(group: Group, act: Callable[[], Any], doing: str) -> Any:
    """As ``comm.together.together``."""
    return comm.together(group, partial(_tried, act, doing), doing, CheckpointError)


def _tried(act: Callable[[], Any], doing: str) -> Any:
    try:
        return act()
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        mend = comm.MENDS[errno.errorcode[error.errno]]
        raise FullError(f"{doing} failed", f"{where}{error.strerror}", mend) from error
