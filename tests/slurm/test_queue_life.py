"""A run that lives in the queue: interrupted in every way that a cluster knows, it ends as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.slurm.conftest import LAB, Batch, Cluster
from tests.support.jobs import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("lab")]

PAGE = ROOT / "docs/explanation/a-life-in-the-queue.md"
STEPS = 40
SMALL = (
    "data.text=['text']", "data.tokenizer=bytes", "model.layers=1", "model.width=32", "model.sequence=32",
    "train.batch=64", "train.microbatch=1", "train.validate_every=0", "checkpoint.every=5", "log.peak_tflops=0.1",
    "run.margin_seconds=1", f"train.steps={STEPS}",
)  # fmt: skip


def command(*overrides: str) -> str:
    """A small run in the folder where it is started, as a shell has it."""
    sets = " ".join(f"--set {shlex.quote(override)}" for override in (*SMALL, *overrides))
    return f"python -m hpctrain train {ROOT}/configs/tiny.toml {sets}"


def script(*overrides: str, more: str = "") -> str:
    """The batch script of the page, with such a run."""
    text = re.search(r"^```sh requeue\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    for old, new in (
        ("--mpi=pmix", "--mpi=pmi2"),
        ('hpctrain train "$config"', f"{command(*overrides)} {more}"),
        ("runs/llama ", "runs/tiny "),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def write_text(folder: Path) -> None:
    (folder / "text").mkdir()
    for number in range(8):
        text = f"print({number}, 'ranks meet, tokens flow, a loss comes down')\n"
        (folder / f"text/{number}.py").write_text(text * 99)


def logged(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of each whole line of a run's log."""
    path = folder / "runs/tiny/log.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


# ---- one life after another


@dataclass(frozen=True)
class Running:
    """A job in its first life."""

    cluster: Cluster
    id: int

    @property
    def folder(self) -> Path:
        return self.cluster.folder

    @property
    def stepped(self) -> bool:
        return bool(logged(self.folder))

    def ask(self, *words: str) -> str:
        return self.cluster.ask(*words)


def nothing(job: Running) -> None:
    """It ends by itself."""


def limit_is_moved(job: Running) -> None:
    job.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=2")


def signal_to_its_tasks(job: Running) -> None:
    job.ask("scancel", "--signal=USR1", str(job.id))


def signal_to_its_script(job: Running) -> None:
    job.ask("scancel", "--batch", "--signal=USR2", str(job.id))


def requeue(job: Running) -> None:
    job.ask("scontrol", "requeue", str(job.id))


def urgent_job(job: Running) -> None:
    job.cluster.sbatch("true", "--exclusive", "--partition=urgent", "--nodelist=node2", "--output=/dev/null")


def node_is_taken_away(job: Running) -> None:
    job.ask("scontrol", "update", "nodename=node3", "state=down", "reason=test")


def node_loses_its_power(job: Running) -> None:
    psutil.Process(int((job.cluster.conf.parent / "run/node2.machine").read_text())).kill()


def cancel(job: Running) -> None:
    job.ask("scancel", str(job.id))


def stop_file(job: Running) -> None:
    (job.folder / "runs/tiny/stop").touch()


@dataclass(frozen=True)
class Kind:
    """How a job's first life ends, where it runs, and what it says when it stops, if it surely has the time to."""

    interrupt: Callable[[Running], None]
    options: tuple[str, ...]
    says: str = ""
    more: str = ""
    quick: bool = False
    """Whether it is in the lab that notices soon what is lost."""


TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
# Of the two minutes that it is given in its first life.
SHORT = "--set run.ask_seconds=0.2 --set run.margin_seconds=$([ ${SLURM_RESTART_COUNT:-0} = 0 ] && echo 118 || echo 1)"


def on(nodes: str) -> tuple[str, ...]:
    return ("--nodes=1", "--ntasks-per-node=2", f"--nodelist={nodes}")


