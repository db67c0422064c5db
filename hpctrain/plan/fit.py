"""Fit: what a machine says of a plan, whether it has room and how it writes checkpoints; and what it fills in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hpctrain.config import CheckpointConfig, Config
from hpctrain.plan.machine import Machine
from hpctrain.plan.plan import Plan

GIB = 1 << 30

Hints = dict[str, str | int]


def fit(plan: Plan, config: Config, machine: Machine | None) -> Plan:
    """The plan with what the machine says of it among its reasons."""
    return plan if machine is None else replace(plan, reasons=(*plan.reasons, *_reasons(plan, config, machine)))


def hinted(config: CheckpointConfig, machine: Machine | None) -> CheckpointConfig:
    """The run's settings of checkpoints, with hints for MPI-IO of the machine where the run has none of that name."""
    return config.model_copy(update={"hints": {**open_hints(config.hints, machine), **config.hints}})


def open_hints(own: Hints, machine: Machine | None) -> Hints:
    """The machine's hints that the run's own do not name."""
    storage = machine and machine.storage
    return {name: value for name, value in storage.hints.items() if name not in own} if storage else {}


def room_gib(machine: Machine, ranks_per_node: int) -> float:
    """What each of a node's ranks has: its share of the devices' memory, or of the node's where devices have none."""
    if machine.device.kind == "cpu":
        return machine.node.memory_gib / ranks_per_node
    return machine.device.memory_gib * machine.node.devices / max(machine.node.devices, ranks_per_node)


def _reasons(plan: Plan, config: Config, machine: Machine) -> Iterator[str]:
    held = sum(plan.bytes.values()) + (sum(plan.host.values()) if machine.device.kind == "cpu" else 0)
    yield _room(held, machine, max(len(plan.topology.ranks_of(n)) for n in _nodes(plan)))
    if config.checkpoint.writer == "mpio" and (hints := open_hints(config.checkpoint.hints, machine)):
        yield f"checkpoint.hints of {machine.name}: {', '.join(f'{name} = {value}' for name, value in hints.items())}"
    if machine.storage and machine.storage.advice:
        yield f"where checkpoints go, {machine.storage.kind} of {machine.name}: {machine.storage.advice}"


def _nodes(plan: Plan) -> range:
    return range(len(plan.topology.nodes))


def _room(held: int, machine: Machine, ranks_per_node: int) -> str:
    """Whether so many bytes of a rank have room, in a sentence. A plan counts no activations."""
    room, where = room_gib(machine, ranks_per_node), f"{machine.name}'s {machine.device.name}"
    if ranks_per_node > machine.node.devices or machine.device.kind == "cpu":
        where = f"a node of {machine.name}, shared by {ranks_per_node}"
    if held <= room * GIB:
        return f"a rank holds {_gib(held)} of {room:.4g} GiB on {where}; activations come on top"
    more = "share more (parallel.zero, pp, tp), or take more ranks"
    return f"a rank holds {_gib(held)} GiB, and has {room:.4g} on {where}: it does not fit; {more}"


def _gib(size: int) -> str:
    return f"{size / GIB:,.1f}" if size >= GIB else f"{size / GIB:.2g}"
