"""The check before a start: what answers mean, that nothing waits for ever, and what is written and told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster import hear as hearing
from hpctrain.cluster import slurm
from hpctrain.cluster.checks import CHECKS, Asked, examine
from hpctrain.cluster.hear import Heard, hear
from hpctrain.cluster.judge import DOING, Answer, Finding, choose
from hpctrain.cluster.links import Pair
from hpctrain.cluster.preflight import Outcome, Start, answer_of, ask, linked, members, write
from hpctrain.errors import NodesError

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "configs/tiny.toml"
ASKED = Asked(None, None, "float32", 60.0)


def program(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def line(node: str, check: str, **value: Any) -> dict[str, Any]:
    return {"node": node, "check": check, **value}


def told(node: str) -> list[dict[str, Any]]:
    """The lines of a node that is well."""
    return [line(node, check) for check in ("here", *CHECKS, "done")]


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job of Slurm, and no launcher."""
    for name in os.environ:
        if name.startswith(("SLURM", "PMI", "OMPI_")):
            monkeypatch.delenv(name)


# ---- what one node measures


def test_a_node_that_is_well_has_figures_of_all_checks(tmp_path: Path) -> None:
    found = dict(examine(Asked(str(tmp_path), str(tmp_path / "near-{host}"), "bfloat16", 60.0)))
    assert list(found) == list(CHECKS)
    assert not [check for check, value in found.items() if "error" in value]
    assert found["products"]["flops"][0] > 0 and found["memory"]["bytes_per_second"] > 0
    assert found["shared"].keys() == found["near"].keys() == {"write_bytes_per_second", "read_bytes_per_second"}
    assert [path.name.startswith("near-") for path in tmp_path.iterdir()] == [True]  # and no file is left


def test_a_folder_that_another_node_made_and_that_is_not_here_is_an_error(tmp_path: Path) -> None:
    found = dict(examine(Asked(str(tmp_path / "made elsewhere"), None, "float32", 60.0)))
    assert "FileNotFoundError" in found["shared"]["error"] and found["near"] == {}
    assert "error" not in found["products"]


def test_a_variable_that_a_node_lacks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_PLACE", raising=False)
    found = dict(examine(Asked(None, "$NO_SUCH_PLACE/near", "float32", 60.0)))
    assert found["near"]["error"] == "OSError: checkpoint.near = $NO_SUCH_PLACE/near: a variable in it is not set here"


def test_each_check_prints_a_line_that_srun_does_not_cut() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain.cluster.checks", ASKED.to_text()],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert [line["check"] for line in lines] == ["here", *CHECKS, "done"]
    assert max(map(len, done.stdout.splitlines())) < 1000


def test_a_node_ends_by_itself_when_its_time_is_over(tmp_path: Path) -> None:
    pipe = tmp_path / "near"
    os.mkfifo(pipe)  # stands for a file system that hangs: who opens it waits
    code = f"""
        from hpctrain.cluster.checks import *
        CHECKS["near"] = lambda asked: {{"text": open({str(pipe)!r}).read()}}
        main(Asked(None, None, "float32", 4.0).to_text())
    """
    done = subprocess.run(program(code), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert [json.loads(text)["check"] for text in done.stdout.splitlines()][:1] == ["here"]
    assert "done" not in done.stdout


# ---- listening


def test_lines_of_checks_are_heard_and_others_are_not() -> None:
    code = """
        import sys
        print("Welcome to the machine"); print("{}"); print("[1]"); print('{"node": "a", "check": "done"}')
        print("no such module", file=sys.stderr)
    """
    heard = hear(program(code), os.environ, lambda lines: 0.0, 30)
    assert heard == Heard([line("a", "done")], "no such module\n", late=False)


def test_who_does_not_answer_is_not_waited_for_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "END_SECONDS", 0.1)
    heard = hear(program("import time; time.sleep(600)"), os.environ, lambda lines: 0.0, 0.2)
    assert (heard.lines, heard.late) == ([], True)


