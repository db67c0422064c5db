"""What a machine says of a plan, and what it fills in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.config import CheckpointConfig, Config, load, parse
from hpctrain.plan.fit import GIB, fit, hinted, open_hints, room_gib
from hpctrain.plan.machine import Machine, Storage
from hpctrain.plan.machines import find, topology_of
from hpctrain.plan.plan import Plan, decide

ROOT = Path(__file__).resolve().parents[2]
MODEL = {"layers": 4, "width": 64, "heads": 4, "sequence": 16, "vocabulary": 128}


def planned(machine: Machine, nodes: int, tasks: int, **sections: dict[str, Any]) -> tuple[Plan, Plan, Config]:
    """The plan without the machine and with it, and the configuration."""
    config = parse({"model": MODEL, "train": {"batch": nodes * tasks}, **sections})
    plan = decide(config, topology_of(machine, nodes, tasks), 128)
    return plan, fit(plan, config, machine), config


def told(machine: Machine, nodes: int, tasks: int, **sections: dict[str, Any]) -> list[str]:
    """What the machine says."""
    plan, fitted, _ = planned(machine, nodes, tasks, **sections)
    return list(fitted.reasons[len(plan.reasons) :])


def test_only_reasons_differ_on_a_machine() -> None:
    plan, fitted, config = planned(find("frontier"), 2, 8)
    assert fitted.reasons[: len(plan.reasons)] == plan.reasons
    assert fitted.to_json() | {"reasons": []} == plan.to_json() | {"reasons": []}
    assert fit(plan, config, None) == plan


@pytest.mark.parametrize(
    ("name", "tasks", "gib"),
    [
        ("frontier", 8, 64),
        ("frontier", 4, 64),  # a rank has one device, also where others are idle
        ("frontier", 16, 32),
        ("laptop", 4, 4),
        ("laptop", 1, 16),
    ],
)
def test_a_rank_has_a_device_or_its_share(name: str, tasks: int, gib: float) -> None:
    assert room_gib(find(name), tasks) == gib


def test_what_a_rank_holds_is_told_beside_what_it_has() -> None:
    config = load(ROOT / "configs/llama-70b-3d.toml")
    machine = find("frontier")
    plan = fit(decide(config, topology_of(machine, 64, 8), 128256), config, machine)
    held = sum(plan.bytes.values()) / GIB
    assert f"a rank holds {held:.1f} of 64 GiB on Frontier's MI250X GCD; activations come on top" in plan.reasons


def test_a_plan_that_does_not_fit_is_told_so() -> None:
    config = load(ROOT / "configs/llama-70b-3d.toml", ("parallel.pp=1", "parallel.tp=1", "parallel.zero=0"))
    machine = find("perlmutter")
    plan = fit(decide(config, topology_of(machine, 2, 4), 128256), config, machine)
    held = f"{sum(plan.bytes.values()) / GIB:,.1f}"
    assert (
        f"a rank holds {held} GiB, and has 40 on Perlmutter's A100 40GB: it does not fit; "
        "share more (parallel.zero, pp, tp), or take more ranks"
    ) in plan.reasons


def test_ranks_that_share_a_device_or_a_node_are_told_so() -> None:
    assert "of 32 GiB on a node of Frontier, shared by 16" in told(find("frontier"), 1, 16)[0]
    assert "of 8 GiB on a node of laptop, shared by 2" in told(find("laptop"), 1, 2)[0]


def test_advice_about_storage_is_told() -> None:
    assert told(find("vista"), 2, 1)[-1] == f"where checkpoints go, vast of Vista: {find('vista').storage.advice}"


# ---- hints for MPI-IO


@pytest.fixture
def machine() -> Machine:
    storage = Storage(kind="lustre", hints={"striping_factor": 32, "cb_nodes": 8})
    return find("lumi-g").model_copy(update={"storage": storage})


def test_hints_of_the_run_go_before_those_of_the_machine(machine: Machine) -> None:
    own = CheckpointConfig(hints={"cb_nodes": 2, "romio_cb_write": "enable"}, keep=7)
    assert hinted(own, machine) == own.model_copy(
        update={"hints": {"striping_factor": 32, "cb_nodes": 2, "romio_cb_write": "enable"}}
    )


@pytest.mark.parametrize("storage", [None, Storage(kind="gpfs")])
def test_a_machine_without_hints_changes_none(machine: Machine, storage: Storage | None) -> None:
    own = CheckpointConfig(hints={"cb_nodes": 2})
    assert hinted(own, machine.model_copy(update={"storage": storage})) == own
    assert hinted(own, None) == own
    assert open_hints({}, None) == {}


def test_hints_that_the_machine_fills_in_are_told_where_they_are_used(machine: Machine) -> None:
    own = {"hints": {"cb_nodes": 2}}
    line = "checkpoint.hints of LUMI-G: striping_factor = 32"
    assert line in told(machine, 1, 8, checkpoint={"writer": "mpio", **own})
    assert line not in told(machine, 1, 8, checkpoint=own)
    every = {"hints": {"cb_nodes": 2, "striping_factor": 1}}
    assert not [line for line in told(machine, 1, 8, checkpoint={"writer": "mpio", **every}) if "hints" in line]
