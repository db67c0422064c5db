"""From a configuration to a job in the queue: what is written, what is handed in, and what is refused before that."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.keep import file_name
from hpctrain.cli import main
from hpctrain.cluster import jobs
from hpctrain.cluster.queue import Queue
from hpctrain.cluster.script import batch_script
from hpctrain.cluster.submission import Submission, hand_in, place, prepare, write
from hpctrain.cluster.sweep import elements, split
from hpctrain.config import Config, RunConfig, load, parse
from hpctrain.config.write import toml
from hpctrain.errors import UsageError
from tests.support.scripts import asked

SMALL = """
[run]
name = "small"
[model]
layers = 1
width = 8
heads = 2
sequence = 4
[data]
text = ["text.txt"]
[train]
batch = 8
[job]
machine = "lab"
check = false
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder with a configuration and its text, and no Slurm."""
    (tmp_path / "small.toml").write_text(SMALL)
    (tmp_path / "text.txt").write_text("ranks meet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin" if not Path("/usr/bin/squeue").exists() else str(tmp_path))
    return tmp_path


@pytest.fixture
def submit(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``submit("--dry-run")`` gives the exit code, and what went to the two streams."""

    def start(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpctrain", "submit", "small.toml", *words])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code, *capsys.readouterr()

    return start


class Line(Queue):
    """A queue that takes everything, and keeps it."""

    def __init__(self) -> None:
        self.handed: list[tuple[str, Path, Sequence[str]]] = []

    def submit(self, script: str, folder: Path, options: Sequence[str] = ()) -> str:
        self.handed.append((script, folder, options))
        return str(10 + len(self.handed))


# ---- the configuration that a job reads


@given(
    st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=20), max_size=3),
    st.text(st.characters(blacklist_categories=("Cs",)), max_size=20),
    st.floats(1e-12, 1e12),
    st.lists(st.text(max_size=8), max_size=3),
)
def test_a_written_configuration_reads_as_the_same_one(table, name, rate, texts) -> None:
    made = parse({
        "run": {"name": name},
        "optim": {"rate": rate},
        "data": {"text": texts, "sources": [{"path": name or "x", "weight": rate}]},
        "checkpoint": {"rename": table, "background": False},
        "job": {"environment": table, "qos": None},
    })  # fmt: skip
    assert parse(tomllib.loads(toml(made))) == made


@pytest.mark.parametrize(
    "path", sorted(Path(__file__).resolve().parents[2].glob("configs/*.toml")), ids=lambda p: p.stem
)
def test_the_projects_configurations_are_written_as_they_read(path: Path) -> None:
    assert parse(tomllib.loads(toml(load(path)))) == load(path)


def test_only_what_was_chosen_is_written() -> None:
    assert toml(parse({"train": {"steps": 5}}, ("run.name=a b",))) == '[run]\nname = "a b"\n\n[train]\nsteps = 5\n'
    assert toml(Config()) == ""


# ---- sweeps


def test_a_sweep_has_a_run_for_each_product_of_values() -> None:
    found = elements(["optim.rate=1e-3,3e-4", "train.batch=8,16"], RunConfig(name="s"))
    assert [element.name for element in found] == [
        "s-rate-1e-3-batch-8", "s-rate-1e-3-batch-16", "s-rate-3e-4-batch-8", "s-rate-3e-4-batch-16",
    ]  # fmt: skip
    assert found[1].settings == ("optim.rate=1e-3", "train.batch=16")
    assert found[1].run == "runs/s-rate-1e-3-batch-16"


@pytest.mark.parametrize(
    ("text", "parts"),
    [("1,2", ["1", "2"]), ("[1,2],[3]", ["[1,2]", "[3]"]), ('"a,b",c', ['"a,b"', "c"]), ("{a=1,b=2}", ["{a=1,b=2}"])],
)
def test_commas_inside_brackets_and_quotes_part_no_values(text: str, parts: list[str]) -> None:
    assert split(text) == parts


SWEEPS = {
    "no value": (
        ["optim.rate"],
        "--array optim.rate: not KEY=VALUE,VALUE\n"
        "  one job is made for each value\n"
        "  write e.g. --array optim.rate=1e-3,3e-4",
    ),
    "one folder": (
        ["optim.rate=1,2"],
        '--array with run.dir = "out"\n'
        "  all runs of the array would have one folder\n"
        '  write {name} where the name of each run is to stand, such as "runs/{name}"',
    ),
    "twice": (
        ["optim.rate=1,1"],
        "--array optim.rate=1,1: two runs would be called s-rate-1\n"
        "  each run has a folder by its name\n"
        "  leave out values that stand there twice",
    ),
}


@pytest.mark.parametrize("case", SWEEPS)
def test_a_sweep_that_cannot_be_is_told_with_its_mend(case: str) -> None:
    arrays, told = SWEEPS[case]
    run = RunConfig(name="s", dir="out") if case == "one folder" else RunConfig(name="s")
    with pytest.raises(UsageError) as error:
        elements(arrays, run)
    assert str(error.value) == told


# ---- files, and handing in


def prepared(folder: Path, *overrides: str, **changes) -> Submission:
    config = parse({"run": {"name": "small"}}, ("job.check=false", *overrides))
    where = place(folder, Path("runs/small"), "slurm", "small.toml", None)
    asks = asked("lab", "run.name=small", "job.check=false", place=where)
    return prepare(type(asks)(**{**vars(asks), "place": where, **changes}), config)


