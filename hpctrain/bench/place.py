"""What an order of ranks is worth: bytes of a step over slow links, as ranks are numbered and as they are placed.

The layouts are those that a real Slurm gave to jobs of a small cluster (four nodes, two under each switch), and jobs on
64 nodes of a machine whose file tells of groups of nodes. Beside them, what placing a large job costs: one process
plays one rank of it, and is fresh, so that its memory is that of this work.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from hpctrain.config import Config
from hpctrain.plan.links import linked
from hpctrain.plan.machine import Machine
from hpctrain.plan.machines import find
from hpctrain.plan.plan import decide, lay
from hpctrain.plan.topology import NODE, Level, Topology

# The node of each rank, in rank order, as srun placed them. Nodes 1 and 2 are under one switch, 3 and 4 under another.
LAYOUTS = {
    "4x4": "1111222233334444",
    "4x4-cyclic": "1234123412341234",
    "3nodes-10tasks": "1111111123",
    "3nodes-10tasks-npn4": "1111222333",
    "3nodes-10tasks-plane4": "1111222233",
    "3nodes-10tasks-arbitrary": "1111222233",
}
NODES = 64
# How a scheduler may find 64 nodes in four groups of a busy machine.
FRAGMENTS = (23, 9, 17, 15)
SAMPLES = 8  # of each rank along dp in a step
GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """Bytes of a step that leave domains of a level, of all ranks together."""

    job: str
    mesh: str
    leaving: str
    given_gib: float
    placed_gib: float
    part: float | None
    """Of what leaves them in the order given."""


@dataclass(frozen=True)
class Part:
    """A part of what one rank does to find its place; the peak is that of the process until its end."""

    part: str
    ranks: int
    seconds: float
    peak_mib: float


def run(config: Config, machine: str) -> list[Row]:
    """Each layout with some meshes; ``machine`` has a link between groups of nodes."""
    return [row for job, topology, axes in _jobs(find(machine)) for row in _rows(config, job, topology, axes)]


def _jobs(machine: Machine) -> Iterator[tuple[str, Topology, tuple[int, int]]]:
    """Each with the sizes of tp and pp."""
    for name, hosts in LAYOUTS.items():
        topology = Topology(tuple(hosts), (Level.of("switch", [node in "12" for node in hosts]),))
        for axes in ((4, 1), (2, 2)) if len(hosts) == 16 else ((2, 1), (1, 2)):
            yield name, topology, axes
    devices = machine.node.devices
    blocks = [node for node in range(NODES) for _ in range(devices)]
    cyclic = [node for _ in range(devices) for node in range(NODES)]
    fragments = [group for group, size in enumerate(FRAGMENTS) for _ in range(size)]
    mixed = [node * 27 % NODES for node in range(NODES)]  # nodes numbered in no order that has to do with groups
    for name, nodes, groups in (
        (f"{machine.name}, 64 nodes", blocks, [0] * NODES),
        (f"{machine.name}, 64 nodes, cyclic", cyclic, [0] * NODES),
        (f"{machine.name}, fragments of {', '.join(map(str, FRAGMENTS))}", blocks, fragments),
        (f"{machine.name}, the same, nodes mixed", [mixed[node] for node in blocks], fragments),
    ):
        levels = (Level.of(NODE, nodes), Level.of("group", [groups[node] for node in nodes]))
        topology = linked(Topology(tuple(f"n{node}" for node in nodes), levels), machine)
        yield name, topology, (devices, 4)


def _rows(config: Config, job: str, topology: Topology, axes: tuple[int, int]) -> Iterator[Row]:
    found = decide(_sized(config, len(topology.hosts), *axes), topology, _vocabulary(config))
    placed, given = found.placement.load, found.placement.given
    for level in topology.levels[topology.names.index(NODE) :]:
        if level.count > 1:
            before, after = given.beyond(level.name), placed.beyond(level.name)
            yield Row(job, str(found.mesh), level.name, before / GIB, after / GIB, after / before if before else None)


def _sized(config: Config, ranks: int, tp: int, pp: int) -> Config:
    """The model on other axes, each rank along dp with as many samples."""
    parallel = {"tp": tp, "pp": pp, "dp": "auto", "zero": 1, "shard": None, "near": None, "placement": "auto"}
    train = {"batch": ranks // (tp * pp) * SAMPLES}
    return config.model_copy(
        update={
            "parallel": type(config.parallel).model_validate(parallel),
            "train": config.train.model_copy(update=train),
        }
    )


def _vocabulary(config: Config) -> int:
    return 1 << 15 if config.model.vocabulary == "auto" else config.model.vocabulary


# ---- a large job -----------------------------------------------------------------------------------------------------


def scale(config: Config, machine: str, ranks: int) -> list[Part]:
    """What one rank of so many does until it knows its place; its ranks are dealt out cyclic, so an order is found."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(play, config, machine, ranks).result()


def play(config: Config, machine: str, ranks: int) -> list[Part]:
    """The same in this process."""
    rows: list[Part] = []
    chosen, described, started = find(machine), config, time.perf_counter()

    def timed(part: str, act: Callable[[], Any]) -> Any:
        before = time.perf_counter()
        made = act()
        rows.append(Part(part, ranks, time.perf_counter() - before, _peak_mib()))
        return made

    topology = timed("lay out the machine", lambda: _cyclic(chosen, ranks))
    mesh = timed("place the ranks", lambda: lay(described, topology))
    timed("find the groups of a rank", lambda: [mesh.ranks(ranks // 2, name) for name, _ in mesh.axes])
    timed("write it down", lambda: (topology.to_json(), mesh.to_json()))
    rows.append(Part("all of it", ranks, time.perf_counter() - started, _peak_mib()))
    return rows


def _cyclic(machine: Machine, ranks: int) -> Topology:
    nodes = ranks // machine.node.devices
    return linked(Topology(tuple(f"node{rank % nodes:05}" for rank in range(ranks))), machine, dense=True)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
