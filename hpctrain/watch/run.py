"""Run: how far a run has come, read from its folder alone. Anybody may look, while it trains and afterwards."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

LOG = "log.jsonl"
TAIL_BYTES = 1 << 17
RECENT = 50  # lines that the pace is taken from
PAUSES = 10.0  # times the usual time between two lines: a start, or a wait in the queue
QUIET_SECONDS = 120.0  # a run that is started loads its data and its checkpoint before it says anything

STEP_FILE = re.compile(r"step-(\d{8,})\.h5")
_LINE = re.compile(r"^step (\d+)/(\d+)\b", re.MULTILINE)


@dataclass(frozen=True)
class Progress:
    """The newest line of a run's log, and its pace. None where the log does not tell."""

    step: int
    """Finished steps."""
    logged_at: float
    """When the line was written, in UNIX seconds."""
    loss: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    """What a step took lately, with saves and validation, without the time between two starts."""
    seconds_per_line: float | None

    def moves(self, now: float) -> bool:
        """Whether the log goes on: its newest line is no older than ten usual times between two lines."""
        return now - self.logged_at <= max(PAUSES * (self.seconds_per_line or 0.0), QUIET_SECONDS)

    def left_seconds(self, steps: int) -> float | None:
        """How long the steps that are left of ``steps`` take at this pace."""
        return None if self.seconds_per_step is None else max(steps - self.step, 0) * self.seconds_per_step


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint of a run. A file has its name only when it is whole."""

    path: Path
    step: int
    saved_at: float


def progress(folder: Path) -> Progress | None:
    """How far the run in ``folder`` has come; None before its first line."""
    lines = [line for line in map(_line, _tail(folder / LOG).splitlines()) if line]
    if not lines:
        return None
    last = lines[-1]
    per_line, per_step = pace([(line["step"], line["time"]) for line in lines[-RECENT:]])
    return Progress(
        step=last["step"],
        logged_at=last["time"],
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        seconds_per_step=last.get("seconds") if per_step is None else per_step,
        seconds_per_line=last.get("seconds") if per_line is None else per_line,
    )


def pace(lines: Sequence[tuple[int, float]]) -> tuple[float | None, float | None]:
    """Seconds for each line and each step, of lines' steps and times, without pauses; None where one cannot tell."""
    gaps = [(late[1] - early[1], late[0] - early[0]) for early, late in pairwise(lines) if late[0] > early[0]]
    if not gaps:
        return None, None
    usual = median(seconds for seconds, _ in gaps)
    kept = [gap for gap in gaps if gap[0] <= PAUSES * usual] or gaps
    spent = sum(seconds for seconds, _ in kept)
    return usual, spent / sum(steps for _, steps in kept)


def newest_checkpoint(folder: Path) -> Saved | None:
    """The newest checkpoint of the run in ``folder``; those on nodes' own disks are not seen from here."""
    place = folder / "checkpoints"
    names = [path for path in place.iterdir() if STEP_FILE.fullmatch(path.name)] if place.is_dir() else []
    found = [(int(STEP_FILE.fullmatch(path.name)[1]), path) for path in names]
    for step, path in sorted(found, reverse=True):
        try:
            return Saved(path, step, path.stat().st_mtime)
        except FileNotFoundError:  # pruned meanwhile
            continue
    return None


def steps_of(output: Path) -> int | None:
    """How many steps the run is to make, by the newest line that it wrote into ``output``; None where it wrote none."""
    found = _LINE.findall(_tail(output))
    return int(found[-1][1]) if found else None


def age(at: float, now: float | None = None) -> float:
    """Seconds since a time; never less than none, since clocks of nodes differ."""
    return max((time.time() if now is None else now) - at, 0.0)


def _tail(path: Path) -> str:
    """The last of a file's text; empty where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - TAIL_BYTES, 0))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _line(text: str) -> dict[str, Any] | None:
    """A line of the log; None for one that was cut off."""
    try:
        line = json.loads(text)
        return line if isinstance(line["step"], int) and isinstance(line["time"], int | float) else None
    except (ValueError, KeyError, TypeError):
        return None
