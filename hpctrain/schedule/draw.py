"""A schedule as text for a terminal: a line for each rank, time from left to right.

    rank 0  F0 F1 .  .  B0--- .  B1---
    rank 1  .  F0 B0--- F1 B1--- .  .

Also the cells and shades from which ``picture`` makes its files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from hpctrain.schedule.action import Action
from hpctrain.schedule.simulate import Timeline, peaks

COLOURS = {"F": "#7fb0e6", "B": "#8ccf9b", "I": "#8fd9d3", "W": "#f2c46d"}
PALEST = 0.62  # how far the last chunk of a rank goes towards white
COLUMNS = 4000  # however short the shortest action is, a line of text gets no longer
TICK_CELLS = 5


@dataclass(frozen=True)
class Cell:
    """An action in its place: its rank, its time, and which of the rank's chunks of the model it is of."""

    rank: int
    begin: float
    end: float
    action: Action
    chunk: int
    chunks: int

    @property
    def colour(self) -> str:
        """The colour of its op, paler for later chunks, as #rrggbb."""
        paler = PALEST * self.chunk / max(1, self.chunks - 1)
        base = bytes.fromhex(COLOURS[self.action.op][1:])
        return "#" + bytes(round(part + (255 - part) * paler) for part in base).hex()


def cells(timeline: Timeline) -> Iterator[Cell]:
    """Everything that is computed and takes time, rank after rank."""
    schedule = timeline.schedule
    for rank, (actions, times) in enumerate(zip(schedule.ranks, timeline.times, strict=True)):
        own = schedule.own(rank)
        for action, (begin, end) in zip(actions, times, strict=True):
            if end > begin and not action.is_message:
                yield Cell(rank, begin, end, action, own.index(action.stage), len(own))


# ---- text

Column = tuple[str, str]  # a character, and its colour or nothing


def text(timeline: Timeline, width: int = 100, colours: bool = False) -> str:
    """The picture in lines of at most ``width`` columns, in panels one below the other where that is not enough.

    A cell says its op and micro-batch, and its stage too where a rank has several: then it is the action's own text.
    A dot is a moment at which the rank waits. ``colours`` are 24-bit ones.
    """
    rows: list[list[Cell]] = [[] for _ in timeline.schedule.ranks]
    for cell in cells(timeline):
        rows[cell.rank].append(cell)
    wide = 1 + max((len(_name(cell)) for row in rows for cell in row), default=1)
    shortest = min((cell.end - cell.begin for row in rows for cell in row), default=1.0)
    scale = min(wide / shortest, COLUMNS / max(timeline.makespan, shortest))
    heads = [f"rank {rank}" for rank in range(len(rows))]
    margin = len(heads[-1]) + 2
    lines = [_ruler(timeline.makespan, scale, wide), *(_line(row, timeline.makespan, scale, wide) for row in rows)]
    return "\n".join(_panels(["time", *heads], margin, lines, max(1, (width - margin) // wide) * wide, colours))


def _name(cell: Cell) -> str:
    return str(cell.action) if cell.chunks > 1 else f"{cell.action.op}{cell.action.microbatch}"


def _line(row: list[Cell], makespan: float, scale: float, wide: int) -> list[Column]:
    """One rank's columns: dots where it waits, and in each cell its name, drawn out to its length."""
    line = [("." if column % wide == 0 else " ", "") for column in range(_column(makespan, scale))]
    for cell in row:
        start, stop = _column(cell.begin, scale), _column(cell.end, scale)
        drawn = _name(cell).ljust(stop - start - 1, "-")[: max(1, stop - start - 1)].ljust(stop - start)
        line[start:stop] = [(letter, cell.colour) for letter in drawn[: stop - start]]
    return line


def _ruler(makespan: float, scale: float, wide: int) -> list[Column]:
    every = TICK_CELLS * wide
    columns = _column(makespan, scale)
    ticks = (f"{column / scale:.4g}".ljust(every)[:every] for column in range(0, columns, every))
    return [(letter, "") for letter in "".join(ticks)[:columns]]


def _column(time: float, scale: float) -> int:
    """The column of a moment; halves go up and not to even numbers, so that equal times are equally wide."""
    return int(time * scale + 0.5)


def _panels(heads: list[str], margin: int, lines: list[list[Column]], size: int, colours: bool) -> Iterator[str]:
    for start in range(0, len(lines[0]), size):
        drawn = (_render(line[start : start + size], colours) for line in lines)
        yield "".join(f"{head.ljust(margin)}{line}".rstrip() + "\n" for head, line in zip(heads, drawn, strict=True))


def _render(line: list[Column], colours: bool) -> str:
    if not colours:
        return "".join(letter for letter, _ in line)
    runs = ((colour, "".join(letter for letter, _ in run)) for colour, run in groupby(line, key=lambda one: one[1]))
    return "".join(_painted(run, colour) if colour else run for colour, run in runs)


def _painted(run: str, colour: str) -> str:
    red, green, blue = bytes.fromhex(colour[1:])
    return f"\x1b[30;48;2;{red};{green};{blue}m{run}\x1b[0m"


# ---- in numbers


def summary(timeline: Timeline) -> dict[str, Any]:
    """What a schedule costs, in numbers: times as those of the costs, activations of one stage and micro-batch as 1."""
    schedule = timeline.schedule
    return {
        "ranks": len(schedule.ranks),
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "makespan": timeline.makespan,
        "span": max(timeline.spans),
        "work": max(timeline.work),
        "bubble": timeline.bubble,
        "activations": list(peaks(schedule)),
        "messages": 2 * schedule.microbatches * sum(map(schedule.crosses, range(schedule.stages))),
    }


def describe(timeline: Timeline) -> str:
    """The same as lines for a person."""
    now = summary(timeline)
    held = " ".join(f"{most:g}" for most in now["activations"])
    return "\n".join((
        f"pipeline     {now['ranks']} ranks, {now['stages']} stages, {now['microbatches']} micro-batches",
        f"time         {now['makespan']:.6g}; a rank is at it for {now['span']:.6g}, and computes {now['work']:.6g}",
        f"bubble       {now['bubble']:.1%} of all ranks' time",
        f"activations  at most {held}, rank by rank, one for each stage and micro-batch",
        f"messages     {now['messages']} between ranks",
    ))  # fmt: skip