def test_a_command_that_ignores_the_request_to_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "END_SECONDS", 0.1)
    code = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print('{"node": "a", "check": "here", "pid": %d}' % os.getpid(), flush=True)
        time.sleep(600)
    """
    heard = hear(program(code), os.environ, lambda lines: 0.0, 3)
    with pytest.raises(ProcessLookupError):
        os.kill(heard.lines[0]["pid"], 0)


def test_once_half_have_answered_the_others_have_less_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hearing, "END_SECONDS", 0.1)
    monkeypatch.setattr(hearing, "LEAST_SECONDS", 0.1)
    code = """
        import time
        print('{"node": "a", "check": "done"}', flush=True)
        time.sleep(600)
    """
    assert hear(program(code), os.environ, lambda lines: len(lines) / 2, 500).late  # the test's own limit is shorter


# ---- what the lines mean


def test_a_node_that_told_all_is_well() -> None:
    answer = answer_of("node1", [*told("node1"), line("node1", "memory", free_bytes=5)], "")
    assert answer.errors == {} and answer.found["memory"] == {"free_bytes": 5}


def test_a_check_that_failed_is_an_error_of_its_node() -> None:
    answer = answer_of("node1", [*told("node1"), line("node1", "shared", error="OSError: full")], "")
    assert answer.errors == {"shared": "OSError: full"} and "shared" not in answer.found


def test_a_silent_node_is_told_with_what_srun_said_of_it() -> None:
    said = "srun: error: node10: task 3: Killed\nsrun: error: node1: task 0: Exited with exit code 1\n"
    assert answer_of("node1", [], said).errors == {
        "here": "did not answer (srun: error: node1: task 0: Exited with exit code 1)"
    }
    assert answer_of("node2", [], said).errors == {"here": "did not answer"}


@pytest.mark.parametrize("check", CHECKS)
def test_a_node_that_stops_in_a_check_is_told_with_it(check: str) -> None:
    before = [line("n", "here"), *(line("n", name) for name in CHECKS)][: list(CHECKS).index(check) + 1]
    assert answer_of("n", before, "").errors == {"here": f"stopped answering while {DOING[check]}"}


ALL = [Answer(name) for name in ("node1", "node2", "node3")]


def test_links_and_clocks_come_from_the_step_with_mpi() -> None:
    lines = [
        *(line(answer.node, "here") for answer in ALL),
        line("node1", "clock", of="node3", ahead_seconds=7.5),
        line("node1", "link", round=0, one="node1", other="node2", bytes_per_second=1e9),
        line("node1", "done"),
    ]
    found = linked(ALL, Heard(lines, "", late=False))
    assert found.pairs == (Pair(0, "node1", "node2", 1e9),) and found.notes == ()
    assert [found.answers[answer.node].clock_ahead_seconds for answer in ALL] == [0.0, 0.0, 7.5]


def test_a_node_that_does_not_come_to_mpi_in_time_is_named() -> None:
    found = linked(ALL, Heard([line("node1", "here"), line("node3", "here")], "", late=True))
    assert found.answers == {"node2": Answer("node2", errors={"here": "did not come to meet the others through MPI"})}
    assert found.notes == ("the links between nodes were not measured: the ranks did not end in time",)


def test_nobody_is_blamed_when_mpi_does_not_start() -> None:
    errors = "srun: error: node1: task 0: Exited\n-----\nlibmpi.so: not found\nsrun: Force Terminated StepId=1.0\n"
    found = linked(ALL, Heard([line("node1", "here")], errors, late=False))
    assert found.answers == {} and found.notes == ("the links between nodes were not measured: libmpi.so: not found",)
    refused = linked(ALL, Heard([line("node1", "mpi", error="MPI is alone")], errors, late=False))
    assert refused.notes == ("the links between nodes were not measured: MPI is alone",)


def test_a_node_that_is_lost_between_the_two_steps_is_named() -> None:
    errors = "srun: error: Task launch for StepId=1.1 failed on node node2: Communication connection failure\n"
    found = linked(ALL, Heard([line("node1", "here"), line("node3", "here")], errors, late=False))
    assert list(found.answers) == ["node2"]
    assert found.answers["node2"].errors["here"].startswith("did not come to meet the others through MPI (srun: error")


def test_of_two_that_wait_for_each_other_the_pair_is_told_and_later_rounds_are_not() -> None:
    hung = [("node1", 1, "node2"), ("node2", 1, "node1"), ("node3", 2, "node1")]
    lines = [line(node, "hangs", round=number, partner=partner) for node, number, partner in hung]
    found = linked(ALL, Heard(lines, "", late=True))
    assert found.pairs == (Pair(1, "node1", "node2", 0.0),) and found.answers == {}


def test_a_node_that_goes_away_in_an_exchange_is_named_by_who_waited_for_it() -> None:
    lines = [*(line(answer.node, "here") for answer in ALL), line("node3", "hangs", round=0, partner="node2")]
    found = linked(ALL, Heard(lines, "", late=True))
    assert found.answers["node2"].errors == {"here": "stopped answering while exchanging with node3"}
    assert found.pairs == () and list(found.answers) == ["node2"]


# ---- starting


def test_those_that_srun_ended_with_an_unreachable_node_are_asked_again(tmp_path: Path, monkeypatch) -> None:
    """An srun that ends all tasks as one node cannot be reached, as Slurm's own does after ten seconds."""
    good, cut = ("\n".join(map(json.dumps, lines)) for lines in (told("node1") + told("node3"), told("node1")[:3]))
    (tmp_path / "srun").write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncase "$*" in *node2*)\ncat <<END\n{cut}\nEND\n'
        "echo 'srun: error: Task launch failed on node node2: Communication connection failure' >&2\n"
        "echo 'srun: error: node3: task 2: Killed' >&2; exit 1;;\nesac\n"
        f"cat <<END\n{good}\nEND\n"
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    answers = ask(["node1", "node2", "node3"], ASKED, 30, Start(in_slurm=True))
    assert [answer.node for answer in answers if not answer.errors] == ["node1", "node3"]
    assert "did not answer (srun: error: Task launch failed on node node2" in answers[1].errors["here"]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert ["--nodelist=node1,node3" in call for call in calls] == [False, True]


