"""``hpctrain bench memory`` as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

CONFIG = """
[model]
layers = 2
width = 256
heads = 4
sequence = 16
[data]
text = ["corpus"]
tokenizer = "bytes"
[train]
batch = 4
"""


@pytest.fixture
def command(tmp_path: Path) -> list[object]:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/text.txt").write_text("Ranks meet, tokens flow. " * 100)
    (tmp_path / "run.toml").write_text(CONFIG)
    options = ["--ranks", 2, "--turns", 1, "--json", "--launcher", f"{ROOT}/.ci/mpirun {{ranks}}"]
    return ["python", "-m", "hpctrain", "bench", "memory", "run.toml", *options]


def test_every_contestant_is_measured_in_a_launch_of_its_own(launch, command) -> None:
    done = launch(0, *command, "--against", "fsdp2", "--set", "parallel.zero=1")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["name"], row["measure"]) for row in rows] == [
        (name, measure) for name in ("hpctrain", "fsdp2") for measure in ("resident", "shared")
    ]
    ours, theirs = rows[1], rows[3]
    assert ours["plan"] > 10 and theirs["plan"] is None
    assert ours["cost"] > 0.5 * ours["plan"]  # what the plan says is held; memory of two ranks counts half for each
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert all(row["cost"] <= row["cost_of_all"] <= 2 * row["cost"] + 1 for row in rows)  # each is rounded


def test_a_contestant_that_is_not_known_is_refused_before_anything_starts(launch, command) -> None:
    done = launch(0, *command, "--against", "fsdp3")
    assert done.returncode == 2
    assert "--against fsdp3: not a known peer" in done.stderr


def test_a_launch_that_fails_is_told_with_the_end_of_what_it_said(launch, command) -> None:
    done = launch(0, *command, "--against", "", "--launcher", "false {ranks}")
    assert done.returncode == 2
    assert "ended with 1" in done.stderr


def test_a_contestant_that_fails_takes_no_figures_of_the_others_away(launch, command, tmp_path: Path) -> None:
    (tmp_path / "launcher").write_text(f'case "$*" in *fsdp2*) exit 3;; esac\nexec {ROOT}/.ci/mpirun "$@"\n')
    done = launch(0, *command, "--against", "fsdp2", "--launcher", f"sh {tmp_path}/launcher {{ranks}}")
    assert done.returncode == 2
    assert {row["name"] for row in json.loads(done.stdout)} == {"hpctrain"}
    assert "fsdp2" in done.stderr and "ended with 3" in done.stderr
