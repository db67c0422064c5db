"""Spans: which part of the model each stage of a pipeline has, as values.

A stage has neighbouring blocks; the first one has the embedding too, and the last one the head. Where nobody says how
many blocks each has, they are dealt out (``deals``): the head counts as the blocks that take as much computing, and the
embedding, a lookup, as none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.errors import PlanError
from hpctrain.plan.deals import deal
from hpctrain.plan.weights import ModelShape, Weight, multiplied, weights
from hpctrain.schedule.action import Schedule


@dataclass(frozen=True)
class Span:
    """What one stage has: the blocks from ``start`` to before ``stop``, and what is before and after all blocks."""

    start: int
    stop: int
    embed: bool
    head: bool

    @property
    def layers(self) -> range:
        """The numbers of its blocks."""
        return range(self.start, self.stop)

    def has(self, name: str, tied: bool = False) -> bool:
        """Whether it needs the weight of this name; ``tied`` says that the head uses the embedding's."""
        part, _, rest = name.partition(".")
        if part == "blocks":
            return int(rest.partition(".")[0]) in self.layers
        return {"embed": self.embed, "head": self.head}[part] or (tied and self.head and name == TIED)


TIED = "embed.tokens"  # the weight that a tied head uses


def spans(shape: ModelShape, schedule: Schedule, given: Sequence[int] | None = None) -> tuple[Span, ...]:
    """The parts of a schedule's stages; ``given`` says how many blocks each has. PlanError for what cannot be."""
    count, layers = schedule.stages, tuple(given) if given is not None else _dealt(shape, schedule)
    if len(layers) != count or sum(layers) != shape.layers or min(layers) < 1:
        raise PlanError(
            f"parallel.layers_per_stage = {list(layers)} for {count} stages and model.layers = {shape.layers}",
            "each stage has at least one block, and all blocks are in one",
            f"give {count} numbers that add up to {shape.layers}, or leave parallel.layers_per_stage out",
        )
    starts = [sum(layers[:number]) for number in range(count + 1)]
    return tuple(Span(*starts[n : n + 2], embed=n == 0, head=n == count - 1) for n in range(count))


def whole(shape: ModelShape) -> tuple[Span]:
    """All of the model in one."""
    return (Span(0, shape.layers, embed=True, head=True),)


def mine(shape: ModelShape, parts: Sequence[Span]) -> tuple[Weight, ...]:
    """The weights of some stages, in the model's order; one that two of them need is there once."""
    return tuple(weight for weight in weights(shape) if any(part.has(weight.name, shape.tied) for part in parts))


def _dealt(shape: ModelShape, schedule: Schedule) -> tuple[int, ...]:
    """Blocks of each stage."""
    count = schedule.stages
    if count > shape.layers:
        raise PlanError(
            f"a pipeline of {count} stages for model.layers = {shape.layers}",
            "each stage has at least one block",
            f"set parallel.pp times parallel.chunks to {shape.layers} or less, or model.layers to {count} or more",
        )
    return deal(shape.layers, _head_in_blocks(shape), schedule)


def _head_in_blocks(shape: ModelShape) -> float:
    """How many blocks take as much computing as the head."""
    return shape.vocabulary * shape.width / (multiplied(shape) + 2 * shape.width * shape.sequence)
