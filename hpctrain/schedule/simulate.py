"""When each action of a schedule is done, and how much a rank holds at most: arithmetic, without a clock.

Messages fly beside the computing. A send takes none of its rank's time, and nothing waits for what a message brings but
what needs it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import inf

from hpctrain.errors import PlanError
from hpctrain.schedule.action import Action, Schedule
from hpctrain.schedule.check import check
from hpctrain.schedule.walk import needs

Cost = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """What each op takes, in any unit of time: one number for all stages, or one for each. B takes I and W together."""

    forward: Cost = 1.0
    input: Cost = 1.0
    """The gradient of the input, I."""
    weight: Cost = 1.0
    """The gradient of the weights, W."""
    message: Cost = 0.0
    """From the end of an action to where another rank can use it; by the stage that sends."""

    def of(self, action: Action) -> float:
        """What the action takes of its rank's time: nothing for a message."""
        named = {"F": self.forward, "I": self.input, "W": self.weight}
        return sum(_at(named[part.op], part.stage) for part in action.parts if part.op in named)

    def fit(self, stages: int) -> Costs:
        """These costs, if they are costs of that many stages; PlanError if not."""
        for name, cost in ((one.name, getattr(self, one.name)) for one in fields(self)):
            if isinstance(cost, tuple) and len(cost) != stages:
                what = f"{len(cost)} costs for {name}, and {stages} stages"
                raise PlanError(what, "a table has one entry a stage", "give one number for all, or one each")
            if not all(0 <= one < inf for one in (cost if isinstance(cost, tuple) else (cost,))):
                why = "an action ends after it begins, and some time"
                raise PlanError(f"a cost of {cost} for {name}", why, "take numbers from 0 on")
        return self


UNIT = Costs()


def _at(table: float | Sequence[float], stage: int) -> float:
    return table[stage] if isinstance(table, Sequence) else table


@dataclass(frozen=True)
class Timeline:
    """A schedule with the time at which each action begins and ends, and what follows from that."""

    schedule: Schedule
    times: tuple[tuple[tuple[float, float], ...], ...] = field(repr=False)
    """For each rank the begin and end of each of its actions."""

    def ends(self) -> Iterator[tuple[float, int, Action]]:
        """The end, rank and action of all actions, rank after rank."""
        for rank, (actions, times) in enumerate(zip(self.schedule.ranks, self.times, strict=True)):
            yield from ((end, rank, action) for action, (_, end) in zip(actions, times, strict=True))

    @cached_property
    def makespan(self) -> float:
        """From the first begin to the last end, over all ranks."""
        return max(end for times in self.times for _, end in times)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(end - begin for begin, end in times) for times in self._computed)

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """How long it is from the first to the last thing that each rank computes.

        The longest of them is what a step takes where steps follow each other without all ranks meeting in between.
        """
        return tuple(times[-1][1] - times[0][0] if times else 0.0 for times in self._computed)

    @cached_property
    def bubble(self) -> float:
        """The part of all ranks' time that is spent waiting, from 0 to 1."""
        return 1 - sum(self.work) / (len(self.work) * self.makespan) if self.makespan else 0.0

    @cached_property
    def _computed(self) -> list[list[tuple[float, float]]]:
        both = zip(self.schedule.ranks, self.times, strict=True)
        return [[time for action, time in zip(*one, strict=True) if not action.is_message] for one in both]


def simulate(schedule: Schedule, costs: Costs = UNIT) -> Timeline:
    """When each action begins and ends, if each rank does the next one as soon as it can.

    PlanError as from ``check``, which it asks first.
    """
    costs.fit(schedule.stages)
    clocks = [0.0] * len(schedule.ranks)
    ends: dict[Action, float] = {}
    times: list[list[tuple[float, float]]] = [[] for _ in schedule.ranks]
    for rank, action in check(schedule):
        arrivals = [ends[need] + _flight(need, rank, schedule, costs) for need in needs(action, schedule)]
        begin = max(arrivals if action.is_message else [clocks[rank], *arrivals])
        end = begin + costs.of(action)
        times[rank].append((begin, end))
        ends.update(dict.fromkeys(action.parts, end))
        if not action.is_message:
            clocks[rank] = end
    return Timeline(schedule, tuple(map(tuple, times)))


def _flight(need: Action, rank: int, schedule: Schedule, costs: Costs) -> float:
    """How long something is under way to a rank that needs it."""
    return 0.0 if schedule.home[need.stage] == rank else _at(costs.message, need.stage)


def peaks(schedule: Schedule, sizes: float | Sequence[float] = 1.0) -> tuple[float, ...]:
    """The most that each rank holds at once, by the order of its actions alone.

    A forward keeps ``sizes`` of its stage (a number for all or one for each, in any unit: 1 counts activations, bytes
    give bytes) until the W of its micro-batch, or the B, is done.
    """
    found = []
    for actions in schedule.ranks:
        held = [0.0]
        for action in actions:
            kept = (action.op == "F") - (action.op in ("B", "W"))
            held.append(held[-1] + kept * _at(sizes, action.stage))
        found.append(max(held))
    return tuple(found)
