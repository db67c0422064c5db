"""Where torch's ranks find each other: a TCPStore on rank 0's host, which MPI tells everybody of.

Nothing is configured. Rank 0 takes an ephemeral port on an address that every other host was seen to reach, so that
no rank has to guess a port, a host name's meaning, or a card. Loopback serves only where all ranks share one host.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
from torch.distributed import Store, TCPStore

from hpctrain.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

LOOPBACK = "127.0.0.1"
STAYING = ("127.", "::1", "169.254.", "fe80:")  # loopback, and addresses that mean something on one cable only
PROBE_SECONDS = 3.0  # for one connection between two hosts of one machine; only a wrong address takes so long


@dataclass(frozen=True)
class Seat:
    """A rank's host and the addresses that others may know it by, the fastest card's first."""

    host: str
    addresses: tuple[str, ...]

    @classmethod
    def here(cls) -> Seat:
        """This process's seat."""
        return cls(socket.gethostname(), _addresses())


@dataclass(frozen=True)
class SharedStore:
    """A store that all ranks share, and this rank's own address on the network that reaches it."""

    store: Store
    address: str


def open_store(comm: MPI.Comm, timeout_seconds: float, seat: Seat | None = None) -> SharedStore:
    """Open a store on rank 0 and connect every rank of ``comm`` to it. Collective.

    ``timeout_seconds`` is also the store's own limit. Raises CommError, on all ranks, when some host reaches no
    address of rank 0's host.
    """
    seat = seat or Seat.here()
    seats = comm.allgather(seat)
    listener, address, port = _listen(comm, seats)
    descriptor = listener.detach() if listener else None  # the store closes it
    limit = timedelta(seconds=timeout_seconds)
    store = TCPStore(
        address, port, None, listener is not None, limit, wait_for_workers=False, master_listen_fd=descriptor
    )
    comm.Barrier()  # nobody sees a store whose clients are not all there
    return SharedStore(store, address if seat.host == seats[0].host else _source(address))


def candidates(seats: Sequence[Seat]) -> tuple[str, ...]:
    """The addresses of the first seat's host to try, best first.

    An address that other hosts have too (a container bridge, say) may lead each host to itself: it comes last.
    """
    first = seats[0]
    others = {address for seat in seats if seat.host != first.host for address in seat.addresses}
    if all(seat.host == first.host for seat in seats):
        return (LOOPBACK, *first.addresses)
    own = [address for address in first.addresses if address not in others]
    return (*own, *(address for address in first.addresses if address in others))


def _listen(comm: MPI.Comm, seats: Sequence[Seat]) -> tuple[socket.socket | None, str, int]:
    """Rank 0's listening socket (None elsewhere), with the address and port at which every host reached it."""
    deaf: list[str] = []
    for address in candidates(seats):
        listener = _bound(address) if comm.rank == 0 else None
        port = comm.bcast(listener.getsockname()[1] if listener else 0)
        deaf = [host for host in comm.allgather(_deaf(comm.rank, seats, address, port)) if host]
        if not deaf:
            return listener, address, port
        if listener:
            listener.close()
    tried = ", ".join(candidates(seats)) or "none, it has only loopback"
    raise CommError(
        f"host {deaf[0] if deaf else seats[-1].host} reaches no address of host {seats[0].host}, where rank 0 is",
        f"the ranks are on {len({seat.host for seat in seats})} hosts; tried: {tried}",
        "let the compute nodes reach each other over TCP, or run on one node",
    )


def _deaf(rank: int, seats: Sequence[Seat], address: str, port: int) -> str | None:
    """The name of this host when it cannot reach the address; the first rank of each host tries for all of it."""
    host = seats[rank].host
    if port == 0:
        return host
    if next(i for i, seat in enumerate(seats) if seat.host == host) != rank:
        return None
    with suppress(OSError), socket.create_connection((address, port), PROBE_SECONDS):
        return None
    return host


def _bound(address: str) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_server((address, 0), family=_family(address), backlog=4096)
    return None


def _source(address: str) -> str:
    """The own address from which packets to ``address`` leave. Nothing is sent."""
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))
        return probe.getsockname()[0]


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _addresses() -> tuple[str, ...]:
    """The host's own addresses that lead elsewhere: of cards that are up, the fastest card's first."""
    stats = psutil.net_if_stats()
    found = [
        (-stats[card].speed, entry.family == socket.AF_INET6, entry.address)
        for card, entries in psutil.net_if_addrs().items()
        for entry in entries
        if card in stats and stats[card].isup and _leads_elsewhere(entry)
    ]
    return tuple(address for _, _, address in sorted(found))


def _leads_elsewhere(entry: Any) -> bool:
    return entry.family in (socket.AF_INET, socket.AF_INET6) and not entry.address.startswith(STAYING)
