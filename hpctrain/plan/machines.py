"""Machines: where machine files are, what they say, and the ranks that a job on a machine has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hpctrain.config.job import JobConfig
from hpctrain.config.read import contents, tables, validate
from hpctrain.errors import ConfigError, PlanError
from hpctrain.plan import sourced
from hpctrain.plan.links import linked
from hpctrain.plan.machine import Machine
from hpctrain.plan.machine_rules import check
from hpctrain.plan.sourced import Value
from hpctrain.plan.topology import Topology

VARIABLE = "HPCTRAIN_MACHINES"
"""Folders with machine files, which are looked into first; with colons between them."""


@dataclass(frozen=True)
class Described:
    """A machine, with the file that describes it and the source of each value."""

    machine: Machine
    path: Path
    values: tuple[Value, ...]

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The keys of values that somebody remembers, and found in no source."""
        return tuple(value.key for value in self.values if value.unchecked)

    def to_json(self) -> dict[str, Any]:
        """The machine and its sources as plain values."""
        beside = {value.key: {"tags": list(value.tags), "word": value.word} for value in self.values if value.tags}
        return {"path": str(self.path), "machine": self.machine.model_dump(mode="json"), "beside": beside}


def find(name: str | Path) -> Machine:
    """The machine of that name, or of the machine file with that path; ConfigError says what is wrong with either."""
    return describe(name).machine


def named(name: str | None) -> Machine | None:
    """The machine that is named, if one is."""
    return None if name is None else find(name)


def describe(name: str | Path) -> Described:
    """The same, with the sources of its values."""
    path = Path(name) if _is_path(str(name)) else _path(str(name))
    text = contents(path)
    machine = validate(Machine, tables(text, str(path)), str(path))
    check(machine, str(path))
    return Described(machine, path, sourced.values(text))


def names() -> tuple[str, ...]:
    """The machines that can be called by their names."""
    return tuple(sorted({path.stem for folder in folders() for path in folder.glob("*.toml")}))


def folders() -> Iterator[Path]:
    """Where machine files are looked for: what VARIABLE names, here, in the checkout, with what is installed."""
    yield from map(Path, filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)))
    yield Path("configs/machines")
    package = Path(__file__).resolve().parents[1]
    yield package.parent / "configs/machines"
    # Beside the package (pip --target), or three folders above: lib, python3.x, site-packages.
    yield from (folder / "share/hpctrain/machines" for folder in [*package.parents][:4])


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or os.sep in name


def _path(name: str) -> Path:
    found = (path for folder in folders() if (path := folder / f"{name}.toml").is_file())
    if path := next(found, None):
        return path
    near = get_close_matches(name.lower(), names(), n=1)
    raise ConfigError(
        f"no machine is called {name!r}",
        f"known are {', '.join(names())}" if names() else "there is no folder with machine files",
        f"did you mean {near[0]}?" if near else f"give the path of a machine file, or set {VARIABLE} to its folder",
    )


def ask(
    machine: Machine | None, job: JobConfig, nodes: int | None = None, gpus: int | None = None, ranks: int | None = None
) -> Topology:
    """The ranks of a job that is asked for by some of these numbers; on one node where no machine is known."""
    if machine is not None:
        return topology_of(machine, *size(machine, job, nodes, gpus, ranks))
    for option, number in (("--nodes", nodes), ("--gpus", gpus)):
        if number is not None:
            why = "a machine's file says how many ranks that are"
            raise PlanError(f"{option} {number} without a machine", why, "give --machine too, or --ranks instead")
    return Topology(("node",) * (ranks or 1))


def topology_of(machine: Machine, nodes: int, tasks_per_node: int) -> Topology:
    """Ranks in blocks on so many nodes of a machine, which follow one another; PlanError where it has fewer."""
    if machine.nodes is not None and nodes > machine.nodes:
        why = f"{machine.name} has {machine.nodes:,}"
        raise PlanError(f"{nodes:,} nodes are more than there are", why, "ask for no more than that")
    hosts = tuple(f"node{node:05}" for node in range(1, nodes + 1) for _ in range(tasks_per_node))
    return linked(Topology(hosts), machine, dense=True)


def size(
    machine: Machine, job: JobConfig, nodes: int | None = None, gpus: int | None = None, ranks: int | None = None
) -> tuple[int, int]:
    """Nodes, and ranks on each, of a job that is asked for by some of these numbers; else as its configuration says.

    PlanError where the ranks would not be the same number on each node.
    """
    if gpus is not None:
        nodes = _nodes_with(gpus, machine, nodes)
    each = machine.node.devices if job.tasks_per_node == "auto" else job.tasks_per_node
    if ranks is None:
        return nodes or job.nodes, each
    nodes = nodes or -(-ranks // each)
    if ranks % nodes:
        what = f"{ranks} ranks do not divide over {nodes} nodes"
        fit = f"{ranks // nodes * nodes} or {(ranks // nodes + 1) * nodes}" if ranks > nodes else nodes
        raise PlanError(what, "every node of a job has the same number of ranks", f"give --ranks {fit}")
    return nodes, ranks // nodes


def _nodes_with(gpus: int, machine: Machine, nodes: int | None) -> int:
    """The nodes that have so many devices together."""
    each = machine.node.devices
    if nodes is not None:
        raise PlanError(f"--nodes {nodes} and --gpus {gpus}", "either says how large the job is", "give one of them")
    if gpus % each:
        fit = " or ".join(str(n) for n in (gpus // each * each, (gpus // each + 1) * each) if n)
        why = f"a node of {machine.name} has {each} devices, and a job has whole nodes"
        raise PlanError(f"--gpus {gpus} is not a number of whole nodes", why, f"give --gpus {fit}")
    return gpus // each
