"""Plan: every decision about a run as one value, and ``decide``, which takes them all.

``decide`` is a pure function of what a person chose and of what the machine offers. It runs on a laptop as well as
in the job, and every rank of a job computes the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.config import Config
from hpctrain.errors import PlanError
from hpctrain.plan.formats import Format
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.states import state_bytes
from hpctrain.plan.topology import Topology
from hpctrain.plan.units import REPLICA, SHARD, STAGES, Member, Unit, arrange, choose, neighbours, room
from hpctrain.plan.weights import ModelShape, Weight, parameters, weights
from hpctrain.schedule.action import Schedule, accumulate

SHARED = {1: "optimizer states", 2: "optimizer states and gradients", 3: "optimizer states, gradients and weights"}


@dataclass(frozen=True)
class Plan:
    """What a run will do: ranks, model, who holds what, in which order, and what it weighs."""

    topology: Topology
    mesh: Mesh
    shape: ModelShape
    dtype: str
    """Of what the optimizer updates; the weights that multiply may have another (``formats.py``)."""
    layouts: dict[str, Layout]
    """Of each parameter, by its name."""
    units: tuple[Unit, ...]
    """Parameters that are gathered, reduced and updated together."""
    zero: int
    """The stage of ZeRO: what the ranks share."""
    gather_bytes: int
    """Weights of blocks alive at once, where ranks share them."""
    schedule: Schedule
    bytes: dict[str, int]
    """What one rank holds, in bytes: weights, gradients, optimizer, and buffers for what comes and goes."""
    reasons: tuple[str, ...]
    """Why it is so, a sentence each."""

    def show(self) -> str:
        """The plan as lines for a person."""
        held = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in self.bytes.items() if size)
        return "\n".join((
            f"ranks     {self.topology.describe()}",
            f"mesh      {self.mesh}",
            f"model     {parameters(self.shape):,} parameters in {self.dtype}",
            f"a rank    {held}",
            *(f"because   {reason}" for reason in self.reasons),
        ))  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values; what a checkpoint keeps of the run that wrote it."""
        return {
            "mesh": self.mesh.to_json(),
            "hosts": self.topology.to_json(),
            "shape": vars(self.shape),
            "dtype": self.dtype,
            "zero": self.zero,
            "parameters": parameters(self.shape),
            "schedule": self.schedule.to_json(),
            "bytes": self.bytes,
            "reasons": list(self.reasons),
        }


def lay(config: Config, topology: Topology) -> Mesh:
    """The mesh of a run: all ranks take other samples. Refuses a batch that does not divide over them."""
    ranks = len(topology.hosts)
    dp = ranks if config.parallel.dp == "auto" else config.parallel.dp
    if dp != ranks:
        raise PlanError(
            f"parallel.dp = {dp} is not the number of ranks, {ranks}",
            "the sizes of the mesh's axes multiply to the ranks that were started",
            f'start {dp} ranks, or set parallel.dp to {ranks} or "auto"',
        )
    _microbatches(config, dp)
    mesh = Mesh(choose(config.parallel.zero, dp, config.parallel.shard))
    if config.parallel.near is not None:
        neighbours(mesh, config.parallel.near)
    return mesh


def decide(config: Config, topology: Topology, vocabulary: int) -> Plan:
    """Take every decision about a run; ``vocabulary`` is the tokenizer's number of tokens."""
    mesh = lay(config, topology)
    shape = ModelShape.of(config.model, vocabulary)
    format = Format.of(config.precision)
    dtype, stage = format.master, STAGES[config.parallel.zero]
    units = cut(weights(shape), dtype)
    given = config.parallel.gather_mib
    gather_bytes = room(units, format.compute, None if given == "auto" else int(given * 2**20))
    return Plan(
        topology=topology,
        mesh=mesh,
        shape=shape,
        dtype=dtype,
        layouts={slot.name: unit.layout(slot, stage.axes, dtype) for unit in units for slot in unit.slots},
        units=units,
        zero=config.parallel.zero,
        gather_bytes=gather_bytes,
        schedule=accumulate(_microbatches(config, mesh.size(REPLICA, SHARD))),
        bytes=_bytes(units, mesh, config, gather_bytes, format),
        reasons=tuple(_reasons(config, mesh)),
    )


def cut(found: Iterable[Weight], dtype: str) -> tuple[Unit, ...]:
    """The units of a model: its blocks, and what is around them."""
    found = tuple(found)
    blocks = {".".join(weight.name.split(".")[:2]) for weight in found if weight.name.startswith("blocks.")}
    return arrange(Member.of(weight.name, weight.shape, weight.decay, dtype, blocks) for weight in found)


def _bytes(units: tuple[Unit, ...], mesh: Mesh, config: Config, gather_bytes: int, format: Format) -> dict[str, int]:
    """Of the first rank, whose intervals are the largest."""
    stage, near = STAGES[config.parallel.zero], config.parallel.near
    sharers = mesh.size(*stage.axes)
    whole = sum(unit.total for unit in units)
    own = sum(stop - start for start, stop in (unit.interval(sharers, 0) for unit in units))
    held = [unit.total for unit in units if unit.held]
    blocks = [unit.total for unit in units if not unit.held]
    reduced = format.gradient_bytes(max(held, default=0) + 2 * max(blocks, default=0))
    gathered = format.weight_bytes(sum(held)) + min(gather_bytes, format.weight_bytes(sum(blocks)))
    return {
        "weights": format.weight_bytes(own if stage.weights else whole) + format.master_bytes(own),
        "gradients": format.gradient_bytes(own if stage.gradients else whole),
        "optimizer": state_bytes(units, sharers, 0, config.optim, format.master),
        "buffers": stage.gradients * reduced + stage.weights * gathered,
        **({"second copy": format.weight_bytes(sum(-(-total // near) for total in blocks))} if near else {}),
    }


def _reasons(config: Config, mesh: Mesh) -> Iterator[str]:
    ranks, batch = mesh.size(REPLICA, SHARD), config.train.batch
    microbatches, sharers = _microbatches(config, ranks), mesh.size(*STAGES[config.parallel.zero].axes)
    yield f"every rank takes other samples: dp = {ranks}"
    if config.parallel.zero:
        copies = f", and there are {ranks // sharers} copies" * (ranks > sharers)
        yield f"parallel.zero = {config.parallel.zero}: {sharers} ranks share {SHARED[config.parallel.zero]}{copies}"
    if config.parallel.near:
        yield f"parallel.near = {config.parallel.near}: weights come from afar once a step, and then from neighbours"
    yield (
        f"train.batch = {batch} over dp = {ranks}, {config.train.microbatch} at once,"
        f" is {microbatches} micro-batch{'es' * (microbatches > 1)} a rank"
    )


def _microbatches(config: Config, dp: int) -> int:
    """Micro-batches of a rank in a step; the last one may be smaller than the others."""
    batch = config.train.batch
    if batch % dp:
        near = [n for n in (batch // dp * dp, (batch // dp + 1) * dp) if n]
        raise PlanError(
            f"train.batch = {batch} does not divide over {dp} data-parallel ranks",
            "every rank takes the same number of sequences",
            f"set train.batch to {' or '.join(map(str, near))}",
        )
    return -(-batch // dp // config.train.microbatch)
