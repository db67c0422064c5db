"""The failure of one rank ends the whole job, with the rank, the host and the traceback that caused it.

Every rank that leaves (by its last line, an exception or ``sys.exit``) tells the others how: all alike is a good end,
and an error that all ranks have is told once, by rank 0. A rank that fails alone prints its traceback; then its
``finally`` blocks run, and MPI ends the others. There are three ways out of a program and so three doors: the end of
the ``with`` block, Python's hook for uncaught exceptions, and the interpreter's exit.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import sys
import threading
import traceback
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from hpctrain.cluster.wait import late, missing, within
from hpctrain.errors import EXIT_FAILED, HpctrainError, LateError

if TYPE_CHECKING:
    from mpi4py import MPI

GRACE_SECONDS = 2.0  # how long a failing rank looks whether all others fail alike
CLEANUP_SECONDS = 5.0  # how long the ``finally`` blocks outside the ``with`` block may take
DRAIN_SECONDS = 0.5  # for the launcher to read what was printed: mpirun drops what a rank says just before it ends
EXIT_INTERRUPTED = 130


class Guard:
    """Watches the ways out of one process. It has state: whether the ranks have parted, and what was told."""

    def __init__(self) -> None:
        self._comm: MPI.Comm | None = None
        self._seconds = 0.0
        self._armed = False
        self._installed = False
        self._told: BaseException | None = None
        self._exit_code = 0
        self._failed_alike = False

    def arm(self, comm: MPI.Comm | None, seconds: float) -> None:
        """Begin to watch: the ranks of ``comm`` belong together until they part. ``seconds`` limits the parting."""
        self._comm, self._seconds = comm, seconds
        self._armed, self._told, self._exit_code, self._failed_alike = True, None, 0, False
        self._install()

    def leave(self, error: BaseException | None) -> None:
        """Part from the other ranks at the end of a ``with`` block. Collective.

        When all fail alike, rank 0 alone keeps the exception and the others leave quietly with its exit code. When
        this rank fails alone, it has a few seconds to clean up before the job ends.
        """
        code = _code(error)
        if self._part(error, code):
            if code and self._rank:
                raise SystemExit(code) from None
        elif code:
            self._tell(error)
            self._abort_later(code)
        else:
            self._others_failed()

    def abort(self, error: BaseException) -> NoReturn:
        """End the whole job now, because of ``error``. One rank is enough."""
        self._tell(error)
        self._abort(_code(error))

    @property
    def _rank(self) -> int:
        return self._comm.rank if self._comm else 0

    # ---- the doors -------------------------------------------------------------------------------------------------

    def _install(self) -> None:
        if self._installed:
            return
        self._installed = True
        self._hook, sys.excepthook = sys.excepthook, self._uncaught
        self._thread_hook, threading.excepthook = threading.excepthook, self._uncaught_in_thread
        sys.exit = self._exiting
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forked)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = _code(error)
        if self._told is error:
            self._abort(code)
        together = self._armed
        if together and not self._part(error, code):
            self.abort(error)
        if not together or self._rank == 0:
            self._hook(kind, error, trace)
        raise SystemExit(code)

    def _uncaught_in_thread(self, args: threading.ExceptHookArgs) -> None:
        if self._armed and args.exc_value is not None and args.exc_type is not SystemExit:
            self.abort(args.exc_value)
        self._thread_hook(args)

    def _exiting(self, status: object = None) -> NoReturn:
        self._exit_code = _code(SystemExit(status))
        raise SystemExit(status)

    def _at_exit(self) -> None:
        if self._armed and self._told:
            self._abort(_code(self._told))
        if not self._armed or self._part(SystemExit(self._exit_code), self._exit_code):
            self._drain()
        elif self._exit_code:
            self.abort(SystemExit(self._exit_code))
        else:
            self._others_failed()

    def _drain(self) -> None:
        """Let the launcher read what rank 0 told of an error of all; the others wait for it in MPI's own end.

        The first rank that ends with an error makes the launcher end the job.
        """
        if self._failed_alike and self._rank == 0:
            sys.stdout.flush()
            sys.stderr.flush()
            within(lambda: False, DRAIN_SECONDS)

    def _forked(self) -> None:
        """A forked child is no rank, and its end is its parent's affair."""
        self._armed = self._failed_alike = False

    # ---- parting ---------------------------------------------------------------------------------------------------

    def _part(self, error: BaseException | None, code: int) -> bool:
        """Whether all ranks leave, and in the same way; one that leaves in good order waits for the others."""
        self._armed = False
        if self._comm is None or self._comm.size == 1:
            return True
        mine = _digest(error if code else None)
        theirs = bytearray(len(mine) * self._comm.size)
        self._parting = self._comm.Iallgather(mine, theirs)  # kept: MPI writes to its memory until it is done
        if not within(self._parting.Test, GRACE_SECONDS if code else self._seconds):
            if not code:
                self.abort(late(missing(self._comm), "the end of the run", self._seconds))
            return False
        alike = bytes(theirs) == mine * self._comm.size
        self._failed_alike = alike and code != 0
        return alike

    def _others_failed(self) -> NoReturn:
        """Another rank has failed and ends the job: wait for it, so that its message is the one that is read."""
        within(lambda: False, GRACE_SECONDS + 2 * CLEANUP_SECONDS)
        self._abort(EXIT_FAILED)

    def _tell(self, error: BaseException) -> None:
        if self._told is error:
            return
        self._told = error
        lines = _text(error).splitlines()
        who = f"rank {self._rank} on {socket.gethostname()}"
        sys.stdout.flush()
        sys.stderr.write("".join(f"{who}: {line}\n" for line in lines))
        sys.stderr.flush()

    def _abort_later(self, code: int) -> None:
        timer = threading.Timer(CLEANUP_SECONDS, self._abort, [code])
        timer.daemon = True
        timer.start()
        self._armed = True

    def _abort(self, code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        if self._comm is not None:
            within(lambda: False, DRAIN_SECONDS)
            from mpi4py import MPI

            # All of MPI_COMM_WORLD: of another communicator, MPICH under srun ends this rank alone. And under srun it
            # only asks for the end, and comes back.
            MPI.COMM_WORLD.Abort(code or EXIT_FAILED)
            within(lambda: False, CLEANUP_SECONDS)
            os._exit(code or EXIT_FAILED)
        raise SystemExit(code or EXIT_FAILED)


GUARD = Guard()


def _code(error: BaseException | None) -> int:
    """The exit code that an exception stands for."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return error.exit_code if isinstance(error, HpctrainError) else EXIT_FAILED


def _text(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"left with exit code {_code(error)} while other ranks went on"
    if isinstance(error, LateError):
        return str(error)
    return "".join(traceback.format_exception(error))


def _digest(error: BaseException | None) -> bytes:
    """Eight bytes that are equal for equal ends; zeros for a good one."""
    if error is None:
        return bytes(8)
    return hashlib.blake2b(f"{type(error).__name__} {_code(error)} {error}".encode(), digest_size=8).digest()
