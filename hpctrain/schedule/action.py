"""Action and Schedule: what each rank of a pipeline does, one thing after another, as data.

Both have a text form and its exact inverse. An action is ``2F0``: stage 2, forward, micro-batch 0. A schedule is one
line a rank, its actions with a space between them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.errors import PlanError

OPS = {
    "F": "forward",
    "B": "backward: I and W in one",
    "I": "gradient of the input",
    "W": "gradient of the weights",
}

# No leading zeros and only these digits, so that each action has one text.
_ACTION = re.compile(rf"(0|[1-9][0-9]*)([{''.join(OPS)}])(0|[1-9][0-9]*)")


@dataclass(frozen=True)
class Action:
    """One op of one stage on one micro-batch."""

    stage: int
    op: str
    microbatch: int

    def __post_init__(self) -> None:
        if self.op not in OPS or self.stage < 0 or self.microbatch < 0:
            raise _no_action(str(self))

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action whose text this is."""
        match = _ACTION.fullmatch(text)
        if not match:
            raise _no_action(text)
        return cls(int(match[1]), match[2], int(match[3]))


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank of a pipeline, in the order in which it does them."""

    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise PlanError("the schedule has no ranks", "one rank is a pipeline too", "give the actions of each rank")

    def __str__(self) -> str:
        return "".join(f"{line}\n" for line in self.to_json())

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """The schedule whose text this is; a line without words is a rank that does nothing."""
        return cls.from_json(text.removesuffix("\n").split("\n"))

    def to_json(self) -> list[str]:
        """The text of each rank's actions."""
        return [" ".join(map(str, actions)) for actions in self.ranks]

    @classmethod
    def from_json(cls, value: Iterable[str]) -> Schedule:
        """The schedule that ``to_json`` gave."""
        return cls(tuple(tuple(map(Action.parse, line.split())) for line in value))


def accumulate(microbatches: int) -> Schedule:
    """Plain gradient accumulation: one stage on one rank, each micro-batch forwards and at once backwards."""
    if microbatches < 1:
        raise PlanError(
            f"a step of {microbatches} micro-batches has no gradient",
            "a step adds up what its micro-batches give",
            "take 1 micro-batch or more",
        )
    return Schedule((tuple(Action(0, op, microbatch) for microbatch in range(microbatches) for op in "FB"),))


def _no_action(text: str) -> PlanError:
    return PlanError(
        f"{text!r} is not an action",
        "an action is a stage, an op and a micro-batch, such as 2F0, both counted from 0",
        "use one of the ops " + ", ".join(f"{op} ({meaning})" for op, meaning in OPS.items()),
    )
