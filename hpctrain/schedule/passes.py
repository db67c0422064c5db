"""Passes over schedules: pure functions from one to another."""

from __future__ import annotations

from collections.abc import Iterator

from hpctrain.schedule.action import Action, Schedule
from hpctrain.schedule.simulate import simulate


def add_messages(schedule: Schedule) -> Schedule:
    """The schedule with every send and receive between ranks written down.

    A send comes right after what it sends was computed. Its receive goes to the end of what the receiver has on its
    list by then, if all ops take the same time: so it never stands behind what needs it.

    Ranks cannot lock up, even where a send waits for its receive: each pair is laid on both lists at one moment of one
    timeline, which all ranks can follow. For the same reason messages between two ranks are received in the order in
    which they are sent. ``check`` proves it for a schedule at hand.
    """
    plain = drop_messages(schedule)
    lines: list[list[Action]] = [[] for _ in plain.ranks]
    for _, rank, action in sorted(simulate(plain).ends(), key=lambda end: end[:2]):
        lines[rank].append(action)
        for send in _sends(action, plain):
            lines[rank].append(send)
            lines[plain.home[send.peer.stage]].append(send.peer)
    return Schedule(tuple(map(tuple, lines)))


def drop_messages(schedule: Schedule) -> Schedule:
    """The schedule with only what is computed."""
    return Schedule(tuple(tuple(action for action in actions if not action.is_message) for actions in schedule.ranks))


def _sends(action: Action, schedule: Schedule) -> Iterator[Action]:
    """What goes to another rank once ``action`` is done."""
    if action.op == "F" and schedule.crosses(action.stage):
        yield Action(action.stage, "SEND_F", action.microbatch)
    if action.op in ("B", "I") and schedule.crosses(action.stage - 1):
        yield Action(action.stage, "SEND_B", action.microbatch)