def test_the_steps_are_started_over_the_nodes_that_are_to_be_asked() -> None:
    start = Start(True, "pmi2", within=("apptainer", "exec", "image.sif"))
    alone = " ".join(start.alone(["n1", "n2"], "checks", "{}"))
    assert alone.startswith("srun --mpi=none --kill-on-bad-exit=0 --nodes=2 --ntasks=2 --ntasks-per-node=1 --overlap")
    assert alone.endswith("--no-kill --nodelist=n1,n2 apptainer exec image.sif python3 -m checks {}")
    together = " ".join(start.together(["n1", "n2"], 4, "links", "9"))
    assert together.startswith("srun --mpi=pmi2 --kill-on-bad-exit=1 --nodes=2 --ntasks=8 --ntasks-per-node=4")
    by_mpirun = Start(True, launcher="mpirun").together(["n1", "n2"], 4, "links", "9")
    assert by_mpirun[:5] == ["mpirun", "-n", "8", "--host", "n1:4,n2:4"]


def test_options_that_the_job_has_for_its_tasks_do_not_reach_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_NTASKS", "SLURM_GPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "7")
    start = Start(True)
    assert {"SLURM_NTASKS", "SLURM_GPUS_PER_TASK", "SRUN_CPUS_PER_TASK"}.isdisjoint(start.environment("srun"))
    assert start.environment("srun")["SLURM_JOB_ID"] == "7"
    assert start.environment("mpirun")["SLURM_NTASKS"] == "7"


def test_nodes_that_slurm_has_taken_out_of_the_job_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-4]"}
    for now, gone in ((None, set()), (("node1", "node4"), {"node2", "node3"})):
        monkeypatch.setattr(slurm, "nodes_now", lambda job, now=now: now)
        assert members(environ) == (("node1", "node2", "node3", "node4"), frozenset(gone))


