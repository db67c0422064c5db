"""Whole jobs: how ranks meet however they were started, what is refused at the door, and how a failure ends them."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path

import pytest

MPIS = ("main", "mpich")
HEAD = """
import os, sys, threading, time
from hpctrain.cluster.world import World
from hpctrain.config import CommConfig
from hpctrain.errors import PlanError

def say(text):
    os.write(1, f"{text}\\n".encode())  # at once and whole, so that ranks do not mix their lines
"""
MEET = """
with World.join() as world:
    say(f"met {world.rank} {world.size} {world.local_rank} {world.local_size} {world.launcher}")
"""
# None of the variables that a launcher may have left in the environment of the tests themselves.
CLEAN = {name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI", "PALS_", "FLUX_", "MASTER_"))}


@pytest.fixture
def script(tmp_path: Path):
    """``script(body)`` writes a user's own program."""

    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLEAN:
        monkeypatch.delenv(name)


def met(text: str) -> list[list[str]]:
    return sorted(line.split()[1:] for line in text.splitlines() if line.startswith("met "))


# ---- meeting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_meet_under_mpirun(launch, script, mpi: str) -> None:
    done = launch(4, "python", script(MEET), mpi=mpi)
    assert done.returncode == 0, done.stderr
    assert [line[:4] for line in met(done.stdout)] == [[str(r), "4", str(r), "4"] for r in range(4)]


@pytest.mark.parametrize("mpi", MPIS)
def test_a_plain_python_is_a_world_of_one(launch, script, mpi: str) -> None:
    done = launch(0, "python", script(MEET), mpi=mpi)
    assert done.returncode == 0, done.stderr
    assert met(done.stdout) == [["0", "1", "0", "1", "none"]]


NO_LIBRARY = {"MPI4PY_MPIABI": "mpich", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"}


def test_a_plain_python_needs_no_mpi_library_and_says_so(launch, script) -> None:
    body = """
    with World.join() as world:
        say(f"{world.comm} {world.size} {world.agree(True)} {world.share('x')} {world.collect(3)}")
        say([fact.source for fact in world.facts if fact.name == "size"])
    """
    done = launch(0, "python", script(body), env=NO_LIBRARY)
    assert done.returncode == 0, done.stderr
    assert "None 1 True x [3]" in done.stdout and "no MPI library was found" in done.stdout


def test_ranks_without_an_mpi_library_are_refused(launch, script) -> None:
    done = launch(2, "python", script(MEET), env=NO_LIBRARY)
    assert done.returncode == 2 and met(done.stdout) == []
    assert "finds no MPI library" in done.stderr and "pip install mpich" in done.stderr


def test_two_jobs_on_one_node_do_not_disturb_each_other(launch, script) -> None:
    jobs = [launch.start(2, "python", script(MEET)) for _ in range(2)]
    done = [job.wait() for job in jobs]
    assert [(each.returncode, len(met(each.stdout))) for each in done] == [(0, 2), (0, 2)]


def test_every_rank_has_the_environment_of_the_one_who_started_it(launch, script) -> None:
    body = """
    with World.join() as world:
        seen = world.collect((os.environ["PYTHONPATH"], os.environ["ODD"]))
        say(f"same {len(set(seen))} {seen[0][0].startswith('/opt/a')} {seen[0][1]!r}")
    """
    odd = "a b=c\nd"
    env = {"PYTHONPATH": f"/opt/a:{Path(__file__).parents[2]}", "ODD": odd}
    done = launch(2, "python", script(body), env=env)
    assert done.stdout.count(f"same 1 True {odd!r}") == 2, done.stderr


def test_mpi_may_be_running_already(launch, script) -> None:
    done = launch(2, "python", script("from mpi4py import MPI\n" + MEET))
    assert done.returncode == 0 and len(met(done.stdout)) == 2


def test_torch_is_not_loaded_before_mpi_runs(launch, script) -> None:
    done = launch(1, "python", script("with World.join() as w:\n    say('torch' in sys.modules)"))
    assert "False" in done.stdout, done.stderr


# ---- the door ------------------------------------------------------------------------------------------------------

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
}


@pytest.mark.parametrize("command", ["module", "console", "script"])
def test_singletons_are_refused_before_any_file_is_written(launch, script, tmp_path: Path, command: str) -> None:
    words = {
        "module": ("python", "-m", "hpctrain", "doctor"),
        "console": (_console(tmp_path), "doctor"),
        "script": ("python", script(MEET)),
    }[command]
    work = tmp_path / "work"
    work.mkdir()
    done = launch(0, *words, env=STEP, cwd=work)
    assert done.returncode == 2, done.stderr
    assert "started 4 ranks" in done.stderr and "srun --mpi=pmix" in done.stderr and "--mpi=list" in done.stderr
    assert list(work.iterdir()) == []


