"""Plan: every decision about a run as one value, and ``decide``, which takes them all.

``decide`` is a pure function of what a person chose and of what the machine offers. It runs on a laptop as well as
in the job, and every rank of a job computes the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hpctrain.config import Config
from hpctrain.errors import PlanError
from hpctrain.plan.layout import ITEMSIZE, Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.topology import Topology
from hpctrain.plan.weights import ModelShape, parameters, weights
from hpctrain.schedule.action import Schedule, accumulate

DTYPES = {"fp32": "float32", "fp64": "float64"}


@dataclass(frozen=True)
class Plan:
    """What a run will do: ranks, model, who holds what, in which order, and what it weighs."""

    topology: Topology
    mesh: Mesh
    shape: ModelShape
    dtype: str
    layouts: dict[str, Layout]
    """Of each parameter, by its name."""
    schedule: Schedule
    bytes: dict[str, int]
    """What one rank holds, in bytes: weights, gradients, optimizer."""
    reasons: tuple[str, ...]
    """Why it is so, a sentence each."""

    def show(self) -> str:
        """The plan as lines for a person."""
        held = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in self.bytes.items())
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
            "parameters": parameters(self.shape),
            "schedule": self.schedule.to_json(),
            "bytes": self.bytes,
            "reasons": list(self.reasons),
        }


def lay(config: Config, topology: Topology) -> Mesh:
    """The mesh of a run: today all ranks along one axis, dp. Refuses a batch that does not divide over it."""
    ranks = len(topology.hosts)
    dp = ranks if config.parallel.dp == "auto" else config.parallel.dp
    if dp != ranks:
        raise PlanError(
            f"parallel.dp = {dp} is not the number of ranks, {ranks}",
            "the sizes of the mesh's axes multiply to the ranks that were started",
            f'start {dp} ranks, or set parallel.dp to {ranks} or "auto"',
        )
    _microbatches(config, dp)
    return Mesh((("dp", dp),))


def decide(config: Config, topology: Topology, vocabulary: int) -> Plan:
    """Take every decision about a run; ``vocabulary`` is the tokenizer's number of tokens."""
    mesh = lay(config, topology)
    shape = ModelShape.of(config.model, vocabulary)
    dtype = DTYPES[config.precision.compute]
    microbatches = _microbatches(config, mesh.size("dp"))
    size = parameters(shape) * ITEMSIZE[dtype]
    return Plan(
        topology=topology,
        mesh=mesh,
        shape=shape,
        dtype=dtype,
        layouts={weight.name: Layout(weight.shape, dtype) for weight in weights(shape)},
        schedule=accumulate(microbatches),
        bytes={"weights": size, "gradients": size, "optimizer": 2 * size},
        reasons=(
            f"every rank takes other samples: dp = {mesh.size('dp')}",
            f"train.batch = {config.train.batch} over dp = {mesh.size('dp')}, {config.train.microbatch} at once,"
            f" is {microbatches} micro-batch{'es' * (microbatches > 1)} a rank",
        ),
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
