"""Start MPI, with an end to the wait for ranks that do not come.

``MPI_Init`` returns only when every rank has called it, and mpi4py holds the interpreter meanwhile: no Python thread
can watch it. So it is called through ctypes, which lets other threads run, and a timer ends this process when the
limit passes. Which ranks of this node are missing is found without files: each rank opens a socket in Linux's
abstract namespace, which goes when its process goes, and the waiting ones look whose socket is there.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

from hpctrain.cluster import leftovers
from hpctrain.cluster.launcher import Launch
from hpctrain.errors import LateError, LaunchError


def start_mpi(launch: Launch, seconds: float) -> Any | None:
    """mpi4py's ``MPI`` module, started; None where there is no MPI library and no need of one.

    Call it before importing torch (Cray MPICH places a rank by the cores it may use, which torch changes).
    """
    prepare(os.environ, launch, os.cpu_count() or 1)
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        leftovers.clear()
    with _Sign(launch) as sign, _Limit(seconds, lambda: _late(launch, seconds, sign)):
        try:
            return _init()
        except (ImportError, RuntimeError) as error:
            return _without(launch, error)


def prepare(environ: MutableMapping[str, str], launch: Launch, cores: int) -> None:
    """Set what MPI reads once, when it starts: here, that waiting ranks give their core away where cores are short."""
    if (launch.local_size or 1) > cores:
        environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def _init() -> Any:
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
    from mpi4py import MPI

    if not MPI.Is_initialized():
        wanted = getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}")
        provided = ctypes.c_int(-1)
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, ctypes.c_int(wanted), ctypes.byref(provided))
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):  # as mpi4py does where it starts MPI itself
            comm.Set_errhandler(MPI.ERRORS_RETURN)
    return MPI


def _without(launch: Launch, error: Exception) -> None:
    if (launch.size or 1) > 1:
        raise LaunchError(
            f"rank {launch.rank} of {launch.size} ({launch.sources[1]}) finds no MPI library",
            str(error).splitlines()[0],
            "load the MPI module that the launcher belongs to, or pip install mpich and start with its mpirun",
        ) from error


def _late(launch: Launch, seconds: float, sign: _Sign) -> LateError:
    who = f"rank {_known(launch.rank)} on {socket.gethostname()}"
    return LateError(
        f"{who} waited {seconds:g} s in MPI_Init for ranks that did not come",
        f"started by {launch.launcher} with {_known(launch.size)} ranks; {sign.missing()}",
        "look for the missing ranks' own messages; a larger comm.start_seconds waits longer",
    )


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)


class _Limit:
    """Ends this process with an error when the block takes longer than its limit."""

    def __init__(self, seconds: float, error: Any) -> None:
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self._error = error

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        error = self._error()
        sys.stderr.write(f"hpctrain: {error}\n")
        sys.stderr.flush()
        os._exit(error.exit_code)


class _Sign:
    """A socket by which the other ranks of this node see that this one has come."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._socket: socket.socket | None = None

    def __enter__(self) -> _Sign:
        if self._launch.local_rank is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._socket.bind(self._name(self._launch.local_rank))
            except OSError:  # another job with the same key, or another system: then nothing is said of others
                self.__exit__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None

    def missing(self) -> str:
        """What this rank knows of the others on its node."""
        if not self._socket or not self._launch.local_size:
            return "which ranks are missing is not known here"
        missing = [rank for rank in range(self._launch.local_size) if not self._seen(rank)]
        if not missing:
            return f"all {self._launch.local_size} ranks of this node came, so others are missing"
        return f"missing on this node: local rank {', '.join(map(str, missing))} of {self._launch.local_size}"

    def _seen(self, local_rank: int) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            return probe.connect_ex(self._name(local_rank)) == 0

    @staticmethod
    def _name(local_rank: int) -> str:
        return f"\0hpctrain-{job_key(os.environ, os.getppid())}-{local_rank}"


def job_key(environ: Mapping[str, str], parent: int) -> str:
    """What the ranks of one job on one node have in common, and no other job on it."""
    step = "-".join(environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    space = environ.get("PMIX_NAMESPACE", "") + environ.get("PMI_JOBID", "")
    return f"{step}-{space}" if space or "SLURM_STEP_ID" in environ else f"{step}-{parent}"