def test_another_size_than_the_launchers_is_refused(launch, script) -> None:
    body = "os.environ['OMPI_COMM_WORLD_SIZE' if 'OMPI_COMM_WORLD_SIZE' in os.environ else 'PMI_SIZE'] = '3'\n"
    done = launch(2, "python", script("from mpi4py import MPI\n" + body + MEET))
    assert done.returncode == 2 and "MPI counts 2 ranks" in done.stderr and met(done.stdout) == []


@pytest.mark.parametrize("mpi", MPIS)
def test_a_master_address_elsewhere_is_refused_unless_the_check_is_off(launch, script, mpi: str) -> None:
    env = {"MASTER_ADDR": "127.0.0.2"}
    done = launch(2, "python", script(MEET), env=env, mpi=mpi)
    assert done.returncode == 2 and met(done.stdout) == []
    assert done.stderr.count("MASTER_ADDR = 127.0.0.2 is not an address of rank 0's node") == 1
    forced = MEET.replace("join()", "join(CommConfig(check_master_addr=False))")
    assert launch(2, "python", script(forced), env=env, mpi=mpi).returncode == 0


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1"])
def test_a_master_address_of_this_node_is_welcome(launch, script, address: str) -> None:
    assert launch(2, "python", script(MEET), env={"MASTER_ADDR": address, "MASTER_PORT": "29500"}).returncode == 0


def test_a_port_of_each_ranks_own_is_refused(launch, script) -> None:
    port = "os.environ['MASTER_PORT'] = str(os.getpid())\n"
    done = launch(2, "python", script(port + MEET))
    assert done.returncode == 2 and "MASTER_PORT differs between ranks (rank 0: " in done.stderr


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_that_never_come_are_named_when_the_limit_passes(launch, script, mpi: str) -> None:
    late = """
    if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
        time.sleep(120)
    World.join(CommConfig(start_seconds=4))
    """
    done = launch(3, "python", script(late), mpi=mpi, timeout=60)
    assert done.returncode != 0
    assert "waited 4 s in MPI_Init" in done.stderr and "missing on this node: local rank 1 of 3" in done.stderr


def test_a_rank_that_comes_to_mpi_but_not_to_the_meeting_is_named(launch, script) -> None:
    body = """
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(120)
    World.join(CommConfig(start_seconds=2))
    """
    done = launch(3, "python", script(body), timeout=60)
    assert done.returncode != 0 and "the meeting at the start: rank 1 did not come within 2 s" in done.stderr


# ---- the end -------------------------------------------------------------------------------------------------------

FAIL = """
def work(world):
    try:
        if world.rank == 2:
            {how}
        world.barrier()
    finally:
        say(f"cleaned up inside {{world.rank}}")
try:
    {start}
finally:
    say("cleaned up outside")
"""
STARTS = {
    "with": "with World.join() as world: work(world)",
    "without": "work(World.join())",
}
WAYS = {
    "error": ("raise ValueError('boom')", 1, "rank 2 on {host}: ValueError: boom"),
    "known": ("raise PlanError('what', 'why', 'mend')", 2, "rank 2 on {host}: hpctrain.errors.PlanError: what"),
    "exit": ("sys.exit(3)", 3, "rank 2 on {host}: left with exit code 3"),
    "interrupt": ("raise KeyboardInterrupt", 130, "rank 2 on {host}: KeyboardInterrupt"),
}


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("way", WAYS)
def test_one_ranks_failure_ends_the_job_with_its_cause(launch, script, mpi: str, start: str, way: str) -> None:
    how, code, told = WAYS[way]
    done = launch(4, "python", script(FAIL.format(how=how, start=STARTS[start])), mpi=mpi, timeout=60)
    assert done.returncode == code
    assert told.format(host=os.uname().nodename) in done.stderr
    assert "cleaned up inside 2" in done.stdout and "cleaned up outside" in done.stdout


