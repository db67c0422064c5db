"""Batch scripts: texts that a person would write, and what holds of all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.request import Element, Request
from hpctrain.cluster.script import SCRIPTS
from hpctrain.cluster.templates import templates
from hpctrain.plan.machines import find, names
from tests.support.scripts import asked, launch_line, run_bash, shellcheck

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/scripts"

SWEEP = (
    Element("tiny-rate-1e-3", "runs/tiny-rate-1e-3", ("optim.rate=1e-3",)),
    Element("tiny-rate-3e-4", "runs/tiny-rate-3e-4", ("optim.rate=3e-4",)),
)
REQUESTS = {
    "lab.sbatch": asked("lab", "job.nodes=4"),
    "lab-sweep.sbatch": replace(asked("lab", "job.check=false"), elements=SWEEP),
    "lab-chain.sbatch": replace(
        asked("lab", "job.requeue=false", "job.check=false"), finished="runs/tiny/checkpoints/step-00000200.h5"
    ),
    "frontier.sbatch": asked(
        "frontier", "job.nodes=16", "job.spares=2", "job.account=abc123", "job.partition=batch", "job.constraint=nvme",
        'job.environment={NCCL_DEBUG = "WARN"}', "job.time=12:00:00",
    ),
    "perlmutter.sbatch": asked(
        "perlmutter", "job.nodes=8", "job.account=m1234", "job.qos=regular", "job.check=false", "job.memory=220G",
        "data.sources=[{path = '/global/cfs/cdirs/m1234/text'}]",
    ),
    "dgx-container.sbatch": asked(
        "dgx-h100", "job.nodes=4", "job.mpi=pmix", "job.container=/images/hpctrain.sif", "job.binds=['/raid']",
        "run.dir=/lustre/ada/{name}", "job.options=['--exclusive']", "job.check=false",
    ),
    "mpirun.sbatch": asked(None, "job.nodes=2", "job.tasks_per_node=4", "job.launcher=mpirun", "job.check=false"),
    "polaris.pbs": asked("polaris", "job.nodes=4", "job.account=catalyst"),
    "reef.flux": asked("reef", "job.nodes=2", "job.signal_seconds=300"),
}  # fmt: skip
EVERY = pytest.mark.parametrize("asks", REQUESTS.values(), ids=list(REQUESTS))


def text(request: Request) -> str:
    return SCRIPTS[request.system](request)


@pytest.mark.parametrize("name", REQUESTS)
def test_the_script_is_the_one_in_the_golden_file(name: str) -> None:
    assert text(REQUESTS[name]) == (GOLDEN / name).read_text()


def test_the_templates_are_written_by_the_same_code() -> None:
    found = {name: (ROOT / "slurm" / name).read_text() for name in templates()}
    assert found == templates(), "python -m hpctrain.cluster.templates slurm writes them anew"


@pytest.mark.parametrize("script", [*map(text, REQUESTS.values()), *templates().values()])
def test_bash_reads_the_script_and_shellcheck_finds_nothing(script: str) -> None:
    done = run_bash(f"bash -n <<'END OF SCRIPT'\n{script}\nEND OF SCRIPT")
    assert (done.returncode, done.stderr) == (0, "")
    assert shellcheck(script) == ""


@EVERY
def test_the_cores_of_a_rank_stand_once_in_the_command_that_starts_it(asks: Request) -> None:
    line = launch_line(text(asks))
    expected = {"srun": 1, "flux run": 1, "mpiexec": 1, "mpirun": 0}[asks.launcher]
    assert len(re.findall(r"--cpus-per-task|--cores-per-task|--cpu-bind=list|(?<!\w)-c\b", line)) == expected


@pytest.mark.parametrize("name", [name for name in names() if find(name).batch.system != "none"])
def test_every_machine_has_a_script_that_bash_reads(name: str) -> None:
    script = text(asked(name, "job.nodes=2", "job.account=abc123"))
    done = run_bash(f"bash -n <<'END OF SCRIPT'\n{script}\nEND OF SCRIPT")
    assert (done.returncode, done.stderr, "None" in script, "{" in launch_line(script)) == (0, "", False, False)


@EVERY
def test_variables_of_the_machine_leave_what_was_set_before(asks: Request) -> None:
    lines = [line for line in text(asks).splitlines() if line.startswith("export ")]
    for variable in asks.advised:
        line = next(line for line in lines if line.startswith(f"export {variable.name}="))
        assert run_bash(f'{line}\nprintf %s "${variable.name}"', **{variable.name: "mine"}).stdout == "mine"
        assert run_bash(f'{line}\nprintf %s "${variable.name}"').stdout != ""


def test_variables_of_the_configuration_win_over_the_machine_and_the_shell() -> None:
    script = text(asked("frontier", "job.account=a", 'job.environment={NCCL_CROSS_NIC = "0"}'))
    lines = [line for line in script.splitlines() if "NCCL_CROSS_NIC" in line]
    assert lines == ["export NCCL_CROSS_NIC=0"]


def test_variables_for_several_nodes_are_left_out_on_one() -> None:
    one, two = (text(asked("frontier", "job.account=a", f"job.nodes={n}")) for n in (1, 2))
    assert ("export NCCL_NET=" in one, "export NCCL_NET=" in two) == (False, True)


def test_one_spare_node_makes_srun_use_the_nodes_that_the_check_chose() -> None:
    asks = asked("lab", "job.nodes=3", "job.spares=1", "job.tasks_per_node=2")
    assert "#SBATCH --nodes=4\n" in text(asks)
    assert "srun --nodes=3 --ntasks=6 --nodelist=" in launch_line(text(asks))


def test_without_a_check_no_node_is_named() -> None:
    script = text(asked("lab", "job.check=false"))
    assert "preflight" not in script
    assert "--nodelist" not in script


def test_a_job_of_a_chain_is_not_put_back_into_the_queue() -> None:
    script = text(REQUESTS["lab-chain.sbatch"])
    assert "scontrol requeue" not in script
    assert "#SBATCH --requeue" not in script


# ---- values that mean something to a shell

ODD = st.text(st.characters(min_codepoint=32, max_codepoint=0x17F, blacklist_categories=("Cc",)), min_size=1)


@given(ODD)
def test_any_path_reaches_the_program_as_it_is(name: str) -> None:
    place = replace(asked("lab").place, config=f"runs/{name}/job-1.toml")
    line = launch_line(text(asked("lab", "job.check=false", place=place)))
    done = run_bash(f"srun() {{ printf '%s\\n' \"${{@: -1}}\"; }}\n{line}")
    assert done.stdout == f"runs/{name}/job-1.toml\n"


@given(ODD)
def test_any_image_and_folder_reach_the_container_as_they_are(name: str) -> None:
    asks = asked("lab", "job.check=false", "job.container=x.sif")
    asks = replace(asks, image=replace(asks.image, path=f"/{name}.sif", binds=(f"/{name}",)))
    done = run_bash("srun() { printf '%s\\n' \"$@\"; }\n" + launch_line(text(asks)))
    assert done.stdout.endswith(
        f"apptainer\nexec\n--bind\n/{name}\n/{name}.sif\nhpctrain\ntrain\nruns/tiny/job-1.toml\n"
    )


@given(ODD)
def test_any_value_of_the_configuration_reaches_the_environment_as_it_is(value: str) -> None:
    literal = re.sub(r"\$(?=[A-Za-z_{])", "$ ", value)
    asks = replace(asked("lab"), own=tuple(replace(v, value=literal) for v in VARIABLE), advised=())
    line = next(line for line in text(asks).splitlines() if "export ODD=" in line)
    assert run_bash(f'{line}\nprintf %s "$ODD"').stdout == literal


@given(ODD)
def test_any_value_of_the_machine_reaches_the_environment_as_it_is(value: str) -> None:
    literal = re.sub(r"\$(?=[A-Za-z_{])", "$ ", value)
    asks = replace(asked("lab"), advised=tuple(replace(v, value=literal) for v in VARIABLE))
    line = next(line for line in text(asks).splitlines() if "export ODD=" in line)
    assert run_bash(f'{line}\nprintf %s "$ODD"').stdout == literal


VARIABLE = asked("lab", 'job.environment={ODD = "x"}').own


@pytest.mark.parametrize("kind", ["own", "advised"])
def test_variables_in_a_value_are_filled_in_by_the_job(kind: str) -> None:
    given_ = tuple(replace(v, value="$HOME/a b:${HOME}") for v in VARIABLE)
    asks = replace(asked("lab"), **{"own": (), "advised": (), kind: given_})
    line = next(line for line in text(asks).splitlines() if "export ODD=" in line)
    assert run_bash(f'{line}\nprintf %s "$ODD"', HOME="/h").stdout == "/h/a b:/h"


def test_a_value_with_quotes_and_blanks_is_one_word_for_the_batch_system() -> None:
    script = text(asked("lab", "run.name='a \"b\" #c'"))
    assert '#SBATCH --job-name="a \\"b\\" #c"\n' in script


# ---- what the script does, with programs that stand for Slurm's

STAND_INS = """
srun() {{ {srun}; }}
timeout() {{ {answers}; }}
hpctrain() {{ {hpctrain}; }}
scontrol() {{ echo "scontrol $*"; {scontrol}; }}
SLURM_JOB_ID=7
"""


def play(
    name: str, cwd: Path, srun: str = "exit 0", hpctrain: str = "true", scontrol: str = "true", answers: str = "true"
):
    """Run a golden script's body in a folder that has the run's."""
    (cwd / "runs/tiny").mkdir(parents=True, exist_ok=True)
    head = STAND_INS.format(srun=srun, hpctrain=hpctrain, scontrol=scontrol, answers=answers)
    return run_bash(head + text(REQUESTS[name]), cwd=cwd, SLURM_CPUS_PER_TASK="4")


@pytest.mark.parametrize(("status", "said"), [(0, ""), (1, ""), (75, "scontrol requeue 7\n"), (143, "")])
def test_the_script_ends_as_the_launcher_did_and_only_75_is_put_back(status: int, said: str, tmp_path: Path) -> None:
    done = play("lab.sbatch", tmp_path, srun=f"exit {status}")
    assert (done.returncode, done.stdout, done.stderr) == (status, said, "")


@pytest.mark.parametrize(("status", "back"), [(0, False), (1, True), (2, False), (75, True), (137, True)])
def test_a_run_that_failed_while_a_node_does_not_answer_is_put_back(status: int, back: bool, tmp_path: Path) -> None:
    asked = 'echo "$*" > asked; return 1'
    done = play("lab.sbatch", tmp_path, srun=f"exit {status}", answers=asked)
    assert done.stdout == "scontrol requeue 7\n" * back
    assert done.returncode == (75 if back else status)
    assert ("a node of the job does not answer" in done.stderr) == (status in (1, 137))
    assert (tmp_path / "asked").exists() == (status in (1, 137))


def test_a_file_no_requeue_keeps_the_job_out_of_the_queue(tmp_path: Path) -> None:
    (tmp_path / "runs/tiny").mkdir(parents=True)
    (tmp_path / "runs/tiny/no-requeue").touch()
    done = play("lab.sbatch", tmp_path, srun="exit 75")
    assert (done.returncode, done.stdout) == (75, "")
    assert "runs/tiny/no-requeue: not handed in again" in done.stderr


def test_a_job_that_cannot_be_put_back_says_how_to_hand_it_in(tmp_path: Path) -> None:
    done = play("lab.sbatch", tmp_path, srun="exit 75", scontrol="return 1")
    assert done.returncode == 75
    assert "by hand: sbatch runs/tiny/job-1.sbatch" in done.stderr


def test_a_signal_is_handed_on_and_the_status_is_still_the_launchers(tmp_path: Path) -> None:
    waits = "trap 'echo heard; exit 75' USR1; kill -USR1 $$; while :; do sleep 0.05; done"
    done = play("lab.sbatch", tmp_path, srun=waits)
    assert done.returncode == 75
    assert done.stdout == "heard\nscontrol requeue 7\n"


def test_too_few_good_nodes_put_the_job_back_three_times_and_no_more(tmp_path: Path) -> None:
    ends = [play("frontier.sbatch", tmp_path, hpctrain="return 1", srun="echo never") for _ in range(4)]
    assert [end.returncode for end in ends] == [1, 1, 1, 1]
    assert [end.stdout for end in ends] == ["scontrol requeue 7\n"] * 3 + [""]


def test_a_check_that_could_not_be_made_ends_the_job(tmp_path: Path) -> None:
    done = play("frontier.sbatch", tmp_path, hpctrain="return 2", srun="echo never")
    assert (done.returncode, done.stdout) == (2, "")


def test_a_job_of_a_chain_ends_at_once_when_the_run_is_complete(tmp_path: Path) -> None:
    (tmp_path / "runs/tiny/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/tiny/checkpoints/step-00000200.h5").touch()
    done = play("lab-chain.sbatch", tmp_path, srun="echo never")
    assert (done.returncode, done.stdout) == (
        0,
        "runs/tiny/checkpoints/step-00000200.h5 is there: nothing is left to do\n",
    )


@pytest.mark.parametrize("number", [0, 1])
def test_each_job_of_a_sweep_has_its_own_name_and_settings(number: int, tmp_path: Path) -> None:
    script = (
        "srun() { printf '%s ' \"$@\"; }\nSLURM_ARRAY_TASK_ID=" + f"{number}\n" + text(REQUESTS["lab-sweep.sbatch"])
    )
    done = run_bash(script, cwd=tmp_path, SLURM_CPUS_PER_TASK="4")
    own = SWEEP[number]
    assert done.stdout.endswith(f"job-1.toml --set run.name={own.name} --set {own.settings[0]} ")
