"""The kinds of schedules, by name: what each rank of a pipeline does, as pure functions of its shape.

GPipe, 1F1B and interleaved 1F1B are one thing, ``alternate``, with other warm-ups. The first two zero-bubble schedules
are 1F1B whose weight gradients come later. The two schedules that are folded to a V are tables of phases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import zip_longest

from hpctrain.errors import PlanError
from hpctrain.schedule.action import Action, Schedule

Line = list[Action]


@dataclass(frozen=True)
class Shape:
    """How large a pipeline is: ``chunks`` stages on each rank, ``group`` micro-batches through one of them in a row."""

    ranks: int
    microbatches: int
    chunks: int = 1
    group: int = 1

    @property
    def stages(self) -> int:
        """Stages of all ranks."""
        return self.ranks * self.chunks


# ---- one forward, one backward


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> Line:
    """``warmup`` forwards, then a forward and a backward in turn, then the backwards that are left."""
    pairs = zip_longest(forwards[warmup:], backwards)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair if action)]


def defer(actions: Iterable[Action], delay: int) -> Line:
    """After each I the W of the I that is ``delay`` before it; at the end the W that are left."""
    line: Line = []
    waiting: Line = []
    for action in actions:
        line.append(action)
        if action.op == "I":
            waiting.append(Action(action.stage, "W", action.microbatch))
            line += [waiting.pop(0)] if len(waiting) > delay else []
    return line + waiting


def _each(stage: int, op: str, microbatches: Iterable[int]) -> Line:
    return [Action(stage, op, microbatch) for microbatch in microbatches]


def gpipe(shape: Shape, rank: int) -> Line:
    """All forwards, then all backwards (Huang 2019)."""
    every = range(shape.microbatches)
    return alternate(_each(rank, "F", every), _each(rank, "B", every), warmup=shape.microbatches)


def one_f_one_b(shape: Shape, rank: int) -> Line:
    """A backward as soon as there can be one (PipeDream-Flush: Narayanan 2021, section 2.2.1)."""
    every = range(shape.microbatches)
    return alternate(_each(rank, "F", every), _each(rank, "B", every), warmup=shape.ranks - 1 - rank)


def zb_h1(shape: Shape, rank: int) -> Line:
    """1F1B; late ranks put weight gradients off until all ranks hold as much as the first (Qi 2023, section 2.1)."""
    every = range(shape.microbatches)
    return defer(alternate(_each(rank, "F", every), _each(rank, "I", every), shape.ranks - 1 - rank), delay=rank)


def zb_h2(shape: Shape, rank: int) -> Line:
    """Twice the warm-up and twice the delay: no bubble, for twice the activations (Qi 2023, section 2.2)."""
    every = range(shape.microbatches)
    warmup = 2 * (shape.ranks - 1 - rank)
    return defer(alternate(_each(rank, "F", every), _each(rank, "I", every), warmup), delay=2 * rank)


# ---- several chunks a rank, looped: stage s on rank s mod ranks


def groups(shape: Shape) -> list[range]:
    """Micro-batches in even groups of at most ``group``; or of more, where a group would be less than the ranks.

    A group of less than the ranks would come back to the first rank before all of it is through: ranks would wait for
    each other, for ever where its neighbours are small too.
    """
    count = max(1, min(-(-shape.microbatches // shape.group), shape.microbatches // shape.ranks))
    least, larger = divmod(shape.microbatches, count)
    starts = [index * least + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def interleaved(shape: Shape, rank: int) -> Line:
    """1F1B over chunks, a group of micro-batches through one chunk after the other (Narayanan 2021, section 2.2.2)."""
    parts, own = groups(shape), range(rank, shape.stages, shape.ranks)
    forwards = [Action(stage, "F", m) for part in parts for stage in own for m in part]
    backwards = [Action(stage, "B", m) for part in parts for stage in reversed(own) for m in part]
    # Two ahead of the next rank, where one would do if messages took no time: while one flies there is work left.
    return alternate(forwards, backwards, 2 * (shape.ranks - 1 - rank) + (shape.chunks - 1) * len(parts[0]))


def looped_bfs(shape: Shape, rank: int) -> Line:
    """All forwards, chunk by chunk, then all backwards, the last made first (Lamy-Poirier 2022)."""
    every, own = range(shape.microbatches), range(rank, shape.stages, shape.ranks)
    forwards = [action for stage in own for action in _each(stage, "F", every)]
    backwards = [action for stage in reversed(own) for action in _each(stage, "B", reversed(every))]
    return alternate(forwards, backwards, warmup=len(forwards))


# ---- two chunks a rank, folded: down through the first, and back up through the second

Phases = list[tuple[int, str]]


def phased(phases: Phases, chunks: tuple[int, int]) -> Line:
    """The words of each phase, as many times as it says; ``chunks`` are the rank's two stages.

    A word is an op and a chunk, and takes the next micro-batch. A W takes the oldest I of its chunk that still waits
    for its W, or the oldest of both where it names no chunk.
    """
    count: Counter[tuple[int, str]] = Counter()
    waiting: Line = []
    line: Line = []
    for word in (word for times, words in phases for word in words.split() * times):
        op, stages = word[0], [chunks[int(chunk)] for chunk in word[1:]] or chunks
        if op == "W":
            line.append(_weight(waiting, stages))
        else:
            way = (stages[0], "forwards" if op == "F" else "backwards")
            line.append(Action(stages[0], op, count[way]))
            count[way] += 1
        if op == "I":
            waiting.append(line[-1])
    return line


def _weight(waiting: Line, stages: Sequence[int]) -> Action:
    """The W of the oldest I that waits and is of one of ``stages``."""
    oldest = next(action for action in waiting if action.stage in stages)
    waiting.remove(oldest)
    return Action(oldest.stage, "W", oldest.microbatch)


def _first(line: Line, microbatches: int) -> Line:
    """The actions on the first micro-batches, where the phases need more: what is left of a good order is one too."""
    return [action for action in line if action.microbatch < microbatches]


def zb_v(shape: Shape, rank: int) -> Line:
    """No bubble where F, I and W cost the same, for the activations of 1F1B (Qi 2023, section 6)."""
    p, r, m = shape.ranks, rank, max(shape.microbatches, 2 * shape.ranks - 1)
    phases = [
        (2 * (p - r) - 1, "F0"),
        (r, "F1 F0"),
        (p - r, "F1 I1 W1"),
        (m - 2 * p + r + 1, "F0 I0 W0 F1 I1 W1"),
        (p - r - 1, "I0 W0 F1 I1 W1"),
        (r, "I0 I1"),
        (p - r, "I0 W0"),
        (r, "W1"),
        (r, "W0"),
    ]
    return _first(phased(phases, (r, 2 * p - 1 - r)), shape.microbatches)


def dualpipe_v(shape: Shape, rank: int) -> Line:
    """Forwards and backwards of the two chunks side by side, so that one can hide the messages of the other.

    DeepSeek-AI 2024, section 3.2.1, cut in half by Qi 2025. Where phases have an F and then a B, a runner may do both
    at once; here they stand one after the other.
    """
    p, r, m = shape.ranks, rank, max(shape.microbatches, 2 * shape.ranks)
    half, odd = divmod(r + 1, 2)
    phases = [
        (2 * (p - r - 1), "F0"),
        (r + 1, "F0 F1"),
        (p - r - 1, "I1 W F1"),
        (m - 2 * p + r + 1, "F0 B1 F1 B0"),
        (p - r - 1, "B1 F1 B0"),
        (half, "B1 B0"),
        (odd, "B1 I0"),
        (half, "I1 I0"),
        (p - r - 1, "W I0"),
        (r + 1, "W"),
    ]
    return _first(phased(phases, (r, 2 * p - 1 - r)), shape.microbatches)


# ---- the table


@dataclass(frozen=True)
class Kind:
    """A kind of schedule: what one rank does, and what shapes it has."""

    line: Callable[[Shape, int], Line]
    chunks: tuple[int, ...] | None = (1,)
    """How many stages a rank can have; None is any number."""
    grouped: bool = False
    """Whether it takes a size of groups."""

    @property
    def usual_chunks(self) -> int:
        """The stages that a rank has where nobody said how many."""
        return self.chunks[0] if self.chunks else 2


SCHEDULES: dict[str, Kind] = {
    "gpipe": Kind(gpipe),
    "1f1b": Kind(one_f_one_b),
    "interleaved": Kind(interleaved, chunks=None, grouped=True),
    "looped-bfs": Kind(looped_bfs, chunks=None),
    "zb-h1": Kind(zb_h1),
    "zb-h2": Kind(zb_h2),
    "zb-v": Kind(zb_v, chunks=(2,)),
    "dualpipe-v": Kind(dualpipe_v, chunks=(2,)),
}


def find(kind: str) -> Kind:
    """The kind of a name; PlanError with the names there are."""
    if kind in SCHEDULES:
        return SCHEDULES[kind]
    near = get_close_matches(kind, SCHEDULES, n=1)
    mend = f"did you mean {near[0]}?" if near else f"take {next(iter(SCHEDULES))}, for one"
    raise PlanError(f"{kind!r} is not a kind of schedule", f"there are {', '.join(SCHEDULES)}", mend)


def make(kind: str, ranks: int, microbatches: int, chunks: int | None = None, group: int | None = None) -> Schedule:
    """The schedule of a name, for any number of ranks and micro-batches; only what is computed, without messages.

    ``chunks`` are the stages of a rank: 2 where the kind can have several, else 1. ``group``, of interleaved schedules,
    is how many micro-batches go through a chunk before the next one has its turn: from as many as there are ranks,
    which is depth first and the default, to all of them, which is breadth first. PlanError for what cannot be.
    """
    found = find(kind)
    chunks = found.usual_chunks if chunks is None else chunks
    shape = Shape(ranks, microbatches, chunks, ranks if group is None else group)
    _check(kind, found, shape, group)
    return Schedule(tuple(tuple(found.line(shape, rank)) for rank in range(ranks)))


def _check(kind: str, found: Kind, shape: Shape, group: int | None) -> None:
    counts = {"ranks": shape.ranks, "micro-batches": shape.microbatches, "chunks a rank": shape.chunks}
    for name, count in counts.items():
        if count < 1:
            raise PlanError(f"a pipeline cannot have {count} {name}", "it has at least one of each", "take 1 or more")
    if found.chunks and shape.chunks not in found.chunks:
        several = ", ".join(name for name, other in SCHEDULES.items() if other.chunks is None)
        what = f"{kind} with {shape.chunks} chunks a rank"
        raise PlanError(what, f"its ranks have {found.chunks[0]}", f"leave chunks out, or take one of {several}")
    if group is not None and not found.grouped:
        grouped = ", ".join(name for name, other in SCHEDULES.items() if other.grouped)
        what = f"{kind} with groups of {group} micro-batches"
        raise PlanError(what, "it has no groups", f"leave group out, or take {grouped}")
    if shape.group < shape.ranks:
        what = f"groups of {group} micro-batches on {shape.ranks} ranks"
        why = "a group of less than the ranks is back at the first rank before all of it is through"
        most = max(shape.ranks, shape.microbatches)
        raise PlanError(what, why, f"take {shape.ranks} (depth first) to {most} (breadth first)")
