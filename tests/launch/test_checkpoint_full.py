"""A run whose disk fills: it trains on or stops, as its configuration says, and its last checkpoint stays whole."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.checkpoint import keep
from tests.support.jobs import Launch

CONFIG = """
[run]
dir = "run"
[model]
layers = 1
width = 16
heads = 2
sequence = 16
[data]
text = ["corpus"]
[train]
batch = 8
[checkpoint]
every = 2
[log]
peak_tflops = 0.1
"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB, where the run's checkpoints go."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    place = tmp_path / "run/checkpoints"
    place.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted: {done.stderr}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def newest(folder: Path) -> int:
    return keep.newest(folder, keep.listing(folder))[1].step


@pytest.mark.timeout(400)
def test_a_run_trains_on_over_a_full_disk_until_its_last_save(launch: Launch, small_disk: Path, tmp_path: Path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.txt").write_text("Ranks meet and tokens flow. " * 200)
    (tmp_path / "small.toml").write_text(CONFIG)

    def train(steps: int, on_full: str) -> subprocess.CompletedProcess[str]:
        words = ["--set", f"train.steps={steps}", "--set", f"checkpoint.on_full={on_full}"]
        return launch(0, "python", "-m", "hpctrain", "train", "small.toml", *words)

    assert train(2, "go on").returncode == 0
    left = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize - (1 << 18)))
    done = train(6, "go on")
    assert done.returncode == 1
    assert "step 4 was not saved, and training goes on" in done.stdout + done.stderr
    assert "step 6/6" in done.stdout + done.stderr
    assert "hpctrain: " in done.stderr and "a checkpoint needs" in done.stderr.split("hpctrain: ")[1]
    assert newest(small_disk) == 2
    done = train(6, "stop")
    assert done.returncode == 1 and "step 5/6" not in done.stdout + done.stderr
    (small_disk / "filler").unlink()
    assert train(6, "stop").returncode == 0
    assert newest(small_disk) == 6