UNBROKEN = {"nothing": Kind(nothing, on("node1"))}
GOES_ON = {
    "the end of its time": Kind(
        limit_is_moved, ("--time=60", *TWO_NODES, "--nodelist=node[1,4]"), "the job's time ends in", SHORT
    ),
    "a signal to its tasks": Kind(signal_to_its_tasks, on("node4"), "signal USR1 at rank"),
    "a signal to its script": Kind(signal_to_its_script, on("node4"), "signal USR1 at rank"),
    "a requeue": Kind(requeue, on("node1")),
    "a more urgent job": Kind(urgent_job, on("node2"), "signal TERM at rank"),
    "a node that is taken away": Kind(node_is_taken_away, ("--nodes=1", "--ntasks-per-node=2", "--exclude=node[1-2]")),
    "a node that loses its power": Kind(node_loses_its_power, (*TWO_NODES, "--exclude=node4"), quick=True),
}
ENDS = {
    "a person who cancels it": Kind(cancel, on("node4"), quick=True),
    "its stop file": Kind(stop_file, on("node4"), "the file runs/tiny/stop", quick=True),
}
KINDS = UNBROKEN | GOES_ON | ENDS


@pytest.fixture(scope="module")
def quick_lab() -> Iterator[Path]:
    """A cluster of its own, which notices soon that a node is gone."""
    said = subprocess.run([LAB / "up"], capture_output=True, text=True, timeout=60, check=True).stdout
    conf = Path(said.split("SLURM_CONF='")[1].split("'")[0])
    conf.write_text(re.sub("SlurmdTimeout=.*", "SlurmdTimeout=5", conf.read_text()))
    subprocess.run(["scontrol", "reconfigure"], env={**os.environ, "SLURM_CONF": str(conf)}, timeout=30, check=True)
    yield conf
    subprocess.run([LAB / "down", conf.parent], timeout=60, check=True)


@pytest.fixture(scope="module")
def lives(lab: Path, quick_lab: Path, tmp_path_factory) -> dict[str, tuple[Batch, Path]]:
    """Jobs side by side, each interrupted after a step; the end of each, and its folder."""
    jobs = {name: start(kind, quick_lab if kind.quick else lab, tmp_path_factory) for name, kind in KINDS.items()}
    waiting, limit = dict(KINDS), time.monotonic() + 200
    while waiting:
        for name in [name for name in waiting if jobs[name].stepped]:
            waiting.pop(name).interrupt(jobs[name])
        assert time.monotonic() < limit, {name: jobs[name].cluster.output(jobs[name].id) for name in waiting}
        time.sleep(0.02)
    ends = {name: (job.cluster.wait_for(job.id, timeout=120), job.folder) for name, job in jobs.items()}
    jobs["nothing"].ask("scontrol", "update", "nodename=node3", "state=resume")
    return ends


def start(kind: Kind, lab: Path, folders: pytest.TempPathFactory) -> Running:
    cluster = Cluster(lab, folders.mktemp("life"))
    write_text(cluster.folder)
    return Running(cluster, cluster.sbatch(script(more=kind.more), "--output=slurm-%j.out", *kind.options))


@pytest.mark.parametrize("name", GOES_ON)
def test_a_job_goes_on_after(name: str, lives) -> None:
    batch, folder = lives[name]
    assert (batch.state, batch.exit_code) == ("COMPLETED", 0), batch.output
    assert GOES_ON[name].says in batch.output
    assert re.search(rf"life 2 \(restart 1 of job {batch.id}\), (going on from step|from the beginning)", batch.output)
    assert logged(folder) == logged(lives["nothing"][1])
    assert [step for step, _ in logged(folder)] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("name", ENDS)
def test_a_job_does_not_come_back_after(name: str, lives) -> None:
    batch, folder = lives[name]
    assert batch.state in ("CANCELLED", "FAILED") and "life 2" not in batch.output, batch.output
    assert ENDS[name].says in batch.output
    assert 0 < len(logged(folder)) < STEPS
    assert (folder / "runs/tiny/no-requeue").exists() == (name == "its stop file")
