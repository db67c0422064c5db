"""Trace: when each action of a step ran, in the form in which schedules are simulated, and as a file for a viewer.

All ranks of a pipeline meet at the step's start and count time from there. An action is recorded from the moment when
what it needs of other ranks is there: waiting is what lies between two actions, so a measured bubble means what a
simulated one does. The file is Chrome's JSON, which https://ui.perfetto.dev and chrome://tracing show.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hpctrain.errors import PlanError
from hpctrain.schedule.action import Action, Schedule
from hpctrain.schedule.simulate import Costs, Timeline, simulate

Times = list[tuple[float, float]]
"""Begin and end of one action after another, in seconds."""

MICROSECONDS = 1e6  # Chrome's unit
_NOTHING = nullcontext()


class Untraced:
    """A recorder that records nothing, of a step that is not traced."""

    def begin(self, meet: Callable[[], None]) -> None:
        """Set the clock to zero where all ranks ``meet``. Collective."""

    def recording(self, action: Action) -> AbstractContextManager[None]:
        """Record when ``action``, which is done inside, begins and ends."""
        return _NOTHING

    def timeline(self, schedule: Schedule, collect: Callable[[Times], Sequence[Any]]) -> Timeline | None:
        """What was recorded on all ranks, whose times ``collect`` brings together; None if nothing. Collective."""
        return None


UNTRACED = Untraced()


class Trace(Untraced):
    """A recorder of one rank's step; live.

    The clock of a GPU is read when all work that was given to it is done, so a traced step is slower there.
    """

    def __init__(self, device: torch.device) -> None:
        self.times: Times = []
        self._zero = 0.0
        waits = device.type == "cuda"
        self._clock = partial(_after, device) if waits else time.perf_counter

    def begin(self, meet: Callable[[], None]) -> None:
        meet()
        self._zero = self._clock()

    @contextmanager
    def recording(self, action: Action) -> Iterator[None]:
        begin = self._clock()
        yield
        self.times.append((begin - self._zero, self._clock() - self._zero))

    def timeline(self, schedule: Schedule, collect: Callable[[Times], Sequence[Any]]) -> Timeline:
        return Timeline(schedule, tuple(tuple(map(tuple, times)) for times in collect(self.times)))


def _after(device: torch.device) -> float:
    torch.cuda.synchronize(device)
    return time.perf_counter()


# ---- what it says


def costs(timeline: Timeline) -> Costs:
    """What F, I and W took on average, for each stage.

    The time of all backwards of a stage is shared out to I and W as those took that were done apart; half and half
    where none were, which makes no difference to a schedule that has neither.
    """
    stages = [_taken(timeline, stage) for stage in range(timeline.schedule.stages)]
    each = timeline.schedule.microbatches
    forward, input, weight = zip(*(_shared(taken, each) for taken in stages), strict=True)
    return Costs(forward, input, weight)


def bubbles(timeline: Timeline) -> dict[str, float]:
    """The measured bubble, and the one that the schedule has at the measured mean costs, messages taking no time."""
    simulated = simulate(timeline.schedule, costs(timeline))
    return {"bubble": timeline.bubble, "simulated_bubble": simulated.bubble}


def _taken(timeline: Timeline, stage: int) -> dict[str, float]:
    """The time of all F, B, I and W of a stage."""
    taken = dict.fromkeys("FBIW", 0.0)
    rank = timeline.schedule.home[stage]
    for action, (begin, end) in zip(timeline.schedule.ranks[rank], timeline.times[rank], strict=True):
        if action.stage == stage and not action.is_message:
            taken[action.op] += end - begin
    return taken


def _shared(taken: dict[str, float], microbatches: int) -> tuple[float, float, float]:
    apart = taken["I"] + taken["W"]
    part = taken["I"] / apart if apart else 0.5
    backward = (taken["B"] + apart) / microbatches
    return taken["F"] / microbatches, part * backward, (1 - part) * backward


# ---- the file


def write(path: Path, timeline: Timeline) -> None:
    """Write a timeline, whose times are in seconds, as a Chrome trace with a row for each rank."""
    both = list(enumerate(zip(timeline.schedule.ranks, timeline.times, strict=True)))
    names = [{"ph": "M", "name": "thread_name", "pid": 0, "tid": n, "args": {"name": f"rank {n}"}} for n, _ in both]
    events = [_event(rank, *one) for rank, (actions, times) in both for one in zip(actions, times, strict=True)]
    path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}), encoding="utf-8")


def read(path: Path) -> Timeline:
    """The timeline of a file that ``write`` made. PlanError with its name where it is none."""
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        ranks: list[list[tuple[Action, tuple[float, float]]]] = [[] for event in events if event["ph"] == "M"]
        for event in events:
            if event["ph"] == "X":
                ranks[event["tid"]].append(_recorded(event))
        pairs = [tuple(zip(*rank, strict=True)) or ((), ()) for rank in ranks]
        return Timeline(Schedule(tuple(actions for actions, _ in pairs)), tuple(times for _, times in pairs))
    except (OSError, ValueError, LookupError, TypeError, PlanError) as error:
        why = "a trace has an event of a rank for each action of a schedule"
        raise PlanError(f"{path} is no trace: {error}", why, "name a file that log.trace made") from None


def _event(rank: int, action: Action, span: tuple[float, float]) -> dict[str, Any]:
    begin, end = span
    return {
        "ph": "X",
        "name": str(action),
        "cat": "message" if action.is_message else action.op,
        "pid": 0,
        "tid": rank,
        "ts": begin * MICROSECONDS,
        "dur": (end - begin) * MICROSECONDS,
        "args": {"stage": action.stage, "microbatch": action.microbatch},
    }


def _recorded(event: dict[str, Any]) -> tuple[Action, tuple[float, float]]:
    begin = event["ts"] / MICROSECONDS
    return Action.parse(event["name"]), (begin, begin + event["dur"] / MICROSECONDS)
