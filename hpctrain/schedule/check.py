"""Is a schedule whole, and does it come to its end? The first fault is named with its rank and action."""

from __future__ import annotations

from itertools import product

from hpctrain.errors import PlanError
from hpctrain.schedule.action import PEERS, Action, Schedule
from hpctrain.schedule.walk import Walk

ONCE = "each micro-batch goes through each stage once, forwards and backwards"


def check(schedule: Schedule, buffers: int = 0) -> list[tuple[int, Action]]:
    """Every rank and action, in an order in which all can be done; PlanError when there is none.

    A schedule is whole when each micro-batch goes forwards and backwards (as B, or as I and W) once through each stage,
    each stage is on one rank, and, where it says messages, every one that is needed is sent and received once.

    It comes to its end when ranks that do their actions one by one do not wait for each other in a circle. A receive
    waits for its message. A send waits until the receiver stands at the receive, or fewer than ``buffers`` messages are
    under way between the two: 0 is the hardest case. Ranks that post receives early or send in the background wait for
    less, so what passes here passes there. Without messages, an action waits only for what it needs.
    """
    _whole(schedule)
    walk = Walk(schedule, buffers)
    order = list(walk)
    if any(walk.at(rank) for rank in range(len(schedule.ranks))):
        raise _stuck(walk)
    return order


# ---- whole


def _whole(schedule: Schedule) -> None:
    if not schedule.stages:
        raise PlanError("no rank of the schedule does anything", ONCE, "give at least 0F0 0B0")
    _at_home(schedule)
    ops = [_ops(stage, schedule) for stage in range(schedule.stages)]
    found = _once(schedule, ops)
    for microbatch, stage in product(range(schedule.microbatches), range(schedule.stages)):
        lacking = [op for op in ops[stage] if Action(stage, op, microbatch) not in found]
        if lacking:
            raise _lacks(schedule, stage, lacking, microbatch)


def _at_home(schedule: Schedule) -> None:
    for rank, action in schedule:
        home = schedule.home[action.stage]
        if home != rank:
            why = f"stage {action.stage} is on rank {home}, and a rank has only its own stages"
            raise PlanError(f"rank {rank} does {action}", why, "give each stage to one rank")


def _once(schedule: Schedule, ops: list[list[str]]) -> set[Action]:
    """Everything that is done; PlanError for what is done twice, or for nobody."""
    found: set[Action] = set()
    for rank, action in schedule:
        if action.is_message and action.op not in ops[action.stage]:
            why = "messages go between neighbouring stages that are on different ranks"
            raise PlanError(f"rank {rank} does {action}, which nobody needs", why, "leave it out")
        if not found.isdisjoint(action.parts):
            raise PlanError(f"rank {rank} does {action} after it was done", ONCE, "leave one of them out")
        found.update(action.parts)
    return found


def _ops(stage: int, schedule: Schedule) -> list[str]:
    """What a stage does with each micro-batch."""
    before, after = schedule.crosses(stage - 1), schedule.crosses(stage)
    here = {"RECV_F": before, "SEND_B": before, "SEND_F": after, "RECV_B": after}
    return ["F", "I", "W", *(op for op in PEERS if schedule.has_messages and here[op])]


def _lacks(schedule: Schedule, stage: int, lacking: list[str], microbatch: int) -> PlanError:
    if stage not in schedule.home:
        return PlanError(f"no rank has stage {stage} of {schedule.stages}", ONCE, "number stages from 0, without gaps")
    op = "B" if lacking[:2] == ["I", "W"] else lacking[0]
    action = Action(stage, op, microbatch)
    return PlanError(f"rank {schedule.home[stage]} never does {action}", ONCE, f"add {action}")


# ---- to its end


def _stuck(walk: Walk) -> PlanError:
    """The error for a rank of the circle in which they wait."""
    rank = next(rank for rank in range(len(walk.position)) if walk.at(rank))
    seen = set()
    while rank not in seen:
        seen.add(rank)
        rank = _blocker(walk, rank)
    action, blocker = walk.at(rank), _blocker(walk, rank)
    assert action is not None
    what = f"rank {rank} waits for ever at {action}"
    if not walk.missing(action):
        why = f"rank {blocker} is not there to receive it: it waits at {walk.at(blocker)}"
        return PlanError(what, why, "change the order, or let more messages be under way")
    need = walk.missing(action)[0]
    where = "it does later" if blocker == rank else f"rank {blocker} has yet to do: it waits at {walk.at(blocker)}"
    return PlanError(what, f"it needs {need}, which {where}", f"put {need} first")


def _blocker(walk: Walk, rank: int) -> int:
    """The rank for which a rank waits, perhaps itself."""
    action = walk.at(rank)
    assert action is not None
    need = next(iter(walk.missing(action)), action.peer if action.is_send else action)
    return walk.schedule.home[need.stage]
