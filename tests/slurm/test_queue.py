"""The queue of a real cluster, through each of the ways that lead to it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpctrain.cluster import slurm_text
from hpctrain.cluster.advice import Advice
from hpctrain.cluster.queue import Queue, find_queue
from hpctrain.cluster.slurm_commands import CommandQueue
from hpctrain.cluster.slurm_library import LibraryQueue, misfit
from tests.contract.queue import SLEEP, QueueContract

pytestmark = pytest.mark.slurm


@pytest.fixture
def folder(cluster, lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's folder, with the cluster as the one that this process belongs to; jobs in it end with the test."""
    for name in ("SLURM_CONF", "SLURM_TIME_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_CONF", str(lab))
    return tmp_path


@pytest.fixture
def told() -> list[Advice]:
    """The warnings that a queue gave."""
    return []


class TestCommands(QueueContract):
    @pytest.fixture
    def queue(self, folder: Path, told: list[Advice]) -> Iterator[Queue]:
        yield CommandQueue(told.append)
        assert told == []  # the release of this cluster is a known one

    def test_the_text_tells_the_same_jobs_as_the_json(self, queue: CommandQueue, folder: Path) -> None:
        """Up to where the output goes and to longer words for a reason, which the text alone has."""
        self.until(queue, queue.submit(SLEEP, folder), lambda job: job.state == "RUNNING")
        queue.submit(SLEEP, folder, ["--hold", "--array=2-9%3", "--job-name=a b=c"])
        shown = subprocess.run(
            ["scontrol", "-o", "show", "job"], capture_output=True, text=True, check=True, timeout=30
        ).stdout
        plain = [vars(job) | {"output": None, "reason": None} for job in queue.jobs()]
        assert [vars(job) | {"output": None, "reason": None} for job in slurm_text.jobs(shown)] == plain


class TestLibrary(QueueContract):
    @pytest.fixture
    def queue(self, folder: Path, told: list[Advice]) -> Iterator[Queue]:
        if find_spec("pyslurm") is None:
            pytest.skip("pyslurm is not installed")
        if fault := misfit():
            pytest.skip(str(fault))
        yield LibraryQueue(told.append)
        assert told == []


def test_the_queue_is_found_where_slurm_is(folder: Path) -> None:
    assert len(find_queue().nodes()) == 4
