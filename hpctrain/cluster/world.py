"""World: who this rank is and who the others are, however the job was started.

MPI is the source of truth for rank and size, and its shared-memory split says which ranks are on one node: nothing is
worked out by arithmetic from a list of nodes. Launchers' variables are read only to refuse at the door what cannot
work, in a sentence, before any file is written.
"""

from __future__ import annotations

import functools
import os
import pickle
import socket
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from hpctrain.cluster import advice, door, launcher, slurm, switches
from hpctrain.cluster.abort import GUARD
from hpctrain.cluster.address import own_names, resolve
from hpctrain.cluster.advice import Advice
from hpctrain.cluster.cores import usable_cores
from hpctrain.cluster.fact import Fact
from hpctrain.cluster.launcher import Launch
from hpctrain.cluster.start import start_mpi
from hpctrain.cluster.sysfs import numa_domain
from hpctrain.cluster.wait import wait
from hpctrain.config import CommConfig
from hpctrain.errors import EXIT_REQUEUE
from hpctrain.plan.topology import Topology

if TYPE_CHECKING:
    from mpi4py import MPI

THREADS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class Card:
    """What each rank shows the others: ``node`` is the first rank of its node, ``cores`` has a bit for each core."""

    host: str
    node: int
    cores: int
    numa: int | None
    """The NUMA domain of all its cores, where it is one."""
    switches: switches.Places
    """Above its node, as Slurm told it."""
    cabinet: str | None
    master_addr: str | None
    master_port: str | None


class World:
    """The ranks of one job. Live: it holds MPI's communicator. Leaving its ``with`` block is collective."""

    def __init__(
        self, comm: MPI.Comm | None, cards: list[Card], launch: Launch, facts: tuple[Fact, ...], config: CommConfig
    ) -> None:
        self.comm = comm
        self._seconds = config.timeout_seconds
        self._guarded = False
        self.rank, self.size = (comm.rank, comm.size) if comm else (0, 1)
        hosts = _names(cards)
        above = self.share(switches.asked(cards, os.environ) if self.leads else None) or {}
        self.topology = Topology(hosts, tuple(switches.around(hosts, cards, above)))
        self.host = self.topology.hosts[self.rank]
        self.node = self.topology.node_of(self.rank)
        self.local_rank = self.topology.local_rank(self.rank)
        self.local_size = len(self.topology.ranks_of(self.node))
        self.launcher, self.launcher_version = launch.launcher, launch.version
        self.cores_of_node = tuple(_cores(cards[rank].cores) for rank in self.topology.ranks_of(self.node))
        self.cores = self.cores_of_node[self.local_rank]
        self.facts = facts
        self.warnings = self.share(_warnings(launch, self.local_size))

    @classmethod
    def join(cls, config: CommConfig | None = None) -> World:
        """Meet the other ranks of the job. Collective; call it before importing torch.

        Raises LaunchError when the ranks were started in a way that cannot work. Ranks that do not come in
        ``start_seconds`` end the job.
        """
        config = config or CommConfig()
        GUARD.arm(None, config.timeout_seconds)
        try:
            world = cls._join(config)
        except Exception as error:
            GUARD.leave(error)
            raise
        world._guarded = True
        if world.leads:
            sys.stderr.write("".join(f"hpctrain: warning: {warning}\n" for warning in world.warnings))
        return world

    @classmethod
    def _join(cls, config: CommConfig) -> World:
        launch = launcher.launch(os.environ)
        mpi = start_mpi(launch, config.start_seconds)
        comm = None
        if mpi is not None:
            door.check_size(launch, mpi.COMM_WORLD.size, mpi.Get_library_version())
            GUARD.arm(mpi.COMM_WORLD, config.timeout_seconds)
            _together(mpi.COMM_WORLD, config)
            comm, private = _communicators()
            GUARD.arm(private, config.timeout_seconds)
        return cls._meet(comm, launch, config)

    @classmethod
    def of(cls, comm: MPI.Comm, config: CommConfig | None = None, host: str | None = None) -> World:
        """The World of any communicator's ranks. Collective. ``host`` is a test's way to say what node a rank is on.

        Its errors end no job: that belongs to ``join``.
        """
        return cls._meet(comm, launcher.launch(os.environ), config or CommConfig(), host)

    @classmethod
    def _meet(cls, comm: MPI.Comm | None, launch: Launch, config: CommConfig, host: str | None = None) -> World:
        _together(comm, config)
        card = _card(comm, host)
        cards = comm.allgather(card) if comm else [card]
        world = cls(comm, cards, launch, _facts(comm, launch), config)
        world._check_master(cards, config.check_master_addr)
        return world

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the job where one must."""
        return self.rank == 0

    def agree(self, value: bool) -> bool:
        """True on every rank when ``value`` is true on any. Collective."""
        if self.comm is None:
            return bool(value)
        given, found = bytearray([bool(value)]), bytearray(1)
        wait(self.comm.Iallreduce(given, found, _mpi().BOR), self.comm, "agree", self._seconds)
        return bool(found[0])

    def share(self, value: Any) -> Any:
        """Rank 0's ``value``, which can be pickled, on every rank. Collective."""
        if self.comm is None:
            return value
        text = bytearray(pickle.dumps(value) if self.leads else b"")
        length = bytearray(len(text).to_bytes(8, "little"))
        wait(self.comm.Ibcast(length), self.comm, "share", self._seconds)
        if not self.leads:
            text = bytearray(int.from_bytes(length, "little"))
        wait(self.comm.Ibcast(text), self.comm, "share", self._seconds)
        return value if self.leads else pickle.loads(text)

    def collect(self, value: Any) -> list[Any]:
        """Every rank's ``value``, which can be pickled, in rank order, on every rank. Collective."""
        self.barrier()  # the wait for the others has an end; what follows finds them all here
        return [value] if self.comm is None else self.comm.allgather(value)

    def barrier(self) -> None:
        """Return when every rank has come here. Collective. Raises LateError with the names of who did not."""
        if self.comm is not None:
            wait(self.comm.Ibarrier(), self.comm, "barrier", self._seconds)

    def abort(self, error: BaseException) -> NoReturn:
        """End the whole job because of ``error``, told with this rank and host. One rank is enough."""
        GUARD.abort(error)

    def requeue(self) -> NoReturn:
        """Leave so that the scheduler starts the job again: exit code 75. Collective."""
        raise SystemExit(EXIT_REQUEUE)

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._guarded:
            GUARD.leave(error)
        elif error is None:
            self.barrier()

    def _check_master(self, cards: list[Card], check: bool) -> None:
        """Refuse what would keep torch's own meeting from working; rank 0 looks, and all hear what it found."""
        door.check_equal("MASTER_PORT", [card.master_port for card in cards])
        door.check_equal("MASTER_ADDR", [card.master_addr for card in cards])
        given = cards[0].master_addr
        if given is not None and check:
            own = self.share(own_names() if self.leads else None)
            found = self.share(resolve(given) if self.leads else None)
            door.check_master_addr(given, found, self.host, own, len(self.topology.nodes))


