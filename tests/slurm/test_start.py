"""Ranks that Slurm starts find each other, or refuse to work alone."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import ROOT

pytestmark = pytest.mark.slurm

HEAD = """
import json, os, pathlib, socket, sys, time
from hpctrain.cluster.world import World
from hpctrain.config import CommConfig
join = lambda: World.join(CommConfig(start_seconds=60, timeout_seconds=60))
"""
WHO = """
with join() as world:
    me = dict(rank=world.rank, size=world.size, host=world.host, node=world.node, local_rank=world.local_rank,
        local_size=world.local_size, launcher=world.launcher, hosts=world.topology.hosts,
        levels={level.name: level.domains for level in world.topology.levels},
        sum=sum(world.comm.allgather(world.rank)) if world.comm else 0, own=socket.gethostname(),
        facts={fact.name: [fact.value, fact.source] for fact in world.facts}, slurm=os.environ.get("SLURM_PROCID"))
    pathlib.Path(f"rank-{world.rank}.json").write_text(json.dumps(me))
"""
BOTH = pytest.mark.parametrize("venv", ["mpich", "main"])


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """``script(body)`` is a file with a program of this body, which may call ``join()``."""

    def write(body: str) -> Path:
        path = tmp_path / "program.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


def found(folder: Path) -> list[dict[str, Any]]:
    """What the ranks of WHO wrote, in the order of their ranks."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("rank-*.json")), key=lambda me: me["rank"])


def files(folder: Path) -> list[str]:
    """What a program wrote in its folder, beside itself and what the test keeps of its output."""
    return [path.name for path in folder.iterdir() if path.suffix not in (".py", ".sh", ".out", ".err")]


