"""Futex: sleeping in the kernel until another process changes a word of shared memory.

Linux only, and without a wrapper in the C library. Elsewhere ``wait`` is a short sleep and ``wake`` does nothing, which
is right, only slower: a waiter looks at the word again after each ``wait``, whatever woke it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import time

_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "ppc64": 221, "s390x": 238}
_WAIT, _WAKE, _ALL = 0, 1, 0x7FFFFFFF
_SHORT_SLEEP_SECONDS = 100e-6

_NUMBER = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None


class _Duration(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _system_call() -> ctypes._NamedFuncPointer | None:
    if _NUMBER is None:
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p]
    call.restype = ctypes.c_long
    return call


_CALL = _system_call()
_LOW_WORD = 0 if sys.byteorder == "little" else 4  # of a number of 64 bits: a futex has 32


def wait(address: int, seen: int, seconds: float) -> None:
    """Sleep while the 64-bit number at ``address`` is still ``seen``, at most ``seconds``; it may end early."""
    if _CALL is None:
        return time.sleep(min(seconds, _SHORT_SLEEP_SECONDS))
    whole = int(seconds)
    limit = _Duration(whole, int((seconds - whole) * 1e9))
    _CALL(_NUMBER, address + _LOW_WORD, _WAIT, seen & 0xFFFFFFFF, ctypes.byref(limit))


def wake(address: int) -> None:
    """Wake every process that waits for the number at ``address``."""
    if _CALL is not None:
        _CALL(_NUMBER, address + _LOW_WORD, _WAKE, _ALL, None)


