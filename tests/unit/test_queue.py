"""Slurm's commands as a queue: what is told when they are missing, fail, hang, or write what is not known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cluster.advice import Advice
from hpctrain.cluster.queue import find_queue
from hpctrain.cluster.slurm import expand_nodes
from hpctrain.cluster.slurm_commands import CommandQueue
from hpctrain.errors import LaunchError, QueueError
from tests.unit.slurm_lists import FOLDER, newer_jobs

Give = Callable[[str, str], None]
SCRIPT = "#!/bin/bash\n"


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Give:
    """``give("squeue", "echo 1")`` makes a command of this shell script the only ``squeue`` there is."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def make(command: str, script: str) -> None:
        (folder / command).write_text(f"#!/bin/bash\nPATH=/usr/bin:/bin\n{script}\n")
        (folder / command).chmod(0o755)

    return make


def printing(path: Path) -> str:
    """A shell script that prints a file."""
    return f"cat '{path}'"


# ---- nothing there


def test_without_slurm_a_queue_is_refused_and_the_message_says_what_to_do(give: Give) -> None:
    with pytest.raises(LaunchError) as caught:
        find_queue()
    assert "squeue is not on PATH" in caught.value.what
    assert "mpirun" in caught.value.mend and "module load" in caught.value.mend


CALLS = {
    "squeue": lambda queue: queue.jobs(),
    "sinfo": lambda queue: queue.nodes(),
    "scontrol": lambda queue: queue.partitions(),
    "scontrol ": lambda queue: queue.requeue("1"),
    "sbatch": lambda queue: queue.submit(SCRIPT, Path.cwd()),
    "sbatch ": lambda queue: queue.expect(SCRIPT, Path.cwd()),
    "scancel": lambda queue: queue.cancel("1"),
    "scancel ": lambda queue: queue.signal("1", "USR1"),
}


@pytest.mark.parametrize("command", CALLS)
def test_each_call_names_the_command_that_it_lacks(give: Give, command: str) -> None:
    with pytest.raises(LaunchError) as caught:
        CALLS[command](CommandQueue())
    assert caught.value.what == f"{command.strip()} is not on PATH"
    assert "containers and compute nodes may lack them" in caught.value.why and "PATH" in caught.value.mend


def test_node_lists_are_expanded_without_slurm(give: Give) -> None:
    assert expand_nodes("n[01-03,17],login") == ("n01", "n02", "n03", "n17", "login")


def test_a_script_in_a_folder_that_is_not_there_is_refused(give: Give, tmp_path: Path) -> None:
    give("sbatch", "echo 7")
    with pytest.raises(LaunchError, match="is no folder"):
        CommandQueue().submit(SCRIPT, tmp_path / "nowhere")


# ---- failing


def test_a_command_that_fails_is_told_with_its_words_and_how_to_mend_it(give: Give, tmp_path: Path) -> None:
    give("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    with pytest.raises(QueueError) as caught:
        CommandQueue().submit(SCRIPT, tmp_path)
    assert caught.value.what == "sbatch --parsable failed"
    assert caught.value.why == "Batch job submission failed: Invalid account"
    assert "--account" in caught.value.mend


def test_words_that_are_not_known_are_handed_on(give: Give, tmp_path: Path) -> None:
    give("sbatch", "echo 'sbatch: error: no jobs on Sundays' >&2; exit 1")
    with pytest.raises(QueueError) as caught:
        CommandQueue().expect(SCRIPT, tmp_path)
    assert caught.value.why == "no jobs on Sundays" and "Slurm's own words" in caught.value.mend


def test_a_controller_that_is_down_is_told(give: Give) -> None:
    give("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1")
    with pytest.raises(QueueError) as caught:
        CommandQueue().jobs()
    assert "Unable to contact slurm controller" in caught.value.why and "answers again" in caught.value.mend


def test_a_command_that_does_not_answer_is_given_up(give: Give) -> None:
    give("scancel", "exec sleep 1000")
    with pytest.raises(QueueError, match="scancel 7 did not answer in 1 s") as caught:
        CommandQueue(seconds=1).cancel("7")
    assert "squeue --me" in caught.value.mend


def test_an_id_is_found_among_what_a_site_prints_around_it(give: Give, tmp_path: Path) -> None:
    give("sbatch", "echo Welcome to the 3rd cluster; echo '1234;north'; echo 2 jobs wait")
    assert CommandQueue().submit(SCRIPT, tmp_path) == "1234"


def test_no_id_is_an_error_that_shows_what_was_said(give: Give, tmp_path: Path) -> None:
    give("sbatch", "echo Welcome")
    with pytest.raises(QueueError) as caught:
        CommandQueue().submit(SCRIPT, tmp_path)
    assert "'Welcome'" in caught.value.why and "squeue --me" in caught.value.mend


def test_a_script_reaches_sbatch_as_it_is_with_its_options(give: Give, tmp_path: Path) -> None:
    give("sbatch", f'cat > {tmp_path}/script; echo "$@ in $PWD" > {tmp_path}/options; echo 7')
    script = "#!/bin/bash\n#SBATCH --nodes=2\necho 'ä' \"$HOME\"\n"
    CommandQueue().submit(script, tmp_path, ["--time=5", "--comment=two words"])
    assert (tmp_path / "script").read_text() == script
    assert (tmp_path / "options").read_text() == f"--parsable --time=5 --comment=two words in {tmp_path}\n"


# ---- what is forgotten


def test_an_id_that_slurm_has_forgotten_does_not_hide_the_others(give: Give) -> None:
    """As releases from 23.02 answer: they take the ids, and refuse all when one is unknown."""
    file = FOLDER / "squeue.json"
    bad = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    give("squeue", f'case "$*" in *99*) {bad};; esac; {printing(file)}')
    queue = CommandQueue()
    assert [job.id for job in queue.jobs(["1", "99", "2"])] == ["1", "2"]
    assert queue.job("99") is None


# ---- JSON that is not known, or not there


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('echo \'{"meta": {}, "jobs_of_tomorrow": []}\'', "no list named jobs"),
        ("echo no json", "it is no JSON"),
        ("echo \"squeue: unrecognized option '--json'\" >&2; exit 1", "unrecognized option"),
        ("echo 'squeue: error: Unable to find serializer plugin' >&2; exit 1", "serializer"),
    ],
)
def test_without_json_that_is_known_the_text_tells_the_same_with_one_warning(
    give: Give, script: str, words: str
) -> None:
    give("scontrol", printing(FOLDER / "scontrol-show-job.txt"))
    give("squeue", script)
    told: list[Advice] = []
    queue = CommandQueue(told.append)
    assert sorted(job.id for job in queue.jobs(["4"])) == ["4", "8", "9"]
    assert sorted(job.id for job in queue.jobs()) == [str(number) for number in range(1, 10)]
    (advice,) = told
    assert "squeue --json" in advice.what and words in advice.why and "nothing is lost" in advice.mend


def test_the_warning_of_an_unknown_schema_names_its_version(give: Give, tmp_path: Path) -> None:
    (tmp_path / "later.json").write_text(newer_jobs().replace('"job_state"', '"state"'))
    give("squeue", printing(tmp_path / "later.json"))
    give("scontrol", printing(FOLDER / "scontrol-show-job.txt"))
    told: list[Advice] = []
    assert len(CommandQueue(told.append).jobs()) == 9
    assert "Slurm 24.11.1, plugin data_parser/v0.0.42" in told[0].what


def test_nodes_of_an_unknown_schema_are_read_as_text(give: Give) -> None:
    give("sinfo", "echo '{}'")
    give("scontrol", printing(FOLDER / "scontrol-show-node.txt"))
    told: list[Advice] = []
    assert [node.name for node in CommandQueue(told.append).nodes()] == ["node1", "node2", "node3", "node4"]
    assert len(told) == 1


def test_a_warning_goes_to_the_error_stream_where_nobody_else_takes_it(
    give: Give, capsys: pytest.CaptureFixture[str]
) -> None:
    give("squeue", "echo '{}'")
    give("scontrol", printing(FOLDER / "scontrol-show-job.txt"))
    assert len(find_queue().jobs()) == 9
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hpctrain: warning: squeue --json")
