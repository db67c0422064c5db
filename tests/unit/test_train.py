"""What a run says of itself at its beginning and at its end."""

from __future__ import annotations

from hpctrain.config import parse
from hpctrain.plan.plan import decide
from hpctrain.plan.topology import Topology
from hpctrain.train import greeting, parting

CONFIG = parse({"model": {"vocabulary": 256}})
PLAN = decide(CONFIG, Topology(("node1",)), 256)
AGAIN = {"SLURM_JOB_ID": "123", "SLURM_RESTART_COUNT": "1"}


def test_a_new_run_shows_its_plan_and_one_that_goes_on_its_step() -> None:
    assert greeting(CONFIG, PLAN, 0, {}) == PLAN.show()
    assert greeting(CONFIG, PLAN, 40, {}) == "going on from step 40"


def test_a_job_that_was_started_again_says_which_life_it_is_in() -> None:
    assert greeting(CONFIG, PLAN, 40, AGAIN) == "life 2 (restart 1 of job 123), going on from step 40"
    assert greeting(CONFIG, PLAN, 0, AGAIN) == f"life 2 (restart 1 of job 123), from the beginning\n{PLAN.show()}"


def test_a_run_that_stops_says_why_and_how_to_go_on() -> None:
    told = parting(40, "signal USR1 at rank 3")
    assert told == "stopped after step 40: signal USR1 at rank 3; start the same command again to go on"
