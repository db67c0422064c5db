"""What a job is asked for: decided from the configuration and the machine, and what is refused before anybody waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.request import clock, request, seconds
from hpctrain.config import parse
from hpctrain.errors import ConfigError, UsageError
from hpctrain.plan.machine import Batch, Device, Machine, Node
from tests.support.scripts import PLACE, asked


def test_a_rank_is_started_for_each_device_and_gets_its_share_of_the_cores() -> None:
    found = asked("frontier", "job.account=a")
    assert (found.tasks_per_node, found.cpus_per_task) == (8, 7)
    found = asked("perlmutter", "job.account=a", "job.tasks_per_node=2")
    assert (found.tasks_per_node, found.cpus_per_task) == (2, 64)


def test_without_a_machine_it_is_what_the_configuration_says() -> None:
    found = asked(None, "job.tasks_per_node=3", "job.nodes=2", "job.options=['--gpus-per-node=3']")
    assert (found.system, found.launcher, found.tasks, found.cpus_per_task) == ("slurm", "srun", 6, None)
    assert found.options == ("--gpus-per-node=3",)


def test_options_of_the_machine_know_its_devices_and_the_nodes() -> None:
    assert asked("lab").options == ("--gpus-per-node=4",)
    found = request(parse({"job": {"nodes": 7}}), POOL, PLACE)
    assert found.options == ("-l select=7:ngpus=2",)


def test_options_for_the_machines_launcher_are_not_given_to_another() -> None:
    assert asked("frontier", "job.account=a").launch != ()
    assert asked("frontier", "job.account=a", "job.launcher=mpirun").launch == ()


def test_the_container_sees_the_folders_of_the_job_its_run_and_its_data() -> None:
    found = asked(
        "lab", "job.container=i.sif", "run.dir=/lustre/run", "job.binds=['/raid']",
        "data.sources=[{path = '/data/a'}, {path = '/data/b'}, {path = 'tokens/c'}]",
    )  # fmt: skip
    assert found.image.binds == ("/home/ada/project", "/lustre/run", "/data", "/raid")


def test_the_check_is_made_when_there_are_spare_nodes_also_where_it_was_turned_off() -> None:
    assert asked("lab", "job.check=false", "job.spares=1", "job.nodes=2").check
    assert not asked("lab", "job.check=false").check


@pytest.mark.parametrize(
    ("signals", "warning"),
    [(["TERM", "USR1"], "USR1"), (["SIGUSR2"], "USR2"), (["TERM"], None)],
)
def test_the_warning_is_a_signal_that_the_run_listens_to_and_never_the_one_that_cancels(signals, warning) -> None:
    assert asked("lab", f"run.stop_signals={signals}").warning == warning


def test_no_warning_is_asked_for_with_zero_seconds() -> None:
    assert asked("lab", "job.signal_seconds=0").warning is None


POOL = Machine(
    name="pool",
    node=Node(devices=2, cores=8, memory_gib=64),
    device=Device(name="A10", kind="cuda", memory_gib=24),
    batch=Batch(system="pbs", launcher="mpiexec", account=False, options=("-l select={nodes}:ngpus={devices}",)),
)


# ---- time


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 5400), ("1:30:00", 5400), ("00:00:30", 30), ("2-12", 216000), ("1-00:00:01", 86401), ("100:00:00", 360000)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(time: str, expected: int) -> None:
    assert seconds(time) == expected


@given(st.integers(0, 10**6))
def test_a_time_limit_is_written_so_that_it_reads_the_same(number: int) -> None:
    assert seconds(clock(number)) == number


@pytest.mark.parametrize("override", ["job.time=12:00:00", "job.time=720", 'job.time="0-12"', "job.time=0-12"])
def test_a_time_needs_no_quotes_on_the_command_line(override: str) -> None:
    assert seconds(parse({}, (override,)).job.time) == 12 * 3600


@pytest.mark.parametrize("time", ["12:00", "1h", "", "1:2:3", "-5"])
def test_a_time_that_may_mean_two_things_or_nothing_is_refused(time: str) -> None:
    with pytest.raises(ConfigError, match="job.time"):
        parse({"job": {"time": time}})


@pytest.mark.parametrize("key", ["job.tasks_per_node", "job.cpus_per_task"])
def test_a_number_of_ranks_or_cores_is_auto_or_at_least_one(key: str) -> None:
    assert getattr(parse({}, (f"{key}=auto",)).job, key.removeprefix("job.")) == "auto"
    with pytest.raises(ConfigError, match=f"{key} = 0 cannot be\\n  it should be at least 1"):
        parse({}, (f"{key}=0",))


# ---- what is refused

REFUSED = {
    "no machine": (
        (None,),
        'job.tasks_per_node = "auto", and no machine says how many devices a node has\n'
        "  one rank is started for each of them\n"
        "  set job.machine, or job.tasks_per_node",
    ),
    "no account": (
        ("frontier",),
        "job.account is not given, and Frontier wants to know who pays\n"
        "  a job without an account is refused there\n"
        "  give --account NAME, or set job.account",
    ),
    "too many nodes": (
        ("lab", "job.nodes=3", "job.spares=2"),
        "job.nodes = 3 and job.spares = 2: lab has 4 nodes\n  ask for no more than that",
    ),
    "too many ranks": (
        ("perlmutter", "job.account=a", "job.tasks_per_node=8"),
        "job.tasks_per_node = 8: a node of Perlmutter has 4 devices\n"
        "  each rank computes on a device of its own\n"
        "  at most 4",
    ),
    "too many cores": (
        ("lab", "job.cpus_per_task=5"),
        '4 ranks with 5 cores each are 20 on a node\n  a node of lab gives a job 16\n  set job.cpus_per_task to "auto"',
    ),
    "warned at the start": (
        ("lab", "job.time=2"),
        "job.signal_seconds = 120 is not less than job.time, 0:02:00\n"
        "  the job would be told to stop as it starts\n"
        "  set job.signal_seconds lower, or to 0",
    ),
    "spares without srun": (
        ("lab", "job.spares=1", "job.nodes=2", "job.launcher=mpirun"),
        "job.spares = 1, and mpirun of slurm starts the ranks\n"
        "  only srun is told which of a job's nodes to use\n"
        "  set job.spares to 0",
    ),
    "no such option": (
        ("polaris", "job.account=a", "job.qos=high"),
        "job.qos = 'high', and pbs has no option of that meaning\n"
        "  it would be passed over\n"
        "  write it as the site wants it, into job.options",
    ),
    "srun without Slurm": (
        ("polaris", "job.account=a", "job.launcher=srun"),
        'job.launcher = "srun" on Polaris, which has pbs\n'
        "  srun starts ranks in jobs of Slurm\n"
        '  set job.launcher to "auto"',
    ),
    "a second line": (
        ("lab", 'job.account="a\\n#SBATCH --nodes=9"'),
        "job.account = 'a\\n#SBATCH --nodes=9' has a character that cannot be printed\n"
        "  each is a word on one line of the batch script\n"
        "  take it out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_machine_cannot_give_is_refused_with_its_mend(case: str) -> None:
    words, told = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        asked(*words)
    assert str(error.value) == told


def test_an_account_of_the_environment_is_one() -> None:
    assert asked("frontier", SBATCH_ACCOUNT="abc123").account is None


def test_a_machine_without_a_batch_system_is_told_how_to_start() -> None:
    with pytest.raises(UsageError) as error:
        asked("laptop")
    assert str(error.value) == (
        "laptop has no batch system\n"
        "  there is no queue to hand a job to\n"
        "  start it yourself: mpirun -n RANKS hpctrain train CONFIG; or name another --machine"
    )