def test_the_files_of_a_job_that_waits_are_not_changed_by_the_next_submission(tmp_path: Path) -> None:
    first = prepared(tmp_path)
    write(first)
    second = prepared(tmp_path, "train.steps=7")
    write(second)
    run = tmp_path / "runs/small"
    assert (run / "job-1.toml").read_text() == first.config
    assert (run / "job-1.sbatch").read_text() == first.script
    assert (run / "job.toml").resolve() == run / "job-2.toml"
    assert (run / "job.sbatch").read_text() == second.script == batch_script(second.request)
    assert load(run / "job.toml").train.steps == 7


def test_a_file_of_a_person_with_the_name_of_the_newest_script_stays(tmp_path: Path) -> None:
    (tmp_path / "runs/small").mkdir(parents=True)
    (tmp_path / "runs/small/job.sbatch").write_text("mine")
    write(prepared(tmp_path))
    assert (tmp_path / "runs/small/job.sbatch").read_text() == "mine"


def test_each_job_of_a_chain_waits_for_the_one_before_however_it_ends(tmp_path: Path) -> None:
    queue, submission = Line(), prepared(tmp_path)
    write(submission)
    assert list(hand_in(submission, queue, 3)) == ["11", "12", "13"]
    assert [options for _, _, options in queue.handed] == [
        [],
        ["--dependency=afterany:11"],
        ["--dependency=afterany:12"],
    ]
    assert all((script, folder) == (submission.script, tmp_path) for script, folder, _ in queue.handed)
    handed = jobs.read(tmp_path / "runs/small")
    assert [job.id for job in handed] == ["11", "12", "13"]
    assert handed[0].output == f"{tmp_path}/runs/small/job-%j.out"
    assert handed[0].script == f"{tmp_path}/runs/small/job-1.sbatch"


def test_each_run_of_a_sweep_knows_its_job_and_its_output(tmp_path: Path) -> None:
    runs = elements(["optim.rate=1e-3,3e-4"], RunConfig(name="small"))
    submission = prepared(tmp_path, elements=runs)
    assert list(hand_in(submission, Line())) == ["11"]
    assert jobs.read(tmp_path / "runs/small")[0].output == f"{tmp_path}/runs/small/job-%A_%a.out"
    (second,) = jobs.read(tmp_path / "runs/small-rate-3e-4")
    assert (second.id, second.output) == ("11_1", f"{tmp_path}/runs/small/job-11_1.out")


def test_an_earlier_wish_to_stop_does_not_hold_for_a_new_job(tmp_path: Path) -> None:
    submission = prepared(tmp_path)
    write(submission)
    (tmp_path / "runs/small/no-requeue").touch()
    list(hand_in(submission, Line()))
    assert not (tmp_path / "runs/small/no-requeue").exists()


# ---- the command


def test_a_dry_run_shows_the_script_and_writes_nothing(submit: Run, folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    code, out, err = submit("--dry-run", "--nodes", "2", "--time", "2:00:00")
    assert code == 0
    assert "#SBATCH --nodes=2\n" in out
    assert "#SBATCH --time=2:00:00\n" in out
    assert err == "nothing was written, and nobody was asked\n"
    assert sorted(folder.rglob("*")) == before


def test_json_is_all_there_is_on_the_output_stream(submit: Run) -> None:
    code, out, err = submit("--dry-run", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["text"].startswith("#!/bin/bash\n# small: small.toml on lab.")


def test_a_job_for_pbs_is_written_and_its_command_told(submit: Run, folder: Path) -> None:
    code, _, err = submit("--machine", "polaris", "--account", "catalyst")
    assert (code, err) == (0, "written; hand it in with\n  qsub runs/small/job-1.pbs\n")
    assert "#PBS -A catalyst\n" in (folder / "runs/small/job.pbs").read_text()
    assert load(folder / "runs/small/job.toml").job.account == "catalyst"


def test_a_run_of_a_sweep_reads_only_what_is_its_own(submit: Run) -> None:
    code, out, _ = submit("--dry-run", "--array", "optim.rate=1e-3,3e-4")
    assert code == 0
    assert "#SBATCH --array=0-1\n" in out
    assert "1) run=runs/small-rate-3e-4 settings=(--set run.name=small-rate-3e-4 --set optim.rate=3e-4) ;;" in out


def test_a_chain_knows_its_last_checkpoint_and_is_not_put_back(submit: Run) -> None:
    code, out, _ = submit("--dry-run", "--chain", "3")
    assert code == 0
    assert f"if [[ -e runs/small/checkpoints/{file_name(100)} ]]; then" in out
    assert "requeue" not in out


REFUSED = {
    "no Slurm": (["--yes"], "no queue was found"),
    "a batch that does not divide": (["--nodes", "3"], "train.batch = 8 does not divide over 12 data-parallel ranks"),
    "of one run of a sweep": (["--array", "train.batch=8,9"], "train.batch = 9 does not divide over 4"),
    "text that is not there": (["--set", "data.text=['nowhere']"], "data.text: nowhere is not there"),
    "tokens that are not there": (
        ["--set", "data.sources=[{path = 'tokens/a'}]", "--vocabulary", "256"],
        "data.sources: tokens/a.bin is not there",
    ),
    "nothing to train on": (["--set", "data.text=[]"], "data.sources and data.text are empty"),
    "an unknown machine": (["--machine", "fronteer"], "no machine is called 'fronteer'"),
    "no account": (["--machine", "frontier"], "job.account is not given, and Frontier wants to know who pays"),
    "a chain of arrays": (["--chain", "2", "--array", "optim.rate=1,2"], "--chain and --array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_before_it_waits_in_the_queue(case: str, submit: Run, folder: Path) -> None:
    words, told = REFUSED[case]
    code, out, err = submit(*words)
    assert code == 2
    assert err.startswith(f"hpctrain: {told}"), err
    assert len(err.splitlines()) > 1
    assert not (folder / "runs").exists()
