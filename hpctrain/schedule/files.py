"""Schedules in files: our own text, and CSV as torch.distributed.pipelining reads and writes it.

A CSV has a row for each rank and an action in each cell; an empty cell is a moment at which a rank waits.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from hpctrain.errors import PlanError
from hpctrain.schedule.action import Action, Schedule

# What torch writes besides: actions that it overlaps, as (0F1;3B0)OVERLAP_F_B, and work on weights, as 0UNSHARD.
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_WEIGHTS = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)")


def to_csv(schedule: Schedule) -> str:
    """The schedule as CSV."""
    return "".join(f"{','.join(map(str, actions))}\n" for actions in schedule.ranks)


def from_csv(text: str) -> Schedule:
    """The schedule that a CSV holds.

    Two actions that torch overlaps are read as one after the other. Where it gathers, frees and reduces weights is left
    out: here that is no part of a schedule.
    """
    return Schedule(tuple(tuple(action for cell in row for action in _cell(cell.strip())) for row in _rows(text)))


def _rows(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def _cell(cell: str) -> list[Action]:
    overlapped = _OVERLAPPED.fullmatch(cell)
    words = overlapped[1].split(";") if overlapped else [cell]
    return [Action.parse(word) for word in words if word and not _WEIGHTS.fullmatch(word)]


def read(path: Path) -> Schedule:
    """The schedule of a file: CSV if its name ends so, else our text. PlanError with its name where it is none."""
    try:
        text = path.read_text()
        return from_csv(text) if path.suffix == ".csv" else Schedule.parse(text)
    except PlanError as error:
        raise PlanError(f"{path}: {error.what}", error.why, error.mend) from None
    except (OSError, UnicodeDecodeError) as error:
        why = "a schedule is a line of actions a rank, or a CSV"
        raise PlanError(f"{path} cannot be read: {error}", why, "name a file with such lines") from None
