"""The record of a run: each step once in log.jsonl, and what a person sees."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpctrain.errors import ConfigError
from hpctrain.watch.log import Log

ROOT = Path(__file__).resolve().parents[2]


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]


def write(folder: Path, first: int, last: int, total: int = 10, **settings: object) -> None:
    """Log steps ``first`` + 1 to ``last``."""
    with Log(folder, first, total, leads=True, **settings) as log:
        for step in range(first + 1, last + 1):
            log.step(step, {"loss": 1 / step})


def test_a_line_is_json_with_the_step_the_time_and_the_values(tmp_path: Path) -> None:
    with Log(tmp_path / "run", 0, 10, leads=True) as log:
        log.step(1, {"loss": 2.5, "phases": {"data": 0.1}})
        (line,) = (tmp_path / "run/log.jsonl").read_text().splitlines()  # there before the log is closed
    value = json.loads(line)
    assert value.pop("time") > 1.6e9
    assert value == {"step": 1, "loss": 2.5, "phases": {"data": 0.1}}


def test_only_the_rank_that_leads_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(tmp_path / "run", 0, 10, leads=False) as log:
        log.step(1, {"loss": 2.5})
        log.say("hello")
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr() == ("", "")


def test_steps_between_two_lines_are_left_out_but_never_the_last(tmp_path: Path) -> None:
    write(tmp_path, 0, 10, total=10, every=4)
    assert steps(tmp_path) == [4, 8, 10]


def test_a_run_that_goes_on_adds_to_its_log(tmp_path: Path) -> None:
    write(tmp_path, 0, 3)
    before = (tmp_path / "log.jsonl").read_bytes()
    write(tmp_path, 3, 5)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "log.jsonl").read_bytes().startswith(before)


def test_steps_that_a_killed_run_makes_again_are_there_once(tmp_path: Path) -> None:
    write(tmp_path, 0, 6)
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    write(tmp_path, 4, 7)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 7]
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_a_log_file_gets_plain_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Log(tmp_path, 2, 4, leads=True) as log:
        log.say("going on")
        log.step(3, {"loss": 1.23456, "norm": 9.0, "tokens_per_second": 12345.6})
        log.step(4, {"loss": 1.0, "tokens_per_second": 1.0, "validation_loss": 2.0})
    out, err = capsys.readouterr()
    assert out == ""
    going, third, fourth = err.splitlines()
    assert going == "going on"
    assert third.startswith("step 3/4  loss 1.2346  12,346 tokens/s  ") and third.endswith(" left")
    assert fourth == "step 4/4  loss 1.0000  1 tokens/s  validation 2.0000  0:00:00 left"


def everything(terminal: int) -> str:
    """What was written to a terminal that all writers have closed."""
    found = b""
    with suppress(OSError):  # its way to say that there is no more
        while part := os.read(terminal, 4096):
            found += part
    os.close(terminal)
    return found.decode()


def test_a_terminal_gets_a_bar_with_step_loss_speed_and_time_left(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from hpctrain.watch.log import Log
with Log(Path({str(tmp_path)!r}), 0, 2, leads=True) as log:
    log.say("made [something]")
    for step in (1, 2):
        log.step(step, {{"loss": 2.5, "tokens_per_second": 1234.5}})
"""
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stderr=theirs, stdout=subprocess.PIPE)
    os.close(theirs)
    shown = everything(ours)
    assert (done.returncode, done.stdout) == (0, b"")
    assert "made [something]" in shown and "step 2/2" not in shown  # colours stand between the words
    for part in ("2/2", "loss 2.5000", "1,234 tokens/s", "left", "━"):
        assert part in shown


@pytest.mark.skipif(find_spec("tensorboard") is not None, reason="tensorboard is installed")
@pytest.mark.parametrize("leads", [True, False])
def test_a_missing_tensorboard_is_told_on_every_rank(tmp_path: Path, leads: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        Log(tmp_path, 0, 2, leads, board=True)
    assert str(caught.value).split("\n  ") == [
        "log.tensorboard = true, and TensorBoard is not installed",
        "pip install tensorboard, or set log.tensorboard to false",
    ]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_scalars_go_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Log(tmp_path, 0, 2, leads=True, board=True) as log:
        for step in (1, 2):
            log.step(step, {"loss": step / 2, "phases": {"data": 0.25}})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.5), (2, 1.0)]
    assert events.Scalars("phases/data")[0].value == 0.25
