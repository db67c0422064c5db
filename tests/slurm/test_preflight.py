"""The check before a start on a real cluster: broken nodes are named, and a run goes on with a spare in their place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import EX_UNAVAILABLE, LAB, UP_SECONDS, Cluster, follow
from tests.slurm.test_train import OVERRIDES
from tests.support.jobs import ROOT

pytestmark = pytest.mark.slurm

TINY = ROOT / "configs/tiny.toml"
# Nodes that share two cores are slow by turns; who is slow is judged in tests/unit.
EQUAL = ("job.slow_compute=0", "job.slow_links=0", "job.slow_disks=0", "job.nodes=3")


@pytest.fixture(scope="module")
def own_lab() -> Iterator[Path]:
    """A cluster whose nodes may be broken."""
    up = subprocess.run([LAB / "up"], capture_output=True, text=True, timeout=UP_SECONDS, check=False)
    if up.returncode == EX_UNAVAILABLE:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stderr
    folder = Path(re.search("SLURM_CONF='(.*)/slurm.conf'", up.stdout)[1])
    yield folder
    subprocess.run([LAB / "down", folder], timeout=60, check=True)


@pytest.fixture
def cluster(own_lab: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Starts jobs in that cluster."""
    cluster = Cluster(own_lab / "slurm.conf", tmp_path)
    yield cluster
    cluster.close()


@contextmanager
def without(lab: Path, node: str, folder: Path) -> Iterator[None]:
    """On one node an empty folder lies over ``folder``, as where the shared file system was not mounted."""
    inside = ["nsenter", "--mount", f"--target={(lab / f'run/{node}.machine').read_text().strip()}"]
    subprocess.run([*inside, "mount", "-t", "tmpfs", "none", folder], check=True, timeout=20)
    yield
    subprocess.run([*inside, "umount", folder], check=True, timeout=20)


def sets(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


CHECK = f"python -m hpctrain preflight {TINY} --mpi=pmi2 --out=nodes {' '.join(sets(*EQUAL))}"


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/tiny/preflight.jsonl").read_text().splitlines()]


def test_of_nodes_that_are_well_the_first_are_chosen(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run("salloc -N4 --ntasks-per-node=2 --gpus-per-node=1", *CHECK.split())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "nodes").read_text() == "node1\nnode2\nnode3\n"
    assert "3 train: node1, node2, node3; spare: node4" in done.stdout
    found = history(tmp_path)[0]
    assert found["findings"] == {} and found["notes"] == []
    assert len(found["links"]) == 6  # all pairs of four
    assert all(figures.keys() >= {"products", "shared"} for figures in found["figures"].values())


def test_a_node_without_the_shared_folder_is_named_and_left_out(cluster: Cluster, own_lab, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with without(own_lab, "node2", tmp_path / "runs"):
        done = cluster.run("salloc -N4", *CHECK.split())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "nodes").read_text() == "node1\nnode3\nnode4\n"
    assert "node2 failed while writing to the run's folder: FileNotFoundError" in done.stdout
    assert ": left out; node4, a spare, takes its place" in done.stdout


def test_a_run_goes_on_without_a_node_that_lost_its_power(cluster: Cluster, own_lab: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/one.py").write_text("print('ranks meet, tokens flow, a loss comes down')\n" * 999)
    small = (*OVERRIDES, "train.batch=6", "train.microbatch=1", "train.steps=3")
    train = " ".join(f'"{word}"' for word in sets(*small))
    script = (
        f"{CHECK}\nsrun --mpi=pmi2 --no-kill --nodes=3 --ntasks=3 --ntasks-per-node=1 --nodelist=./nodes "
        f"python -m hpctrain train {TINY} {train}"
    )
    os.kill(int((own_lab / "run/node3.machine").read_text()), signal.SIGKILL)
    job = cluster.wait_for(cluster.sbatch(script, "-N4", "--ntasks-per-node=1", "--no-kill"), timeout=150)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.output
    assert (tmp_path / "nodes").read_text() == "node1\nnode2\nnode4\n"
    assert re.search(r"node3 did not answer \(.*node node3.*\): left out; node4, a spare, takes its place", job.output)
    assert "3 nodes x 1 rank" in job.output
    assert (tmp_path / "runs/tiny/checkpoints/step-00000003.h5").exists()


@pytest.mark.usefixtures("own_lab")  # where it can be had, another can
def test_the_how_to_does_what_it_says(tmp_path: Path) -> None:
    done = follow(ROOT / "docs/how-to/check-nodes.md", tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert (tmp_path / "nodes").read_text() == "node1\nnode3\nnode4\n"
