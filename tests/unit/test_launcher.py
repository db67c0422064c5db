"""Which launcher is believed, and what it says, in environments of every kind."""

from __future__ import annotations

import pytest

from hpctrain.cluster import door
from hpctrain.cluster.launcher import LAUNCHERS, Launch, claims, first_rank, launch
from hpctrain.cluster.start import job_key, prepare
from hpctrain.errors import LaunchError
from tests.unit.slurm_dumps import SCENARIOS, shells, tasks

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL = MPICH | {"I_MPI_HYDRA_HOST_FILE": "x"}
PALS = {"PALS_RANKID": "3", "PMI_RANK": "3", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (OPEN_MPI, "mpirun of Open MPI"),
        (MPICH, "mpiexec of MPICH or Intel MPI"),
        (INTEL, "mpiexec of MPICH or Intel MPI"),
        (PALS, "mpiexec of PALS"),
        (SLURM, "srun"),
    ],
)
def test_each_launcher_says_rank_and_size_in_its_own_words(environ: dict[str, str], launcher: str) -> None:
    said = launch(environ)
    assert said.launcher == launcher
    assert (said.rank, said.size, said.local_rank, said.local_size) == (3, 4, 1, 2)
    assert all(fact.source in environ for fact in said.facts)


def test_flux_does_not_say_how_many_ranks_a_node_has() -> None:
    said = launch(FLUX)
    assert (said.launcher, said.rank, said.size, said.local_rank, said.local_size) == ("flux", 3, 4, 1, None)


@pytest.mark.parametrize(("node", "ranks_there"), [("0", 2), ("2", 2), ("3", 1)])
def test_nodes_may_have_different_numbers_of_ranks(node: str, ranks_there: int) -> None:
    uneven = {"SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NUM_TASKS": "7", "SLURM_NODEID": node}
    assert launch(SLURM | uneven).local_size == ranks_there


def test_a_process_that_nobody_launched_is_alone() -> None:
    assert launch({"PATH": "/bin"}) == Launch("none")


def test_mpirun_wins_over_the_step_that_carries_it() -> None:
    daemons = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for ranks in (OPEN_MPI, MPICH):
        found = claims(ranks | SLURM | daemons)
        assert (found[0].rank, found[0].size) == (3, 4)
        assert (found[1].launcher, found[1].size) == ("srun", 2)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_real_ranks_are_recognised_whoever_started_them(scenario: str) -> None:
    expected = {"alloc-2x2-mpich5-mpiexec": "mpiexec of MPICH or Intel MPI"}.get(scenario, "mpirun of Open MPI")
    for rank, environ in tasks(scenario):
        said = launch(environ)
        assert (said.launcher, said.rank) == (expected if scenario.startswith("alloc-") else "srun", rank)
        assert said.local_rank < said.local_size <= said.size
    for environ in shells(scenario):
        assert launch(environ) == Launch("none")


