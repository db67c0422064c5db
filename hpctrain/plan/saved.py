"""Saved: what saves take of host memory on a rank, beside what it trains with.

Ranks that hold the same share the writing, so over all ranks that have the same blocks a copy of what they write has
the bytes of these blocks in the checkpoint. They write pieces of 1 MiB at least: a rank may have some MiB more or less
than its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import ceil, prod
from pathlib import PurePath

from hpctrain.config import CheckpointConfig, Config, OptimConfig
from hpctrain.plan.layout import ITEMSIZE
from hpctrain.plan.states import BYTES
from hpctrain.plan.topology import Topology
from hpctrain.plan.units import Slot, Unit

MEMORY = PurePath("/dev/shm")  # where a near checkpoint is in the node's memory
COPY, NEAR = "for saves in the background", "for near checkpoints in memory"

Pipeline = Sequence[Sequence[Unit]]
"""For each rank along ``pp`` what it has of the model."""


def host_bytes(config: Config, pipeline: Pipeline, topology: Topology, dtype: str) -> dict[str, int]:
    """What saves take on a rank in its host's memory, by what it is for; ``dtype`` is what the optimizer updates.

    Near saves are there twice while one is made, since the former stays until the next is whole; and the next node's
    parts as well, where there is one.
    """
    knobs, part = config.checkpoint, part_bytes(pipeline, len(topology.hosts), config.optim, dtype)
    found = {COPY: part} if copies(knobs) else {}
    if knobs.near_every and knobs.near is not None and PurePath(knobs.near).is_relative_to(MEMORY):
        found[NEAR] = 2 * min(knobs.near_copies, len(topology.nodes)) * part
    return found


def copies(config: CheckpointConfig) -> bool:
    """Whether the run copies what it saves; the last save, for which it waits, needs no copy."""
    whole = config.every > 0 and config.writer != "mpio"
    return config.background and (whole or config.near_every > 0)


def part_bytes(pipeline: Pipeline, ranks: int, config: OptimConfig, dtype: str) -> int:
    """What a rank writes of a checkpoint: of those along ``pp``, the one that writes most."""
    holders = Counter(slot.name for units in pipeline for slot in _slots(units))
    parts = (
        sum(Fraction(kept_bytes(slot, config, dtype), holders[slot.name]) for slot in _slots(units))
        for units in pipeline
    )
    return ceil(max(parts) * len(pipeline) / ranks)


def kept_bytes(slot: Slot, config: OptimConfig, dtype: str) -> int:
    """What a checkpoint has of a whole parameter: what the optimizer updates, and its states."""
    size, width = prod(slot.shape), ITEMSIZE[dtype]
    return size * width + BYTES[config.kind](slot, size, config, width)


def shown(host: dict[str, int]) -> str:
    """The same in a line for a person."""
    return ", ".join(f"{size / 2**20:,.0f} MiB {what}" for what, size in host.items())


def _slots(units: Sequence[Unit]) -> list[Slot]:
    return [slot for unit in units for slot in unit.slots]
