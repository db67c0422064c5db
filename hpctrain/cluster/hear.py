"""Start a command, listen to the lines of JSON that its tasks print, and never wait longer than it is worth."""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

PATIENCE = 3.0  # once half of the answers are there, the others get so many times as long
LEAST_SECONDS = 15.0  # and at least so much longer
END_SECONDS = 5.0

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Heard:
    """The lines in the order in which they came, the error stream, and whether some were still to come."""

    lines: list[Line]
    errors: str
    late: bool


def hear(command: Sequence[str], env: Mapping[str, str], part: Callable[[list[Line]], float], limit: float) -> Heard:
    """Run a command until ``part`` of its lines is 1, or it ends, or the time is over; then it is ended.

    ``part`` says how much of what is waited for the lines are.
    """
    lines: list[Line] = []
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            errors="replace",
        )  # fmt: skip
        threading.Thread(target=_read, args=(process.stdout, arrived), daemon=True).start()
        late = _listen(lines, arrived, part, limit)
        _end(process, late)
        errors.seek(0)
        return Heard(lines, errors.read(), late)


def _listen(lines: list[Line], arrived: queue.SimpleQueue[str | None], part: Callable[[list[Line]], float],
            limit: float) -> bool:  # fmt: skip
    """Whether the time was over before all had come."""
    began, end, halved = time.monotonic(), time.monotonic() + limit, False
    while (told := part(lines)) < 1:
        if told >= 0.5 and not halved:
            halved, taken = True, time.monotonic() - began
            end = min(end, time.monotonic() + max(LEAST_SECONDS, PATIENCE * taken))
        try:
            text = arrived.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return True
        if text is None:
            return False
        if line := _parsed(text):
            lines.append(line)
    return False


def _read(stream: IO[str], arrived: queue.SimpleQueue[str | None]) -> None:
    for text in stream:
        arrived.put(text)
    arrived.put(None)


def _parsed(text: str) -> Line | None:
    """A line that a task told; None for anything else that is printed, such as a module's greeting."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and {"node", "check"} <= line.keys() else None


def _end(process: subprocess.Popen[str], late: bool) -> None:
    """End a command that is late; one whose tasks told all gets a moment to end by itself. srun passes TERM on."""
    for end in (process.terminate, process.kill) if late else (lambda: None, process.terminate, process.kill):
        end()
        try:
            process.wait(END_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue
