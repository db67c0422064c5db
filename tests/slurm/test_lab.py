"""The cluster itself: it has what it was asked to have, stands beside others of its kind, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.slurm.conftest import LAB, UP_SECONDS, follow
from tests.support.jobs import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.usefixtures("lab")]  # where the first can be had, others can

PAGE = ROOT / "docs/how-to/slurm-lab.md"
Up = Callable[..., Path]


@pytest.fixture
def up() -> Iterator[Up]:
    """``up(*options)`` brings another cluster up and gives its folder; what the test leaves up is taken down."""
    folders: list[Path] = []

    def start(*options: str) -> Path:
        done = run(LAB / "up", *options, timeout=UP_SECONDS)
        folders.append(Path(re.search("SLURM_CONF='(.*)/slurm.conf'", done.stdout)[1]))
        return folders[-1]

    yield start
    for folder in folders:
        if folder.exists():
            run(LAB / "down", folder)


def run(*command: object, folder: Path | None = None, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run a command that succeeds, in the cluster of this folder."""
    env = {**os.environ, **({"SLURM_CONF": f"{folder}/slurm.conf"} if folder else {})}
    done = subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def processes(word: str) -> list[str]:
    """The commands of live processes that have this word in their command or their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(word in text for text in (*process.cmdline(), *process.environ().values())):
                found.append(process.name())
        except (psutil.Error, OSError):
            continue
    return found


def test_the_cluster_has_the_nodes_processors_and_gpus_it_was_asked_for(up: Up) -> None:
    folder = up("--nodes", "3", "--cpus", "6", "--gpus", "2")
    nodes = run("sinfo", "-hN", "-p", "debug", "-o", "%N %c %G", folder=folder).stdout.splitlines()
    assert nodes == [f"node{number} 6 gpu:2" for number in (1, 2, 3)]
    tasks = "srun", "-N3", "--ntasks-per-node=2", "--gpus-per-task=1"
    said = run(*tasks, "sh", "-c", "echo $(hostname) $CUDA_VISIBLE_DEVICES", folder=folder).stdout.splitlines()
    assert sorted(said) == [f"node{number} {gpu}" for number in (1, 2, 3) for gpu in (0, 1)]


def test_pairs_of_nodes_share_a_switch(lab: Path) -> None:
    lines = run("scontrol", "show", "topology", folder=lab.parent).stdout.splitlines()
    switches = [re.search(r"SwitchName=(\S+) Level=(\d) .*Nodes=(\S+)", line).groups() for line in lines]
    leaves = [("leaf1", "0", "node1,node2"), ("leaf2", "0", "node3,node4")]
    assert switches == [*leaves, ("spine", "1", "node[1-4]")]


def test_nodes_know_each_other_by_name_and_share_no_memory(lab: Path) -> None:
    # Jobs of before may have left something there, as on any node.
    program = "getent hosts node1 >/dev/null && touch /dev/shm/own-$(hostname) && sleep 1 && cd /dev/shm && ls -d own-*"
    said = run("srun", "-N4", "sh", "-c", program, folder=lab.parent).stdout.split()
    assert sorted(said) == ["own-node1", "own-node2", "own-node3", "own-node4"]


def test_a_cluster_beside_another_leaves_nothing_behind(up: Up, lab: Path) -> None:
    hosts = Path("/etc/hosts").read_bytes()
    folder = up("--nodes", "2")
    assert run("srun", "-N2", "hostname", folder=folder).stdout.split() != []
    batch = ["sbatch", "--output=/dev/null", "--wrap", "setsid sleep 1000 & srun -N2 sleep 1000"]
    run(*batch, "-N2", folder=folder)
    assert processes(str(folder)) != []
    run(LAB / "down", folder=folder)
    assert processes(str(folder)) == []
    assert not folder.exists()
    assert Path("/etc/hosts").read_bytes() == hosts
    assert run("sinfo", "-h", "-o", "%D", folder=lab.parent).stdout.split() == ["4"]


def test_a_machine_that_is_killed_takes_its_jobs_along(up: Up) -> None:
    folder = up("--nodes", "2", "--gpus", "0")
    script = f"touch {folder}/began; exec sleep 1000"
    run("sbatch", "--output=/dev/null", "-w", "node2", "--wrap", script, folder=folder)
    run("timeout", "20", "sh", "-c", f"until [ -e {folder}/began ]; do sleep 0.1; done")
    machine = psutil.Process(int((folder / "run/node2.machine").read_text()))
    job = [process for process in machine.children(recursive=True) if process.name() in ("slurmstepd", "bash", "sleep")]
    assert len(job) >= 2
    machine.kill()
    assert psutil.wait_procs(job, timeout=20)[1] == []


def test_a_folder_with_something_in_it_is_neither_filled_nor_removed(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    for command, why in (("up", "is not empty"), ("down", "holds no lab")):
        done = subprocess.run([LAB / command, tmp_path], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0 and why in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_the_how_to_does_what_it_says(tmp_path: Path) -> None:
    done = follow(PAGE, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "going on from step 10" in done.stderr
    assert "refused" in done.stdout
