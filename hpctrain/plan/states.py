"""The bytes of an optimizer's states on a rank, and the rules that they follow from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from math import prod

from hpctrain.config import OptimConfig
from hpctrain.plan.layout import ITEMSIZE
from hpctrain.plan.units import Slot, Unit

SMALL = 4096  # elements: below, 8-bit AdamW keeps a parameter's means as they are; they weigh nothing
BLOCK = 256  # elements with one scale, in 8 bits


def state_bytes(units: Sequence[Unit], sharers: int, rank: int, config: OptimConfig, dtype: str) -> int:
    """What one of the ranks that share the units keeps of ``config``'s optimizer; ``dtype`` is what it updates."""
    total = 0
    for unit in units:
        first, last = unit.interval(sharers, rank)
        for slot in unit.slots:
            mine = max(min(slot.stop, last) - max(slot.start, first), 0)
            total += BYTES[config.kind](slot, mine, config, ITEMSIZE[dtype])
    return total


def orthogonal(name: str, shape: Sequence[int], excepted: Sequence[str]) -> bool:
    """Whether Muon takes a parameter: a matrix or a stack of them, by the number of dims, with no exception's name."""
    return len(shape) in (2, 3) and prod(shape) > 0 and not any(fnmatchcase(name, pattern) for pattern in excepted)


def _adamw(slot: Slot, mine: int, config: OptimConfig, width: int) -> int:
    return 2 * mine * {"fp32": width, "bf16": ITEMSIZE["bfloat16"]}[config.states]


def _adafactor(slot: Slot, mine: int, config: OptimConfig, width: int) -> int:
    shape = slot.shape
    return width * (prod(shape[:-1]) + prod((*shape[:-2], shape[-1])) if len(shape) > 1 else mine)


def _adamw8bit(slot: Slot, mine: int, config: OptimConfig, width: int) -> int:
    size = prod(slot.shape)
    return 2 * mine * width if size < SMALL else 2 * (mine + ITEMSIZE["float32"] * -(-size // BLOCK))


def _muon(slot: Slot, mine: int, config: OptimConfig, width: int) -> int:
    return mine * width * (1 if orthogonal(slot.name, slot.shape, config.muon_except) else 2)


# Of one parameter, of which a rank has ``mine`` elements; ``width`` is the bytes of one in the optimizer's own format.
BYTES: dict[str, Callable[[Slot, int, OptimConfig, int], int]] = {
    "adamw": _adamw,
    "adafactor": _adafactor,
    "adamw8bit": _adamw8bit,
    "muon": _muon,
}