def test_without_the_command_of_slurm_nothing_is_known_of_the_nodes_now(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.nodes_now("7") is None


def test_the_names_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write(tmp_path / "nodes", ["node1"])
    write(tmp_path / "nodes", ["node2", "node3"])
    assert (tmp_path / "nodes").read_text() == "node2\nnode3\n"
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "no folder/nodes", ["node1"])
    assert [path.name for path in tmp_path.iterdir()] == ["nodes"]


def outcome(found: list[Finding], wanted: int) -> Outcome:
    names = ("node1", "node2", "node3", "node4")
    try:
        choice, error = choose(names, found, wanted), None
    except NodesError as told:
        choice, error = None, told
    return Outcome(names, wanted, tuple(map(Answer, names)), (), tuple(found), ("a note",), choice, error, 9.4)


def test_the_outcome_is_told_as_a_table_sentences_and_a_summary() -> None:
    lines = outcome([Finding("node2", "is cold", broken=True), Finding("node4", "is slow")], 2).show().splitlines()
    assert [line.split()[-1] for line in lines[1:5]] == ["trains", "broken", "trains", "slow"]
    assert lines[6:] == [
        "node2 is cold: left out; node3, a spare, takes its place",
        "node4, a spare, is slow: left out",
        "a note",
        "checked 4 nodes in 9 s; 2 train: node1, node3",
    ]
    assert outcome([], 3).show().splitlines()[-1] == (
        "checked 4 nodes in 9 s; 3 train: node1, node2, node3; spare: node4"
    )


def test_where_too_few_can_train_the_table_says_which_are_good() -> None:
    found = outcome([Finding("node2", "is cold", broken=True), Finding("node4", "is slow")], 4)
    assert [line.split()[-1] for line in found.show().splitlines()[1:5]] == ["good", "broken", "good", "slow"]
    assert found.to_json()["chosen"] is None
    assert found.to_json()["findings"] == {"node2": ["is cold"], "node4": ["is slow"]}
    assert json.loads(json.dumps(found.to_json()))["nodes"] == ["node1", "node2", "node3", "node4"]


# ---- the command


def command(folder: Path, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "PMI", "OMPI_"))}
    return subprocess.run(
        [sys.executable, "-m", "hpctrain", "preflight", str(TINY), *options],
        cwd=folder, env={**env, "PYTHONPATH": str(ROOT), **environ}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip


def test_without_slurm_this_machine_alone_is_checked(tmp_path: Path) -> None:
    done = command(tmp_path, "--out", "nodes", "--json", "--set", "job.nodes=16")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "no Slurm job: checking this machine alone\n"
    found = json.loads(done.stdout)
    assert [found["chosen"][0]] == found["nodes"] == (tmp_path / "nodes").read_text().split()
    assert found["figures"][found["nodes"][0]]["shared"]["write_bytes_per_second"] > 0
    lines = (tmp_path / "runs/tiny/preflight.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == found and len(lines) == 1
    assert [path.name for path in (tmp_path / "runs/tiny").iterdir()] == ["preflight.jsonl"]


def test_a_machine_whose_own_disk_cannot_be_used_is_refused_and_no_names_are_written(tmp_path: Path) -> None:
    done = command(tmp_path, "--out", "nodes", "--set", "checkpoint.near=/proc/no/disk")
    assert done.returncode == 1
    assert "0 of 1 nodes can train, and 1 are wanted" in done.stderr
    assert "failed while writing to checkpoint.near" in done.stderr
    assert "what fails on every node is hardly their fault" in done.stderr
    assert not (tmp_path / "nodes").exists()
    assert len((tmp_path / "runs/tiny/preflight.jsonl").read_text().splitlines()) == 1


def test_it_refuses_to_run_in_a_step_of_the_job(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}  # fmt: skip
    done = command(tmp_path, **step)
    assert done.returncode == 2
    assert done.stderr == (
        "hpctrain: hpctrain preflight was started by srun as 4 ranks\n"
        "  it starts a task on each node itself\n"
        "  call it once, in the batch script or in the shell of salloc, without a launcher before it\n"
    )


def test_a_run_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    done = command(tmp_path)
    assert done.returncode == 1
    assert "runs/tiny: Not a directory" in done.stderr and "set run.dir to a folder that can be written" in done.stderr
