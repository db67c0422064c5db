"""Small: collectives whose message lies on the desk, so that one meeting is all there is to them.

What takes long here is the interpreter, not the data: memory is moved by address and summed by numpy, whose calls are
half as long as torch's, and less than half when ranks that share a core have just emptied its caches for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm.desk import Desk
from hpctrain.comm.group import Op
from hpctrain.comm.operation import Operation
from hpctrain.comm.reduce import Reducer

NUMPY = {
    torch.float64: np.float64, torch.float32: np.float32, torch.int64: np.int64, torch.int32: np.int32,
    torch.int16: np.int16, torch.int8: np.int8, torch.uint8: np.uint8, torch.bool: np.bool_,
}  # fmt: skip
COMBINE = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}
_KEPT = 256  # sizes for which views of the desk are kept

Key = tuple[int, torch.dtype, int, int]
Arrays = tuple[list[np.ndarray], np.ndarray, int, int]  # what is laid, room for the result, its address and bytes


class Small:
    """Small collectives of the ranks at one desk."""

    def __init__(self, desk: Desk, reducer: Reducer) -> None:
        self._desk, self._reduce = desk, reducer
        self._arrays: dict[Key, Arrays] = {}
        self._tensors: dict[Key, list[Tensor]] = {}

    def all_reduce(self, operation: Operation, x: Tensor, op: Op) -> None:
        self._desk.lay(x.data_ptr(), operation.elements * x.itemsize)
        self._desk.arrive(operation)
        self._fold(x, x.dtype, operation.elements, 0, op)

    def reduce_scatter(self, operation: Operation, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int]) -> None:
        self._desk.lay(x.data_ptr(), operation.elements * x.itemsize)
        self._desk.arrive(operation)
        rank = self._desk.rank
        self._fold(out, x.dtype, sizes[rank], sum(sizes[:rank]), op)

    def all_gather(self, operation: Operation, out: Tensor, x: Tensor, sizes: Sequence[int]) -> None:
        itemsize = x.itemsize
        self._desk.lay(x.data_ptr(), sizes[self._desk.rank] * itemsize)
        self._desk.arrive(operation)
        move, target = self._desk.move, out.data_ptr()
        for address, size in zip(self._desk.addresses(), sizes, strict=True):
            move(target, address, size * itemsize)
            target += size * itemsize

    def broadcast(self, operation: Operation, x: Tensor, source: int) -> None:
        length = operation.elements * x.itemsize
        if self._desk.rank == source:
            self._desk.lay(x.data_ptr(), length)
        self._desk.arrive(operation)
        if self._desk.rank != source:
            self._desk.take(x.data_ptr(), length, source)

    def _fold(self, out: Tensor, dtype: torch.dtype, numel: int, start: int, op: Op) -> None:
        """Reduce the elements from ``start`` on of what lies on the desk, by rank; ``out`` may be of a wider dtype."""
        key = (numel, dtype, start, self._desk.side)
        if dtype not in NUMPY:
            return self._reduce(out, self._as_tensors(key), op)
        laid, result, address, length = self._as_arrays(key)
        combine, running = COMBINE[op], laid[0]
        for one in laid[1:]:
            running = combine(running, one, out=result)
        if op == "mean":
            np.true_divide(running, len(laid), out=result)
        self._desk.move(out.data_ptr(), address, length)

    def _as_arrays(self, key: Key) -> Arrays:
        if key not in self._arrays:
            laid = [tensor.numpy() for tensor in self._as_tensors(key)]
            result = np.empty_like(laid[0]) if len(laid) > 1 else laid[0]
            self._arrays[key] = laid, result, result.ctypes.data, result.nbytes
        return self._arrays[key]

    def _as_tensors(self, key: Key) -> list[Tensor]:
        if key not in self._tensors:
            if len(self._tensors) >= _KEPT:
                self._tensors.clear()
                self._arrays.clear()
            numel, dtype, start, _ = key
            self._tensors[key] = [laid.view(dtype)[start : start + numel] for laid in self._desk.laid()]
        return self._tensors[key]
