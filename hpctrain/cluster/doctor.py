"""Can this node, this job, train? What was detected and where each value came from, and what would hurt.

``diagnose`` asks every rank and gives values; nothing is printed here. What is warned of is decided by pure functions
over what the ranks found, one for each thing that is known to go wrong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster import advice, slurm
from hpctrain.cluster.advice import Advice, Rank
from hpctrain.cluster.fact import Fact
from hpctrain.cluster.links import clock_offsets
from hpctrain.cluster.probe import Probe, probe, python
from hpctrain.cluster.world import World
from hpctrain.errors import LaunchError


@dataclass(frozen=True)
class Report:
    """What was found, and what to mend."""

    facts: tuple[Fact, ...]
    warnings: tuple[Advice, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as plain lists and dicts."""
        return {"facts": [asdict(fact) for fact in self.facts], "warnings": [asdict(item) for item in self.warnings]}


def diagnose(world: World, folder: Path) -> Report:
    """Examine the job and its nodes for a run that writes to ``folder``. Collective; all ranks get rank 0's report."""
    job = slurm.job(os.environ)
    own = Rank(world.rank, world.node, world.cores, probe(folder))
    ranks = world.collect(own)
    clocks = clock_offsets(world)
    return world.share(_report(world, job, ranks, clocks) if world.leads else None)


def _report(world: World, job: slurm.Job | None, ranks: list[Rank], clocks: list[float]) -> Report:
    facts = (*world.facts, *_places(world), *_found(ranks), _clock(clocks), *(job.facts if job else ()))
    return Report(facts, (*world.warnings, *_node_list(job, world), *advice.all_of(ranks, clocks)))


def show(report: Report) -> str:
    """The report as text: name, value and source in columns, then the warnings."""
    rows = [(fact.name, _shown(fact.value), fact.source) for fact in report.facts]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{name:<{widths[0]}}  {value:<{min(widths[1], 48)}}  {source}".rstrip() for name, value, source in rows]
    warned = [f"warning: {item}" for item in report.warnings]
    return "\n".join([*lines, "", *(warned or ["nothing to mend"])])


# ---- facts ---------------------------------------------------------------------------------------------------------


def _places(world: World) -> list[Fact]:
    source = "MPI_Comm_split_type(MPI_COMM_TYPE_SHARED)" if world.comm else "alone"
    return [
        Fact("nodes", len(world.topology.nodes), source),
        Fact("topology", world.topology.describe(), source),
        Fact("host", world.host, "gethostname"),
        Fact("python", python(), "sys.executable"),
    ]


# Name of a fact -> what it is of a rank's finds, and its source.
FOUND: dict[str, tuple[Callable[[Rank], Any], Callable[[Probe], str]]] = {
    "torch": (lambda r: r.probe.torch, lambda p: "torch.__version__"),
    "hdf5": (lambda r: r.probe.hdf5.version or f"none: {r.probe.hdf5.reason}", lambda p: "h5py.version"),
    "hdf5.parallel": (lambda r: r.probe.hdf5.parallel, lambda p: "h5py.get_config().mpi"),
    "mpi.loaded": (lambda r: ", ".join(r.probe.mpi_libraries), lambda p: "/proc/self/maps"),
    "devices": (lambda r: len(r.probe.devices), lambda p: f"torch.{p.device_kind}, {p.device_mask}"),
    "devices.of_node": (lambda r: r.probe.devices_of_node, lambda p: "/dev"),
    "devices.near": (lambda r: _near(r.probe), lambda p: "/sys/bus/pci/devices"),
    "cores": (lambda r: len(r.cores), lambda p: "sched_getaffinity"),
    "threads": (lambda r: r.probe.threads or "not set", lambda p: "OMP_NUM_THREADS"),
    "memory.gib": (lambda r: _gib(r.probe.memory), lambda p: p.memory_source),
    "shm.gib": (lambda r: _gib(r.probe.shm.total_bytes), lambda p: "statvfs /dev/shm"),
    "shm.free_gib": (lambda r: _gib(r.probe.shm.free_bytes), lambda p: "statvfs /dev/shm"),
    "folder.type": (lambda r: r.probe.folder.kind, lambda p: f"/proc/self/mountinfo {p.folder.point}"),
    "folder.free_gib": (lambda r: _gib(r.probe.folder.free_bytes), lambda p: f"statvfs {p.folder.point}"),
}


def _near(found: Probe) -> str:
    """What is near each device that a rank sees."""
    return "; ".join(f"{index}: {near}" for index, near in enumerate(found.near)) or "nothing to be near to"


def _found(ranks: Sequence[Rank]) -> list[Fact]:
    first = ranks[0].probe
    return [Fact(name, _summary([value(r) for r in ranks]), source(first)) for name, (value, source) in FOUND.items()]


def _summary(values: list[Any]) -> Any:
    """One value where all ranks have the same; else the different ones, as far as there is room."""
    different = list(dict.fromkeys(values))
    return different[0] if len(different) == 1 else f"differs: {', '.join(map(str, different[:8]))}"


def _clock(offsets: list[float]) -> Fact:
    return Fact("clocks.apart_seconds", round(max(offsets) - min(offsets), 4), "pings over MPI")


def _node_list(job: slurm.Job | None, world: World) -> list[Advice]:
    """Whether Slurm's list of nodes can be read and has the nodes that the ranks are on."""
    if not job or not job.nodes:
        return []
    try:
        listed = {name.split(".")[0] for name in slurm.expand_nodes(job.nodes)}
    except LaunchError as error:
        return [Advice(error.what, error.why, error.mend)]
    return advice.strangers(listed, world.topology.nodes)


def _gib(count: int) -> float:
    return round(count / 2**30, 1)


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 100 else text[:97] + "..."
