"""What is refused at the door: ranks that were started in a way that cannot work, each told in a sentence."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from hpctrain.cluster.container import Container
from hpctrain.cluster.launcher import Launch
from hpctrain.errors import LaunchError

LOOPBACK = ("127.", "::1")
OUTSIDE = Container()


def check_size(launch: Launch, size: int, library: str, container: Container = OUTSIDE) -> None:
    """Refuse N processes that each believe to be alone, and any other size than the launcher's.

    ``library`` is the MPI library's version, ``container`` what this process runs in.
    """
    if launch.size is None or launch.size == size:
        return
    name = library.strip().splitlines()[0].split(",")[0].strip("\0 ")
    said = f"{launch.sources[1]} = {launch.size}"
    if size == 1:
        raise LaunchError(
            f"{launch.launcher} started {launch.size} ranks ({said}), but for MPI this process is alone",
            f"the MPI library ({name}) and the launcher speak no common PMI: {launch.size} separate runs would start",
            _mend(launch) + (_mend_in_container(launch) if container else ""),
        )
    raise LaunchError(
        f"MPI counts {size} ranks, but {launch.launcher} says {said}",
        "both must tell of the same job; the variable may be inherited from another one",
        f"start the job from a fresh shell, or unset {launch.sources[1]}",
    )


def check_master_addr(given: str, addresses: Collection[str], host: str, own: Set[str], nodes: int) -> None:
    """Refuse a MASTER_ADDR that is not the node of rank 0.

    ``addresses`` is what it resolves to there, ``own`` that node's names and addresses. A loopback address serves
    only where all ranks are on one node.
    """
    found = {given, *addresses}
    loops = nodes > 1 and any(_loops(name) for name in found)
    if own & found and not loops:
        return
    raise LaunchError(
        f"MASTER_ADDR = {given} is not an address of rank 0's node, {host}, that the other ranks could reach",
        "torch on the other ranks would look for rank 0 there and wait for ever",
        "unset MASTER_ADDR (the ranks meet through MPI and need none), or set comm.check_master_addr to false",
    )


def check_equal(name: str, given: Sequence[str | None]) -> None:
    """Refuse a variable that must be the same on all ranks and is not."""
    if len(set(given)) > 1:
        first = {value: rank for rank, value in reversed(list(enumerate(given)))}
        shown = ", ".join(f"rank {rank}: {value or 'unset'}" for value, rank in list(reversed(first.items()))[:8])
        raise LaunchError(
            f"{name} differs between ranks ({shown})",
            "ranks that look for each other in different places never meet",
            f"unset {name}: the ranks meet through MPI and need none",
        )


def _loops(address: str) -> bool:
    return address == "localhost" or address.startswith(LOOPBACK)


def _mend(launch: Launch) -> str:
    if launch.launcher == "srun":
        return "use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI); srun --mpi=list shows what there is"
    return "start with the mpirun that belongs to this MPI library, or name another library in MPI4PY_LIBMPI"


def _mend_in_container(launch: Launch) -> str:
    """What else may be done where the launcher is the host's and the library mostly an image's own."""
    if launch.launcher == "srun":
        return "; or build the image with the library that srun can introduce, or bind the host's into the container"
    return "; the host's mpirun starts the containers (mpirun -n N apptainer exec ...), of the same major version"
