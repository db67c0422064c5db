"""A job that is killed at any moment leaves its last good checkpoint, and the next one goes on from it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from hpctrain.checkpoint import shared_file

LOOP = Path(__file__).with_name("checkpoint_loop.py")
RANKS = 4
WAYS = [
    ("direct", "at once"),
    ("direct", "background"),
    pytest.param("mpio", "at once", marks=pytest.mark.skipif(not shared_file.available(), reason="h5py is serial")),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("writer", "way"), WAYS)
def test_a_job_killed_at_any_moment_goes_on_from_its_last_checkpoint(launch, tmp_path: Path, writer: str, way: str):
    moments = random.Random(writer + way)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saved = 0
    for number, victims in enumerate(([0], [3], range(RANKS), [1], range(RANKS))):
        told = tmp_path / f"told.{number}"
        job = launch.start(RANKS, "python", LOOP, folder, writer, told, way)
        resumed, first = _number(job, told, "resumed"), _number(job, told, "saved")
        # What was said to be saved is there; one more may have got its name before the kill, and its line not out.
        assert saved <= resumed <= saved + 1
        assert first == resumed + 1
        time.sleep(moments.uniform(0, 0.5))
        ranks = job.ranks()
        for victim in victims:
            ranks[victim].kill()
        job.wait()
        saved = int(told.read_text().split()[-1])
        assert saved >= first


def _number(job, told: Path, word: str) -> int:
    """The number after the first ``word`` that the job tells."""
    for _ in range(2400):
        words = told.read_text().split() if told.exists() else []
        if word in words[:-1]:
            return int(words[words.index(word) + 1])
        assert job.process.poll() is None, job.stderr
        time.sleep(0.05)
    raise AssertionError(f"{word} did not come: {job.stderr}")
