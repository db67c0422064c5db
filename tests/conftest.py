"""What every test may use: the world's communicator, parts of it, and repeatable random examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from mpi4py import MPI

pytest_plugins = ["hpctrain.testing.plugin"]

# The same examples on every rank and in every run; no deadline, because ranks share cores.
settings.register_profile("hpctrain", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("hpctrain")


@pytest.fixture(scope="session")
def comm() -> MPI.Comm:
    """All ranks of this launch."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def first(comm: MPI.Comm) -> Callable[[int], MPI.Comm | None]:
    """``first(n)`` gives the first ``n`` ranks a communicator of their own, and None to the others.

    Collective: every rank calls it with the same numbers in the same order. The same ``n`` gives the same
    communicator again.
    """
    from mpi4py import MPI

    parts: dict[int, MPI.Comm | None] = {}

    def part(ranks: int) -> MPI.Comm | None:
        if ranks not in parts:
            made = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank)
            parts[ranks] = None if made == MPI.COMM_NULL else made
        return parts[ranks]

    return part