@functools.cache
def _communicators() -> tuple[MPI.Comm, MPI.Comm]:
    """One communicator for the work and one for parting, so that neither meets the other's or a user's messages."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()


def _card(comm: MPI.Comm | None, host: str | None) -> Card:
    node = _node(comm, host)
    address, port = (os.environ.get(name) or None for name in ("MASTER_ADDR", "MASTER_PORT"))
    cores, name = usable_cores(), host or socket.gethostname()
    bits, above = sum(1 << core for core in cores), switches.address(os.environ, name)
    return Card(name, node, bits, numa_domain(cores), above, switches.cabinet(name), address, port)


def _node(comm: MPI.Comm | None, host: str | None) -> int:
    """The first rank of this node."""
    if comm is None:
        return 0
    shared = comm.Split_type(_mpi().COMM_TYPE_SHARED)
    if host is not None:
        shared, whole = shared.Split(zlib.crc32(host.encode()) & 0x7FFFFFFF), shared
        whole.Free()
    first = shared.bcast(comm.rank)
    shared.Free()
    return first


def _cores(bits: int) -> frozenset[int]:
    return frozenset(core for core in range(bits.bit_length()) if bits >> core & 1)


def _together(comm: MPI.Comm | None, config: CommConfig) -> None:
    """Return when every rank is here, so that what follows waits for nobody."""
    if comm is not None:
        wait(comm.Ibarrier(), comm, "the meeting at the start", config.start_seconds)


def _names(cards: list[Card]) -> tuple[str, ...]:
    """The host of every rank. A node bears its first rank's name; a name that several nodes bear gets a number."""
    names: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for node in sorted({card.node for card in cards}):
        host = cards[node].host
        names[node] = f"{host}#{seen[host] + 1}" if seen[host] else host
        seen[host] += 1
    return tuple(names[card.node] for card in cards)


def _facts(comm: MPI.Comm | None, launch: Launch) -> tuple[Fact, ...]:
    """Rank and size with their sources, and what every launcher that speaks here says of them."""
    source = "MPI_COMM_WORLD" if comm else "no MPI library was found, and no launcher says that there are others"
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    own = (Fact("rank", rank, source), Fact("size", size, source), Fact("launcher", launch.launcher, launch.sources[1]))
    said = tuple(fact for claim in launcher.claims(os.environ) for fact in claim.facts)
    return (*own, *said, *_library(comm))


def _warnings(launch: Launch, ranks_here: int) -> list[Advice]:
    """What is said at every start: the launcher gave this rank less than was asked for."""
    job = slurm.job(os.environ)
    if job is None:
        return []
    srun = launch.launcher == "srun"
    lost = advice.lost_cores(job.cpus_per_task, len(os.sched_getaffinity(0)), srun)
    return lost + advice.lost_tasks(job.asked_tasks_per_node if srun else None, ranks_here)


def _library(comm: MPI.Comm | None) -> tuple[Fact, ...]:
    if comm is None:
        return ()
    mpi = _mpi()
    vendor, version = mpi.get_vendor()
    threads = next(name for name in THREADS if getattr(mpi, f"THREAD_{name}") == mpi.Query_thread())
    return (
        Fact("mpi.vendor", f"{vendor} {'.'.join(map(str, version))}", "mpi4py.MPI.get_vendor()"),
        Fact("mpi.library", mpi.Get_library_version().strip("\0\n "), "MPI_Get_library_version"),
        Fact("mpi.threads", threads, "MPI_Query_thread"),
    )


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI
