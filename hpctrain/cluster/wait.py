"""Wait for other ranks, with an end: a wait that takes too long says which ranks did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpctrain.errors import LateError

if TYPE_CHECKING:
    from mpi4py import MPI

_HERE, _ANSWER = 30_001, 30_002


def wait(request: MPI.Request, comm: MPI.Comm, what: str, seconds: float) -> None:
    """Return when ``request``, part of a collective of ``comm``, is done.

    Raises LateError with the ranks that did not come. Between two looks this rank gives its core away.
    """
    if not within(request.Test, seconds):
        raise late(missing(comm), what, seconds)


def late(ranks: list[int], what: str, seconds: float) -> LateError:
    """The error that says who did not come."""
    names = ", ".join(map(str, ranks)) if ranks else "(all answer now)"
    return LateError(
        f"{what}: rank {names} did not come within {seconds:g} s",
        "it has ended, hangs, or is still at work",
        "look for its own messages; a larger comm.timeout_seconds (comm.start_seconds at the start) waits longer",
    )


def missing(comm: MPI.Comm, seconds: float = 3.0) -> list[int]:
    """The ranks of ``comm`` that do not call this function too, found out by rank 0 and told to those that do.

    Where rank 0 itself is missing, it is the only one that the others can name.
    """
    return _collect(comm, seconds) if comm.rank == 0 else _report(comm, seconds)


def within(done: Callable[[], bool], seconds: float) -> bool:
    """Whether ``done`` became true in time. The first looks come quickly, later ones let others use the core."""
    limit, pause = time.monotonic() + seconds, 1e-5
    while not done():
        if time.monotonic() > limit:
            return False
        time.sleep(pause)
        pause = min(pause * 1.5, 2e-3)
    return True


def _collect(comm: MPI.Comm, seconds: float) -> list[int]:
    calls = {rank: comm.irecv(source=rank, tag=_HERE) for rank in range(1, comm.size)}
    here: set[int] = set()

    def all_here() -> bool:
        here.update(rank for rank, call in calls.items() if rank not in here and call.test()[0])
        return len(here) == len(calls)

    within(all_here, seconds)
    absent = sorted(calls.keys() - here)
    for rank in here:
        comm.isend(absent, dest=rank, tag=_ANSWER)
    for rank in absent:
        calls[rank].cancel()
    return absent


def _report(comm: MPI.Comm, seconds: float) -> list[int]:
    call = comm.isend(None, dest=0, tag=_HERE)
    answer = comm.irecv(source=0, tag=_ANSWER)
    found: list[list[int]] = []

    def answered() -> bool:
        done, ranks = answer.test()
        if done:
            found.append(ranks)
        return done

    if within(answered, 2 * seconds):
        call.wait()
        return found[0]
    answer.cancel()
    return [0]
