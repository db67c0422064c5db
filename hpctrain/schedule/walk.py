"""Walk: all ranks go through their actions, each as far as what it needs is there.

What needs what stands here and nowhere else. ``check`` asks whether a walk comes to its end, ``simulate`` when each
action does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpctrain.schedule.action import Action, Schedule


def needs(action: Action, schedule: Schedule) -> list[Action]:
    """What must be done before ``action``.

    What comes from another rank is needed through its message where the schedule says its messages, else directly.
    """
    return [Action(stage, op, action.microbatch) for stage, op in _NEEDS[action.op](action.stage, schedule)]


def _forward(stage: int, schedule: Schedule) -> list[tuple[int, str]]:
    if not stage:
        return []
    return [(stage, "RECV_F") if schedule.has_messages and schedule.crosses(stage - 1) else (stage - 1, "F")]


def _backward(stage: int, schedule: Schedule) -> list[tuple[int, str]]:
    own = [(stage, "F")]
    if stage + 1 == schedule.stages:
        return own
    return [*own, (stage, "RECV_B") if schedule.has_messages and schedule.crosses(stage) else (stage + 1, "I")]


_NEEDS = {
    "F": _forward,
    "B": _backward,
    "I": _backward,
    "W": lambda stage, schedule: [(stage, "I")],
    "SEND_F": lambda stage, schedule: [(stage, "F")],
    "SEND_B": lambda stage, schedule: [(stage, "I")],
    "RECV_F": lambda stage, schedule: [(stage - 1, "SEND_F")],
    "RECV_B": lambda stage, schedule: [(stage + 1, "SEND_B")],
}


@dataclass
class Walk:
    """Ranks on their way through a schedule that says all it should; live: it knows how far each has come.

    Each rank does one thing after another. A receive waits for its send. A send is over when its receiver stands at the
    receive, or when fewer than ``buffers`` messages are on their way from the one rank to the other: with 0, both meet.
    """

    schedule: Schedule
    buffers: int = 0
    position: list[int] = field(init=False)
    done: set[Action] = field(init=False, default_factory=set)
    _flying: Counter[tuple[int, int]] = field(init=False, default_factory=Counter)

    def __post_init__(self) -> None:
        self.position = [0] * len(self.schedule.ranks)

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """Every action that can be done with its rank, each after all that it needs."""
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.position)):
                while (action := self.at(rank)) and self._can(action):
                    self._do(rank, action)
                    moved = True
                    yield rank, action

    def at(self, rank: int) -> Action | None:
        """Where a rank stands: the action that it has yet to do, or None at its end."""
        actions, position = self.schedule.ranks[rank], self.position[rank]
        return actions[position] if position < len(actions) else None

    def missing(self, action: Action) -> list[Action]:
        """What ``action`` needs that is not done."""
        return [need for need in needs(action, self.schedule) if need not in self.done]

    def _can(self, action: Action) -> bool:
        return not self.missing(action) and (not action.is_send or self._leaves(action))

    def _leaves(self, send: Action) -> bool:
        receiver = self.schedule.home[send.peer.stage]
        return self.at(receiver) == send.peer or self._flying[self._way(send, send.peer)] < self.buffers

    def _do(self, rank: int, action: Action) -> None:
        self.position[rank] += 1
        self.done.update(action.parts)
        if action.is_send:
            self._flying[self._way(action, action.peer)] += 1
        elif action.is_message:
            self._flying[self._way(action.peer, action)] -= 1

    def _way(self, send: Action, receive: Action) -> tuple[int, int]:
        return self.schedule.home[send.stage], self.schedule.home[receive.stage]
