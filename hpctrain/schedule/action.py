"""Action and Schedule: what each rank of a pipeline does, one thing after another, as data.

Both have a text form and its exact inverse. An action is ``2F0``: stage 2, forward, micro-batch 0. A message is named
by what travels: ``2SEND_F0`` sends on the activation that ``2F0`` gave, and ``3RECV_F0`` takes it in for stage 3;
``3SEND_B0`` and ``2RECV_B0`` bring its gradient back. A schedule is one line a rank, its actions with a space between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from hpctrain.errors import PlanError

OPS = {
    "F": "forward",
    "B": "backward: I and W in one",
    "I": "gradient of the input",
    "W": "gradient of the weights",
    "SEND_F": "send the activation to the next stage",
    "RECV_F": "receive it from the stage before",
    "SEND_B": "send the gradient to the stage before",
    "RECV_B": "receive it from the next stage",
}

PARTS = {"B": "IW"}  # what an op is made of, where that is more than one thing

# The other end of a message: its op, and how many stages further it is.
PEERS = {"SEND_F": ("RECV_F", 1), "RECV_F": ("SEND_F", -1), "SEND_B": ("RECV_B", -1), "RECV_B": ("SEND_B", 1)}

# No leading zeros and only these digits, so that each action has one text.
_ACTION = re.compile(rf"(0|[1-9][0-9]*)({'|'.join(OPS)})(0|[1-9][0-9]*)")


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

    @property
    def is_message(self) -> bool:
        """Whether this moves something between ranks, and computes nothing."""
        return self.op in PEERS

    @property
    def is_send(self) -> bool:
        """Whether this lets something go to another rank."""
        return self.op.startswith("SEND")

    @property
    def peer(self) -> Action:
        """The other end of this message."""
        op, further = PEERS[self.op]
        return Action(self.stage + further, op, self.microbatch)

    @cached_property
    def parts(self) -> tuple[Action, ...]:
        """What this does, one thing each: a backward is I and W, everything else is itself."""
        if self.op not in PARTS:
            return (self,)
        return tuple(Action(self.stage, op, self.microbatch) for op in PARTS[self.op])


@dataclass(frozen=True)
class Schedule:
    """The actions of each rank of a pipeline, in the order in which it does them."""

    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if not self.ranks:
            raise PlanError("the schedule has no ranks", "one rank is a pipeline too", "give the actions of each rank")

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Every action with its rank, rank after rank."""
        return ((rank, action) for rank, actions in enumerate(self.ranks) for action in actions)

    @cached_property
    def stages(self) -> int:
        """How many stages the pipeline has."""
        return 1 + max((action.stage for _, action in self), default=-1)

    @cached_property
    def microbatches(self) -> int:
        """How many micro-batches go through it."""
        return 1 + max((action.microbatch for _, action in self), default=-1)

    @cached_property
    def home(self) -> dict[int, int]:
        """The rank of each stage: the first that does anything for it."""
        found: dict[int, int] = {}
        for rank, action in self:
            found.setdefault(action.stage, rank)
        return found

    def own(self, rank: int) -> list[int]:
        """The stages of a rank, first to last."""
        return sorted(stage for stage, home in self.home.items() if home == rank)

    @cached_property
    def has_messages(self) -> bool:
        """Whether it says what is sent and received, or only what is computed."""
        return any(action.is_message for _, action in self)

    def crosses(self, stage: int) -> bool:
        """Whether what ``stage`` gives to the next one goes to another rank."""
        return {stage, stage + 1} <= self.home.keys() and self.home[stage] != self.home[stage + 1]

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
