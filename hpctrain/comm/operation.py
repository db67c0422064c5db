"""Operation: which collective this is, as a value that ranks can compare; Ledger: the last ones of a group."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hpctrain.errors import CommError, LateError

KINDS = (
    "barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
    "buffer", "common", "send", "recv",
)  # fmt: skip
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
)  # fmt: skip
OPS = ("", "sum", "mean", "max", "min")

_KIND = {kind: code for code, kind in enumerate(KINDS)}
_DTYPE = {dtype: code for code, dtype in enumerate(DTYPES)}
_OP = {op: code for code, op in enumerate(OPS)}
_FORMAT = struct.Struct("<BBBxiqq")
PACKED_BYTES = _FORMAT.size


class Operation(NamedTuple):
    """What all ranks must agree on: ``elements`` of the whole, ``sizes`` of its pieces, the ``root`` of a broadcast."""

    kind: str
    dtype: torch.dtype = torch.uint8
    elements: int = 0
    op: str = ""
    root: int = -1
    sizes_hash: int = 0

    @classmethod
    def of(
        cls, kind: str, x: torch.Tensor, op: str = "", root: int = -1, sizes: Sequence[int] = (), elements: int = -1
    ) -> Operation:
        """The operation on ``x``; ``elements`` where the whole is not ``x`` itself."""
        elements = x.numel() if elements < 0 else elements
        return cls(kind, x.dtype, elements, op, root, hash(tuple(sizes)) if sizes else 0)

    def packed(self) -> bytes:
        """As bytes, equal where the operations are."""
        kind, dtype, elements, op, root, sizes_hash = self
        return _FORMAT.pack(_KIND[kind], _DTYPE[dtype], _OP[op], root, elements, sizes_hash)

    @classmethod
    def unpacked(cls, packed: bytes) -> Operation:
        """The inverse of ``packed``."""
        kind, dtype, op, root, elements, sizes_hash = _FORMAT.unpack(packed)
        return cls(KINDS[kind], DTYPES[dtype], elements, OPS[op], root, sizes_hash)

    def __str__(self) -> str:
        if self.kind == "barrier":
            return self.kind
        name = " ".join(part for part in (self.kind, self.op) if part)
        root = f" {'to' if self.kind == 'send' else 'from'} {self.root}" if self.root >= 0 else ""
        sizes = f" cut by {self.sizes_hash & 0xFFFF:04x}" if self.sizes_hash else ""
        return f"{name} of {self.elements} {str(self.dtype).removeprefix('torch.')}{root}{sizes}"


class Ledger:
    """The last operations of a group, numbered from 1, and the errors that tell of them."""

    def __init__(self, name: str, ranks: Sequence[int], limit_seconds: float, length: int = 16) -> None:
        self.name, self.ranks, self.limit_seconds = name, tuple(ranks), limit_seconds
        self.number = 0
        self._last: deque[tuple[int, Operation]] = deque(maxlen=length)

    def add(self, operation: Operation) -> None:
        self.number += 1
        self._last.append((self.number, operation))

    def last(self, count: int = 3) -> str:
        """The newest ``count`` operations, the newest first, as text."""
        newest = list(self._last)[-count:][::-1]
        return ", ".join(f"#{number} {operation}" for number, operation in newest) or "nothing yet"

    def late(self, missing: Sequence[int], operation: str | None = None) -> LateError:
        """Ranks of the group that did not come to ``operation``, its newest one when not given."""
        names = ", ".join(self.named(rank) for rank in missing) or "no single rank (all answer, none goes on)"
        return LateError(
            f"{names} did not come to {operation or self.last(1)} in group {self.name} within {self.limit_seconds:g} s",
            f"the last operations here: {self.last()}",
            "look at that rank's log and host; comm.timeout_seconds is the limit",
        )

    def given_up(self, by: int) -> LateError:
        """What a rank is told that comes after another one's patience ended."""
        return LateError(
            f"{self.named(by)} waited {self.limit_seconds:g} s in group {self.name} and gave up: this rank is late",
            f"this rank comes with {self.last(1)}",
            "look at what kept this rank; comm.timeout_seconds is the limit",
        )

    def differing(self, operations: Mapping[int, Operation]) -> CommError:
        """Ranks of the group that came to one meeting with different operations."""
        who: dict[Operation, list[int]] = {}
        for rank, operation in operations.items():
            who.setdefault(operation, []).append(rank)
        told = "; ".join(f"{', '.join(map(self.named, ranks))}: {operation}" for operation, ranks in who.items())
        return CommError(
            f"the ranks of group {self.name} came with different operations: {told}",
            f"this is its operation #{self.number}; every rank must call the same one with the same sizes",
            "look for a branch that not all ranks take",
        )

    def named(self, rank: int) -> str:
        world = self.ranks[rank]
        return f"rank {rank}" if world == rank else f"rank {rank} (rank {world} of the world)"