@BOTH
def test_four_ranks_of_srun_meet_on_two_nodes(cluster, script, tmp_path: Path, venv: str) -> None:
    done = cluster.srun(2, 2, "python", script(WHO), venv=venv, options="-w node1,node3")
    assert done.returncode == 0, done.stderr
    ranks = found(tmp_path)
    assert [me["rank"] for me in ranks] == [0, 1, 2, 3]
    assert all(me["size"] == 4 and me["sum"] == 6 and me["local_size"] == 2 for me in ranks)
    assert all(me["hosts"] == ["node1", "node1", "node3", "node3"] for me in ranks)
    assert [(me["node"], me["local_rank"]) for me in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@BOTH
def test_the_facts_say_that_srun_started_the_ranks(cluster, script, tmp_path: Path, venv: str) -> None:
    assert cluster.srun(2, 1, "python", script(WHO), venv=venv).returncode == 0
    for me in found(tmp_path):
        assert me["launcher"] == "srun"
        assert me["facts"]["size"] == [2, "MPI_COMM_WORLD"]
        assert me["facts"]["srun: rank"] == [me["rank"], "SLURM_PROCID"]
        assert me["facts"]["srun: size"][0] == 2


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        ("--ntasks-per-node=2 --distribution=block", [0, 0, 1, 1]),
        ("--ntasks-per-node=2 --distribution=cyclic", [0, 1, 0, 1]),
        ("-n5", [0, 0, 0, 1, 2]),
    ],
)
def test_each_rank_knows_its_node_however_the_ranks_are_spread(cluster, script, tmp_path, layout, nodes) -> None:
    count = max(nodes) + 1
    done = cluster.run(f"srun -N{count} {layout} -w node[1-{count}] --mpi=pmi2", "python", script(WHO))
    assert done.returncode == 0, done.stderr
    ranks = found(tmp_path)
    assert [me["node"] for me in ranks] == nodes
    assert [me["local_rank"] for me in ranks] == [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
    assert all(me["local_size"] == nodes.count(me["node"]) for me in ranks)
    assert all(me["hosts"] == [f"node{node + 1}" for node in nodes] and me["host"] == me["own"] for me in ranks)
    assert all(str(me["rank"]) == me["slurm"] for me in ranks)
    assert all(me["levels"]["switch"] == [node // 2 for node in nodes] for me in ranks)  # two nodes share one


def test_ranks_that_srun_did_not_introduce_refuse_to_work_alone(cluster, script, tmp_path: Path) -> None:
    done = cluster.srun(2, 2, "python", script(WHO), mpi="none")
    assert done.returncode == 2
    left = "".join(line for line in done.stderr.splitlines(True) if "Exited with exit code 2" in line)
    assert "node1: task" in left and "node2: task" in left  # those that leave together share a line
    assert "srun started 4 ranks (SLURM_STEP_NUM_TASKS = 4), but for MPI this process is alone" in done.stderr
    assert "--mpi=pmi2" in done.stderr and "srun --mpi=list" in done.stderr
    assert files(tmp_path) == []


@pytest.mark.parametrize(("venv", "mpi"), [("mpich", "pmix"), ("main", "none"), ("main", "pmi2")])
def test_ranks_that_the_mpi_library_itself_refuses_write_nothing(cluster, script, tmp_path, venv, mpi) -> None:
    assert cluster.srun(2, 2, "python", script(WHO), venv=venv, mpi=mpi).returncode != 0
    assert files(tmp_path) == []


@BOTH
def test_a_batch_script_without_srun_is_one_process(cluster, script, tmp_path: Path, venv: str) -> None:
    job = cluster.sbatch(f"python {script(WHO)}", "-N2", "--ntasks-per-node=2", venv=venv)
    assert cluster.wait_for(job).state == "COMPLETED", cluster.output(job)
    assert [(me["rank"], me["size"], me["launcher"]) for me in found(tmp_path)] == [(0, 1, "none")]


def test_the_shell_of_salloc_is_one_process_and_its_srun_is_many(cluster, script, tmp_path: Path) -> None:
    program = script(WHO)
    assert cluster.run("salloc -N2 --ntasks-per-node=2", "python", program).returncode == 0
    assert [(me["rank"], me["size"]) for me in found(tmp_path)] == [(0, 1)]
    assert cluster.run("salloc -N2 --ntasks-per-node=2 srun --mpi=pmi2", "python", program).returncode == 0
    assert [(me["rank"], me["size"]) for me in found(tmp_path)] == [(rank, 4) for rank in range(4)]


@BOTH
def test_mpirun_inside_an_allocation_is_believed_before_slurm(cluster, script, tmp_path: Path, venv: str) -> None:
    job = cluster.sbatch(f"{ROOT}/.ci/mpirun 4 python {script(WHO)}", "-N2", "--ntasks-per-node=2", venv=venv)
    assert cluster.wait_for(job).state == "COMPLETED", cluster.output(job)
    ranks = found(tmp_path)
    assert [(me["rank"], me["size"], me["sum"]) for me in ranks] == [(rank, 4, 6) for rank in range(4)]
    assert [me["node"] for me in ranks] == [0, 0, 1, 1]
    assert all(me["launcher"].startswith(("mpirun of Open MPI", "mpiexec of MPICH")) for me in ranks)
    # Also where the launcher hands the first node's variables to the ranks of the second.
    assert all(me["levels"].keys() == {"node", "switch", "tier 2"} for me in ranks)


@BOTH
@pytest.mark.parametrize("options", ["", "--kill-on-bad-exit=1"])
def test_an_exception_on_one_rank_ends_the_step(cluster, script, venv: str, options: str) -> None:
    program = script("""
        with join() as world:
            if world.rank == 3:
                raise ValueError("rank 3 cannot go on")
            time.sleep(600)
    """)
    done = cluster.srun(2, 2, "python", program, venv=venv, options=f"-w node1,node2 {options}", timeout=60)
    assert done.returncode not in (0, 124)
    assert "rank 3 on node2: ValueError: rank 3 cannot go on" in done.stderr
    assert "in <module>" in done.stderr


def test_two_jobs_at_the_same_time_on_one_node_both_finish(cluster, script) -> None:
    program = script("""
        mine, other = sys.argv[1:]
        with join() as world:
            pathlib.Path(mine).touch()
            while not world.agree(pathlib.Path(other).exists()):
                time.sleep(0.05)
            print(f"{mine} of {world.size} on {world.host}" if world.leads else "", end="")
    """)
    pairs = (("here-1", "here-2"), ("here-2", "here-1"))
    jobs = [cluster.start("srun -N1 -n2 -w node2 --mpi=pmi2", "python", program, *pair) for pair in pairs]
    ends = [job.wait(90) for job in jobs]
    assert [end.returncode for end in ends] == [0, 0]
    assert [end.stdout for end in ends] == ["here-1 of 2 on node2", "here-2 of 2 on node2"]


def test_a_shell_wrapper_with_exec_leaves_no_process_behind(cluster, script, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text('#!/bin/sh\nexport OMP_NUM_THREADS=1\nexec "$@"\n')
    program = script("""
        with join() as world:
            if world.rank == 1:
                os._exit(3)
            time.sleep(600)
    """)
    done = cluster.srun(2, 2, "sh", wrapper, "python", program, options="--kill-on-bad-exit=1", timeout=60)
    assert done.returncode != 0  # and the fixture has looked that nothing of the job is left
