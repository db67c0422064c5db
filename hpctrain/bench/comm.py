"""How fast a group talks, beside another transport in the same run.

Both move the same tensors in turns, so that whatever else the machine does slows both; each time is that of the slowest
rank, and the median of all rounds is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp

from hpctrain.cluster.world import World
from hpctrain.comm.group import Group
from hpctrain.comm.mpi import MpiGroup
from hpctrain.comm.torch import open_torch_group
from hpctrain.errors import LaunchError, UsageError

SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20)
MUCH_BYTES = 1 << 20  # below it a round is many calls: one alone is too short for the clock
CALLS, ROUNDS = 20, 7
FP32_BYTES = 4


@dataclass(frozen=True)
class Row:
    """One operation at one size. ``memory`` is that of our tensors: ordinary, a window, or common to the node."""

    operation: str
    bytes: int
    memory: str
    milliseconds: float
    against: str
    against_milliseconds: float
    times_faster: float


@dataclass(frozen=True)
class Tensors:
    """What the operations move: ``whole`` has as many elements as the size says, ``piece`` those of one rank."""

    whole: Tensor
    piece: Tensor
    target: Tensor


Call = Callable[[], object]
Maker = Callable[[Tensors], Call]

OURS: dict[str, Callable[[Group, Tensors], Call]] = {
    "all_reduce": lambda group, t: partial(group.all_reduce, t.whole),  # of zeros, which no sum lets grow
    "reduce_scatter": lambda group, t: partial(group.reduce_scatter, t.piece, t.whole),
    "all_gather": lambda group, t: partial(group.all_gather, t.whole, t.piece),
    "all_to_all": lambda group, t: partial(group.all_to_all, t.target, t.whole),
    "broadcast": lambda group, t: partial(group.broadcast, t.whole),
}


def run(
    against: str = "gloo", world: World | None = None, sizes: Sequence[int] = SIZES, rounds: int = ROUNDS
) -> tuple[Row, ...]:
    """Time every operation at every size, which is in bytes of fp32. Collective; every rank gets the rows."""
    if world is None:
        with World.join() as joined:
            return run(against, joined, sizes, rounds)
    if world.comm is None:
        raise LaunchError("one rank has nobody to talk to", "", "start it with mpirun -n 4, or with srun")
    if against not in PEERS:
        raise UsageError(f"--against {against}: not a known peer", "", f"take one of {', '.join(PEERS)}")
    group, (peer, close) = MpiGroup(world.comm), PEERS[against](world.comm)
    rows = tuple(_rows(group, peer, against, sizes, rounds))
    close()
    group.close()
    return rows


def _rows(group: Group, peer: dict[str, Maker], against: str, sizes: Sequence[int], rounds: int) -> Iterator[Row]:
    for size in sizes:
        numel = size // FP32_BYTES // group.size * group.size
        theirs = _tensors(numel, group, torch.zeros)
        for memory, room in _memories(group).items():
            mine = _tensors(numel, group, room)
            for operation in OURS if memory != "common" else ("all_gather",):
                calls = OURS[operation](group, mine), peer[operation](theirs)
                ours, other = _times(group, calls, CALLS if size < MUCH_BYTES else 1, rounds)
                yield Row(operation, size, memory, 1e3 * ours, against, 1e3 * other, other / ours)


def _memories(group: Group) -> dict[str, Callable[[int], Tensor]]:
    """The kinds of memory that a group may be given, and what makes them."""
    kinds: dict[str, Callable[[int], Tensor]] = {
        "ordinary": torch.zeros,
        "window": lambda numel: group.buffer(numel, torch.float32),
    }
    if group.common(1, torch.float32) is not None:
        kinds["common"] = lambda numel: group.common(numel, torch.float32)
    return kinds


def _tensors(numel: int, group: Group, room: Callable[[int], Tensor]) -> Tensors:
    return Tensors(room(numel), torch.zeros(numel // group.size), torch.zeros(numel))


def _times(group: Group, calls: Sequence[Call], repeats: int, rounds: int) -> list[float]:
    """The median over all rounds of each call's seconds on the slowest rank; the calls take turns."""
    own = [[_seconds(group, call, repeats) for call in calls] for _ in range(rounds + 1)][1:]  # the first one warms up
    slowest = torch.tensor(group.collect(own)).amax(0)
    return [median(column) for column in slowest.T.tolist()]


def _seconds(group: Group, call: Call, repeats: int) -> float:
    group.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def _gloo(comm: MPI.Comm) -> tuple[dict[str, Maker], Call]:
    """torch's own calls, as ``torch.distributed`` makes them."""
    group = open_torch_group(comm, "gloo")
    gloo = group.process_group
    reduced = AllreduceOptions()
    reduced.reduceOp = ReduceOp.SUM
    calls: dict[str, Maker] = {
        "all_reduce": lambda t: lambda: gloo.allreduce([t.whole], reduced).wait(),
        "reduce_scatter": lambda t: lambda: gloo._reduce_scatter_base(t.piece, t.whole).wait(),
        "all_gather": lambda t: lambda: gloo._allgather_base(t.whole, t.piece).wait(),
        "all_to_all": lambda t: lambda: gloo.alltoall_base(t.target, t.whole, [], []).wait(),
        "broadcast": lambda t: lambda: gloo.broadcast(t.whole, 0).wait(),
    }
    return calls, group.close


def _messages(comm: MPI.Comm) -> tuple[dict[str, Maker], Call]:
    """Our own group, as if no two ranks shared memory."""
    group = MpiGroup(comm, "messages", node_key=str(comm.rank))
    return {operation: partial(make, group) for operation, make in OURS.items()}, group.close


PEERS: dict[str, Callable[[MPI.Comm], tuple[dict[str, Maker], Call]]] = {"gloo": _gloo, "messages": _messages}
