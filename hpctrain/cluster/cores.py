"""The cores that a rank may use, and those that it gets: the ones nearest its device.

Cores are counted as physical ones, each named by its first hardware thread: two threads of one core multiply matrices
no faster than one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.cluster.world import World

CPU = Path("/sys/devices/system/cpu")
TASKS = Path("/proc/self/task")


def usable_cores() -> frozenset[int]:
    """The physical cores that this process may use."""
    return physical(os.sched_getaffinity(0))


def physical(cpus: Collection[int], siblings: Callable[[int], str] | None = None) -> frozenset[int]:
    """The cores that hardware threads ``cpus`` belong to; ``siblings`` gives the list of a core's threads, as 3,51."""
    told = siblings or _siblings
    return frozenset(_first(told(cpu), cpu) for cpu in cpus)


def share(mine: Collection[int], others: Sequence[Collection[int]]) -> Fraction:
    """How many cores fall to a rank, when each core is shared evenly by the ranks that may use it.

    ``others`` has the cores of all ranks of the node, this one among them.
    """
    return sum((Fraction(1, sum(core in cores for cores in others)) for core in mine), Fraction(0))


def threads(world: World, environ: Mapping[str, str] = os.environ) -> int:
    """How many threads this rank should compute with: OMP_NUM_THREADS where it is set, else its share of the cores."""
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdigit() and int(given):
        return int(given)
    return max(1, int(share(world.cores, world.cores_of_node)))


def deal(near: Sequence[Collection[int]], allowed: Sequence[Collection[int]]) -> list[frozenset[int]]:
    """The cores of each rank of a node: of those that it is ``allowed``, the ones ``near`` its device.

    Ranks that find themselves with the same cores share them out, as long as there is one for each. A rank with no
    device, or with none of its cores near, keeps what it has.
    """
    wanted = [frozenset(close) & frozenset(cores) for close, cores in zip(near, allowed, strict=True)]
    return [
        _part(own, place, wanted) if own else frozenset(cores)
        for place, (own, cores) in enumerate(zip(wanted, allowed, strict=True))
    ]


def bind(world: World, near: Collection[int]) -> None:
    """Keep this rank, with all its threads, on its part of the cores ``near`` its device. Collective.

    ``world`` knows the cores from then on. Where no rank of a node has a device, nothing changes there: ranks of
    another job may compute on the same cores, and the system moves unbound ranks out of their way.
    """
    closest = world.collect(frozenset(near))
    dealt = deal([closest[rank] for rank in world.topology.ranks_of(world.node)], world.cores_of_node)
    mine = dealt[world.local_rank]
    if mine != world.cores:
        _stay({cpu for cpu in os.sched_getaffinity(0) if physical({cpu}) <= mine})
    world.cores, world.cores_of_node = mine, tuple(dealt)


def parse(text: str) -> frozenset[int]:
    """The numbers of a list as Linux writes it: ``0-3,8``."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(number for low, dash, high in spans for number in range(int(low), int(high if dash else low) + 1))


def _part(own: frozenset[int], place: int, wanted: Sequence[frozenset[int]]) -> frozenset[int]:
    """An even part of a rank's cores, where other ranks want the very same ones."""
    sharers = [other for other, cores in enumerate(wanted) if cores == own]
    index, cores = sharers.index(place), sorted(own)
    low, high = (len(cores) * border // len(sharers) for border in (index, index + 1))
    return frozenset(cores[low:high]) or own


def _stay(cpus: Collection[int]) -> None:
    """Bind every thread that this process has; those that it starts later take after the one that starts them."""
    for task in TASKS.iterdir():
        try:
            os.sched_setaffinity(int(task.name), cpus)
        except ProcessLookupError:  # a thread that has ended meanwhile
            pass


def _siblings(cpu: int) -> str:
    try:
        return (CPU / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return ""


def _first(siblings: str, cpu: int) -> int:
    first = siblings.strip().replace("-", ",").split(",")[0]
    return int(first) if first.isdigit() else cpu