# Runs the words that follow it, and gives one rank something that it cannot read.
SPOIL = """
[ "${OMPI_COMM_WORLD_RANK:-$PMI_RANK}" = 2 ] && export SLURM_JOB_ID=1 SLURM_TASKS_PER_NODE=several
exec "$@"
"""


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("command", ["module", "console"])
def test_one_ranks_failure_in_a_command_ends_the_job_with_its_cause(
    launch, tmp_path: Path, mpi: str, command: str
) -> None:
    words = {"module": ("python", "-m", "hpctrain"), "console": ("python", _console(tmp_path))}[command]
    done = launch(4, "sh", "-c", SPOIL, "sh", *words, "doctor", mpi=mpi, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"rank 2 on {os.uname().nodename}: hpctrain.errors.LaunchError: 'several' is not a list" in done.stderr


@pytest.mark.parametrize("mpi", MPIS)
def test_an_error_in_a_thread_ends_the_job_too(launch, script, mpi: str) -> None:
    how = "t = threading.Thread(target=lambda: 1 / 0); t.start(); time.sleep(120)"
    done = launch(4, "python", script(FAIL.format(how=how, start=STARTS["with"])), mpi=mpi, timeout=60)
    assert done.returncode == 1 and f"rank 2 on {os.uname().nodename}: ZeroDivisionError" in done.stderr


def test_abort_ends_the_job_with_the_error_given(launch, script) -> None:
    how = "world.abort(PlanError('what', 'why', 'mend'))"
    done = launch(4, "python", script(FAIL.format(how=how, start=STARTS["with"])), timeout=60)
    assert done.returncode == 2 and "PlanError: what" in done.stderr


def test_a_caught_error_that_left_the_world_ends_the_job_all_the_same(launch, script) -> None:
    body = """
    try:
        with World.join() as world:
            if world.rank == 1:
                raise ValueError("boom")
            world.barrier()
    except ValueError:
        say("caught")
        time.sleep(120)
    """
    done = launch(2, "python", script(body), timeout=60)
    assert done.returncode == 1 and "caught" in done.stdout and "ValueError: boom" in done.stderr


def test_an_error_after_the_world_is_told_by_the_rank_that_has_it(launch, script) -> None:
    body = """
    with World.join() as world:
        rank = world.rank
    if rank == 1:
        raise PlanError("what")
    """
    done = launch(2, "python", script(body))
    assert done.returncode == 2 and done.stderr.count("PlanError: what") == 1


def test_an_error_in_a_forked_child_is_no_failure_of_a_rank(launch, script) -> None:
    body = """
    with World.join() as world:
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=lambda: 1 / 0)
            thread.start()
            thread.join()
            os._exit(3)
        say(f"child {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
    """
    done = launch(2, "python", script(body))
    assert done.returncode == 0 and done.stdout.count("child 3") == 2


def test_an_abort_reaches_ranks_behind_a_shell(launch, script, tmp_path: Path) -> None:
    program = script(FAIL.format(how="raise ValueError('boom')", start=STARTS["with"]))
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f"export SETTING=1\nexec {sys.executable} {program}\n")
    done = launch(4, "sh", wrapper, timeout=60)  # waiting ends with an error when a process is left
    assert done.returncode == 1


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("start", STARTS)
def test_an_error_of_all_ranks_is_told_once(launch, script, mpi: str, start: str) -> None:
    body = FAIL.format(how="pass", start=STARTS[start]).replace("world.barrier()", "raise PlanError('what', 'why')")
    done = launch(4, "python", script(body), mpi=mpi)
    assert done.returncode == 2 and done.stderr.count("PlanError: what") == 1
    assert done.stdout.count("cleaned up outside") == 4


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(("leave", "code"), [("sys.exit(0)", 0), ("world.requeue()", 75), ("sys.exit(4)", 4)])
def test_leaving_together_is_no_failure(launch, script, mpi: str, start: str, leave: str, code: int) -> None:
    body = FAIL.format(how="pass", start=STARTS[start]).replace("world.barrier()", leave)
    done = launch(4, "python", script(body), mpi=mpi)
    assert done.returncode == code and "rank" not in done.stderr.split("-----")[0]


@pytest.mark.parametrize("start", STARTS)
def test_a_rank_that_does_not_come_to_the_end_is_named(launch, script, start: str) -> None:
    body = FAIL.format(how="time.sleep(120)", start=STARTS[start]).replace("world.barrier()", "pass")
    body = body.replace("join()", "join(CommConfig(timeout_seconds=3))")
    done = launch(4, "python", script(body), timeout=60)
    assert done.returncode == 1 and "the end of the run: rank 2 did not come within 3 s" in done.stderr


def test_a_wait_that_is_too_long_names_who_is_missing(launch, script) -> None:
    body = """
    with World.join(CommConfig(timeout_seconds=2)) as world:
        if world.rank in (1, 2):
            time.sleep(120)
        world.barrier()
    """
    done = launch(4, "python", script(body), timeout=60)
    assert done.returncode == 1 and "barrier: rank 1, 2 did not come within 2 s" in done.stderr


def test_doctor_speaks_once_for_all_ranks(launch) -> None:
    done = launch(2, "python", "-m", "hpctrain", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    facts = {fact["name"]: fact for fact in json.loads(done.stdout)["facts"]}
    assert facts["size"] == {"name": "size", "value": 2, "source": "MPI_COMM_WORLD"}
    assert facts["topology"]["value"] == "1 node x 2 ranks"


def _console(folder: Path) -> Path:
    """The console script as an installer would write it."""
    path = folder / "hpctrain"
    path.write_text(f"#!{sys.executable}\nfrom hpctrain.cli import main\nmain()\n")
    path.chmod(0o755)
    return path