@pytest.mark.parametrize(
    ("extra", "is_rank"),
    [({}, False), ({"SLURM_STEP_ID": "0"}, True), ({"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "bash"}, True)],
)
def test_a_step_makes_a_rank_and_a_name_does_not(extra: dict[str, str], is_rank: bool) -> None:
    shell = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "bash", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert (launch(shell | extra).launcher == "srun") is is_rank


@pytest.mark.parametrize("names", LAUNCHERS, ids=lambda names: names.launcher)
def test_a_rank_that_is_no_number_is_named(names) -> None:
    environ = {names.rank[0]: "three", names.size[0]: "4"}
    with pytest.raises(LaunchError, match=f"{names.rank[0]} = 'three' is not a number"):
        launch(environ)


@pytest.mark.parametrize(("rank", "first"), [("0", True), ("3", False)])
def test_before_they_meet_the_first_rank_speaks(monkeypatch: pytest.MonkeyPatch, rank: str, first: bool) -> None:
    for name, value in (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": rank}).items():
        monkeypatch.setenv(name, value)
    assert first_rank() is first


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_as_many_ranks_as_the_launcher_started_are_welcome() -> None:
    door.check_size(launch(OPEN_MPI), 4, "Open MPI v4.1.4, package: Debian")
    door.check_size(launch({}), 1, "Open MPI v4.1.4")


@pytest.mark.parametrize(
    ("environ", "advice"),
    [(SLURM, "srun --mpi=pmix"), (OPEN_MPI, "mpirun that belongs"), (MPICH, "mpirun that belongs")],
)
def test_ranks_that_each_believe_to_be_alone_are_refused(environ: dict[str, str], advice: str) -> None:
    with pytest.raises(LaunchError) as caught:
        door.check_size(launch(environ), 1, "MPICH Version:\t5.0.2\nMPICH Release date: x")
    assert "started 4 ranks" in caught.value.what and "this process is alone" in caught.value.what
    assert "MPICH Version" in caught.value.why and "4 separate runs" in caught.value.why
    assert advice in caught.value.mend and caught.value.exit_code == 2
    assert ("--mpi=list" in caught.value.mend) is (environ is SLURM)


def test_two_sources_that_disagree_are_refused_with_both_numbers() -> None:
    with pytest.raises(LaunchError) as caught:
        door.check_size(launch(SLURM), 8, "Open MPI v4.1.4")
    assert "MPI counts 8 ranks" in caught.value.what and "SLURM_STEP_NUM_TASKS = 4" in caught.value.what
    assert "unset SLURM_STEP_NUM_TASKS" in caught.value.mend


OWN = {"node7", "localhost", "127.0.0.1", "10.0.0.7"}


@pytest.mark.parametrize(
    ("given", "addresses", "nodes"),
    [
        ("node7", {"10.0.0.7"}, 2),
        ("10.0.0.7", {"10.0.0.7"}, 2),
        ("node7-ib", {"10.0.0.7"}, 2),
        ("localhost", {"127.0.0.1"}, 1),
    ],
)
def test_a_master_address_of_rank_0s_node_is_welcome(given: str, addresses: set[str], nodes: int) -> None:
    door.check_master_addr(given, addresses, "node7", OWN, nodes)


@pytest.mark.parametrize(
    ("given", "addresses", "nodes"),
    [("node8", {"10.0.0.8"}, 2), ("node9", set(), 2), ("localhost", {"127.0.0.1"}, 2), ("127.0.0.2", {"127.0.0.2"}, 1)],
)
def test_a_master_address_elsewhere_is_refused_with_both_hosts(given: str, addresses: set[str], nodes: int) -> None:
    with pytest.raises(LaunchError) as caught:
        door.check_master_addr(given, addresses, "node7", OWN, nodes)
    assert given in caught.value.what and "node7" in caught.value.what
    assert "unset MASTER_ADDR" in caught.value.mend and "comm.check_master_addr" in caught.value.mend


def test_a_port_that_differs_is_refused_with_who_has_which() -> None:
    door.check_equal("MASTER_PORT", ["29500"] * 4)
    door.check_equal("MASTER_PORT", [None] * 4)
    with pytest.raises(
        LaunchError, match=r"MASTER_PORT differs between ranks \(rank 0: 29500, rank 2: 29501, rank 3: unset\)"
    ):
        door.check_equal("MASTER_PORT", ["29500", "29500", "29501", None])


# ---- before MPI starts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cores", "set_to"), [(1, "1"), (2, None), (8, None)])
def test_waiting_ranks_give_their_core_away_where_cores_are_short(cores: int, set_to: str | None) -> None:
    environ: dict[str, str] = {}
    prepare(environ, launch(OPEN_MPI), cores)
    assert environ.get("OMPI_MCA_mpi_yield_when_idle") == set_to


def test_a_users_own_choice_of_yielding_stays() -> None:
    environ = {"OMPI_MCA_mpi_yield_when_idle": "0"}
    prepare(environ, launch(OPEN_MPI), 1)
    assert environ["OMPI_MCA_mpi_yield_when_idle"] == "0"


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name.startswith(("4x4", "salloc", "2x2", "alloc"))])
def test_ranks_of_a_job_know_each_other_and_those_of_another_job_apart(scenario: str) -> None:
    keys = {job_key(environ, parent=1) for _, environ in tasks(scenario)}
    assert len(keys) == 1
    assert keys.isdisjoint(job_key(environ | {"SLURM_JOB_ID": "99"}, parent=1) for _, environ in tasks(scenario))
    assert job_key(MPICH, parent=1) != job_key(MPICH, parent=2)
