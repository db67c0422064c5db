"""Desk: where the ranks of a node lay down, before each operation, what it is and where their data lie.

After one meeting each knows all of it, so that ranks decide alike, from the same facts, which way the data go, and
ranks that came with different operations are told so. A small message lies on the desk itself: then that one meeting is
all there is to its operation. Every second operation uses the same half of the desk: by then all have read the half.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.meet import Meeting, bytes_for, own_cores, room_to_spin
from hpctrain.comm.operation import PACKED_BYTES, Ledger, Operation
from hpctrain.comm.window import LINE_BYTES, Place

_FACTS = struct.Struct("<iiqiq")
_SLIP_BYTES = LINE_BYTES
HERE, WINDOW, STAGED = range(3)
SMALL_BYTES, LEAST_BYTES, DESK_BYTES = 64 << 10, 4 << 10, 512 << 10


class Slip(NamedTuple):
    """What one rank laid down: how its source comes, and where source and target lie."""

    way: int
    place: Place
    target: Place


NOWHERE = Place(-1, 0)
ON_THE_DESK = Slip(HERE, NOWHERE, NOWHERE)


def small_bytes(size: int) -> int:
    """How much of a message has room on the desk of ``size`` ranks, each of which reads all of it."""
    return max(LEAST_BYTES, min(SMALL_BYTES, DESK_BYTES // size))


class Desk:
    """The desk of the ranks of ``comm``, on one zeroed stretch of shared memory a rank. Making one is collective."""

    def __init__(
        self,
        comm: MPI.Comm,
        stretches: Sequence[Tensor],
        fence: Callable[[], None],
        members: Sequence[int],
        ledger: Ledger,
    ) -> None:
        self.rank, self.size = comm.rank, comm.size
        self.small_bytes = small_bytes(comm.size)
        self._stretches, self._members, self._ledger = stretches, tuple(members), ledger
        first = stretches[0]
        memory = memoryview(MPI.buffer.fromaddress(first.data_ptr(), first.numel()))
        meeting = bytes_for(self.size)
        spins = room_to_spin(comm.allgather(own_cores()))
        self._meeting = Meeting(memory[:meeting], first.data_ptr(), self.rank, self._members, ledger, fence, spins)
        start = -(-meeting // LINE_BYTES) * LINE_BYTES
        half = self.size * _SLIP_BYTES
        self._slips = [memory[start + side * half : start + (side + 1) * half] for side in range(2)]
        self._payloads = [[self._payload(rank, side) for rank in range(self.size)] for side in range(2)]
        self._addresses = [[payload.data_ptr() for payload in payloads] for payloads in self._payloads]
        self.side = 0
        self.meet = self._meeting.meet
        self.move = ctypes.memmove  # (to, from, bytes): a call is shorter than a slice of a tensor

    @staticmethod
    def bytes_for(size: int) -> int:
        """The memory that each rank gives to a desk of ``size`` ranks; the first one's also holds the slips."""
        return 4096 + 2 * size * _SLIP_BYTES + bytes_for(size) + 2 * small_bytes(size)

    def arrive(self, operation: Operation, slip: Slip = ON_THE_DESK) -> list[Slip]:
        """Lay down this rank's slip, meet, and read all of them. CommError on all ranks where operations differ."""
        slips = self._slips[self.side]
        mine = (operation.packed() + _packed(slip)).ljust(_SLIP_BYTES, b"\0")
        start = self.rank * _SLIP_BYTES
        slips[start : start + _SLIP_BYTES] = mine
        self.meet()
        told = slips.tobytes()
        self.side ^= 1
        if told == mine * self.size:
            return [slip] * self.size
        return self._read(told)

    def _read(self, told: bytes) -> list[Slip]:
        each = [told[at : at + _SLIP_BYTES] for at in range(0, len(told), _SLIP_BYTES)]
        if len({one[:PACKED_BYTES] for one in each}) > 1:
            operations = [Operation.unpacked(one[:PACKED_BYTES]) for one in each]
            raise self._ledger.differing(dict(zip(self._members, operations, strict=True)))
        return [_unpacked(one[PACKED_BYTES:]) for one in each]

    def lay(self, address: int, length: int, offset: int = 0) -> None:
        """Put bytes on this rank's place, before ``arrive``."""
        self.move(self._addresses[self.side][self.rank] + offset, address, length)

    def take(self, address: int, length: int, rank: int, offset: int = 0) -> None:
        """Read what ``rank`` laid down, after ``arrive``."""
        self.move(address, self._addresses[self.side ^ 1][rank] + offset, length)

    def write(self, told: bytes) -> None:
        """Put bytes of Python's on this rank's place, before ``arrive``."""
        self.move(self._addresses[self.side][self.rank], told, len(told))

    def read(self, length: int) -> list[bytes]:
        """The first bytes of what each rank laid down, after ``arrive``."""
        return [ctypes.string_at(address, length) for address in self._addresses[self.side ^ 1]]

    def addresses(self) -> list[int]:
        """Where each rank laid down, after ``arrive``."""
        return self._addresses[self.side ^ 1]

    def laid(self) -> list[Tensor]:
        """The place of each rank, as bytes, after ``arrive``."""
        return self._payloads[self.side ^ 1]

    def _payload(self, rank: int, side: int) -> Tensor:
        stretch = self._stretches[rank]
        end = stretch.numel() - side * self.small_bytes
        return stretch[end - self.small_bytes : end]


def _packed(slip: Slip) -> bytes:
    if slip is ON_THE_DESK:
        return _PACKED_ON_THE_DESK
    way, place, target = slip
    return _FACTS.pack(way, *place, *target)


def _unpacked(facts: bytes) -> Slip:
    way, window, offset, target, target_offset = _FACTS.unpack_from(facts)
    return Slip(way, Place(window, offset), Place(target, target_offset))


_PACKED_ON_THE_DESK = _FACTS.pack(HERE, *NOWHERE, *NOWHERE)
assert PACKED_BYTES + _FACTS.size <= _SLIP_BYTES
