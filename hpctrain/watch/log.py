"""What a run tells: a JSON line a step in a file, and a bar on a terminal or plain lines in a log.

Only the rank that leads writes; the others hold the same object and it does nothing, so that callers do not ask.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hpctrain.errors import ConfigError
from hpctrain.watch.terminal import columns

SHOWN = {
    "loss": "loss {:.4f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "bubble": "bubble {:.1%}",
    "simulated_bubble": "{:.1%} simulated",
    "validation_loss": "validation {:.4f}",
}


class Log:
    """The record of one run, one across restarts; live, closed by ``with``. ``first`` steps were made before.

    Raises ConfigError, on every rank, when ``board`` is asked for and cannot be had.
    """

    def __init__(self, folder: Path, first: int, steps: int, leads: bool, every: int = 1, board: bool = False) -> None:
        self.leads, self.every, self._steps = leads, every, steps
        self._file: TextIO | None = None
        self._show: Bar | Lines | None = None
        self._board: Board | None = None
        if board and not find_spec("tensorboard"):
            mend = "pip install tensorboard, or set log.tensorboard to false"
            raise ConfigError("log.tensorboard = true, and TensorBoard is not installed", "", mend)
        if leads:
            self._file = _reopened(folder / "log.jsonl", first)
            width = columns()
            self._show = Lines(first, steps) if width is None else Bar(first, steps, width)
            self._board = Board(folder, first) if board else None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        for part in (self._file, self._show, self._board):
            if part is not None:
                part.close()

    def step(self, step: int, values: dict[str, Any]) -> None:
        """Write one step's values; ``step`` counts finished steps, from 1."""
        if self._file is None or (step % self.every and step != self._steps):
            return
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._show.step(step, values)
        if self._board is not None:
            self._board.step(step, values)

    def say(self, text: str) -> None:
        """Tell a person something that is not a step; also when the log is closed, below the bar."""
        if self._show is not None:
            self._show.say(text)


class Bar:
    """A progress bar: step, loss, tokens/s, time left."""

    def __init__(self, first: int, steps: int, width: int) -> None:
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(width // 5), TextColumn("{task.fields[text]}"),
            TextColumn("left"), TimeRemainingColumn(),
            console=Console(stderr=True, force_terminal=True, width=width),  # through mpirun's pipe as well
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=steps, completed=first, text="")
        self._progress.start()

    def step(self, step: int, values: dict[str, Any]) -> None:
        self._progress.update(self._task, completed=step, text=_told(values))

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class Lines:
    """A plain line a step, for a file that a batch job writes."""

    def __init__(self, first: int, steps: int) -> None:
        self._first, self._steps, self._began = first, steps, time.monotonic()

    def step(self, step: int, values: dict[str, Any]) -> None:
        done = max(step - self._first, 1)
        left = (time.monotonic() - self._began) / done * (self._steps - step)
        self.say(f"step {step}/{self._steps}  {_told(values)}  {_clock(left)} left")

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        sys.stderr.flush()


class Board:
    """The same scalars as TensorBoard event files, in the run's folder."""

    def __init__(self, folder: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first + 1)

    def step(self, step: int, values: dict[str, Any]) -> None:
        for name, value in _scalars(values):
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _reopened(path: Path, first: int) -> TextIO:
    """Open a log to write on from step ``first``; later lines go, since their steps will be made again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if _step_of(line) <= first]
    if kept != lines:
        aside = path.with_suffix(".tmp")
        aside.write_text("".join(kept), encoding="utf-8")
        os.replace(aside, path)
    return path.open("a", encoding="utf-8")


def _step_of(line: str) -> float:
    """The step of a line; beyond all steps for one that a killed run did not finish."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found.append((prefix + name, float(value)))
    return found


def _told(values: dict[str, Any]) -> str:
    return "  ".join(form.format(values[name]) for name, form in SHOWN.items() if name in values)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
