"""For tests of commands: the command line as a user meets it, a queue in memory, and the folder of a run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cli import main
from hpctrain.cluster import queue as finding
from hpctrain.cluster.queue import QueuedJob
from tests.support.queues import NOW, Queued

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``run("status", folder)`` gives the exit code, and what went to the two streams."""

    def start(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpctrain", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capsys.readouterr()

    return start


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Queued]:
    """``queue(job, ...)`` lets these be all jobs of the cluster."""

    def make(*jobs: QueuedJob, **more: Any) -> Queued:
        found = Queued(*jobs, **more)
        monkeypatch.setattr(finding, "find_queue", lambda: found)
        return found

    return make


@pytest.fixture
def no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Slurm."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(finding, "find_spec", lambda name: None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that has made ten steps and saved after the eighth; two seconds later time stands still."""
    monkeypatch.setattr(time, "time", lambda: NOW)
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    lines = [{"step": n, "time": NOW - 12 + n, "loss": 3.0, "tokens_per_second": 4000.0} for n in range(1, 11)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "checkpoints/step-00000008.h5").touch()
    os.utime(folder / "checkpoints/step-00000008.h5", (NOW - 4, NOW - 4))
    return folder
