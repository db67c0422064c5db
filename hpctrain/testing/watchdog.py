"""A time limit that also ends a job whose ranks are stuck inside MPI.

Nothing that it does needs the main thread, and the tracebacks do not even need Python to run: each rank lets a signal
write the tracebacks of its threads into a file, one rank of each node sends that signal to the node's ranks, prints
their files and calls ``MPI_Abort``. Where no rank gets that far, faulthandler's own thread prints and exits.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

DUMP = signal.SIGRTMAX - 3  # a number that neither MPI libraries nor schedulers use
DUMP_SECONDS = 1.0  # for the ranks of a node to write their tracebacks
NODES_SECONDS = 2.0  # for the other nodes to print theirs
BACKSTOP_SECONDS = 10.0
DRAIN_SECONDS = 3.0


class Peer(NamedTuple):
    """A rank of this node, and where its tracebacks go. A process number means something in its own namespace only."""

    pid: int
    namespace: str
    traces: Path

    def dump(self, namespace: str) -> None:
        """Make that rank write its tracebacks, when it lives in this ``namespace``."""
        if self.namespace == namespace:
            with suppress(ProcessLookupError):
                os.kill(self.pid, DUMP)


class Watchdog:
    """Ends the whole job, with the tracebacks of all its ranks, when work takes longer than its limit.

    Collective: every rank of ``comm`` makes one. It is live because it owns a thread, a signal handler and a file.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        from mpi4py import MPI

        self._abort = MPI.COMM_WORLD.Abort  # of a part of the world, some libraries end only this rank
        self.name = f"rank {comm.rank} of {comm.size} on {socket.gethostname()}"
        self.stderr = os.dup(2)  # tests run with the stream captured; what is said here must be seen
        node = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
        self.folder = Path(node.bcast(tempfile.mkdtemp(prefix="hpctrain-traces-") if node.rank == 0 else None))
        self.traces = (self.folder / f"{comm.rank:08d}").open("w+")
        faulthandler.register(DUMP, self.traces, all_threads=True)
        self.namespace = os.readlink("/proc/self/ns/pid")
        self.peers = node.allgather(Peer(os.getpid(), self.namespace, Path(self.traces.name)))
        self.removes = node.rank == 0
        node.Free()
        self.work, self.seconds, self.ends_at = "", 0.0, float("inf")
        self.closed = threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    @contextmanager
    def limit(self, work: str, seconds: float) -> Iterator[None]:
        """Give what runs inside ``seconds``; the job ends when it takes longer."""
        self.work, self.seconds, self.ends_at = work, seconds, time.monotonic() + seconds
        self._backstop(seconds + BACKSTOP_SECONDS)
        try:
            yield
        finally:
            self.ends_at = float("inf")
            faulthandler.cancel_dump_traceback_later()
            signal.setitimer(signal.ITIMER_REAL, 0)

    def say(self, text: str) -> None:
        """Write to the error stream that the job was started with, under this rank's name."""
        os.write(self.stderr, f"\n{self.name}: {text}\n".encode())

    def end(self, why: str) -> None:
        """Print the tracebacks of every rank of this node and the reason, then end the job on all nodes."""
        self._backstop(BACKSTOP_SECONDS)
        if self._leads():
            self._print_traces()
            self.say(f"{why}; the whole job ends here")
        else:
            time.sleep(DUMP_SECONDS)
        time.sleep(NODES_SECONDS)
        self._abort(1)

    def close(self) -> None:
        """Stop watching and remove the files."""
        self.closed.set()
        faulthandler.unregister(DUMP)
        self.traces.close()
        if self.removes:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _watch(self) -> None:
        while not self.closed.wait(0.2):
            if time.monotonic() > self.ends_at:
                self.end(f"{self.work} passed its limit of {self.seconds:g} s")

    def _backstop(self, seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, file=self.stderr)
        # Death comes a little after the traceback: mpirun does not read what a rank printed just before it ended.
        signal.setitimer(signal.ITIMER_REAL, seconds + DRAIN_SECONDS)

    def _leads(self) -> bool:
        """Whether this rank is the first of its node that ends the job."""
        with suppress(FileExistsError):
            os.close(os.open(self.folder / "ending", os.O_CREAT | os.O_EXCL))
            return True
        return False

    def _print_traces(self) -> None:
        faulthandler.dump_traceback(self.traces, all_threads=True)  # here, as a handler may meet frames that change
        for peer in self.peers:
            if peer.pid != os.getpid():
                peer.dump(self.namespace)
        time.sleep(DUMP_SECONDS)
        for peer in self.peers:
            text = f"\n--- rank {int(peer.traces.name)}, all threads\n{peer.traces.read_text()}"
            os.write(self.stderr, text.encode())
