"""The matrix of parity: every two choices meet, and a run that is wrong is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.config import ParallelConfig
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.parallel.recompute import KINDS
from hpctrain.plan.formats import FORMATS
from hpctrain.plan.units import STAGES
from hpctrain.schedule.kinds import SCHEDULES
from tests.support import grids
from tests.support.matrix import AXES, BOUNDS, PRECISIONS, ROWS, knobs, on_one_rank, possible, too_far
from tests.support.pairs import met, pairs_of
from tests.support.runs import small_config


def test_every_two_choices_meet_but_bf16_states_of_other_optimizers() -> None:
    left_out = set(pairs_of(AXES)) - {pair for row in ROWS for pair in met(row)}
    others = [kind for kind in OPTIMIZERS if kind != "adamw"]
    assert left_out == {frozenset({("states", "bf16"), ("optimizer", kind)}) for kind in others}
    assert all(possible(row) for row in ROWS)


def test_nothing_that_there_is_to_choose_is_left_out() -> None:
    assert AXES["zero"] == list(STAGES) and AXES["optimizer"] == list(OPTIMIZERS)
    assert {kind.partition(":")[0] for kind in AXES["recompute"]} == set(KINDS)
    assert set(FORMATS) < set(AXES["precision"]) and BOUNDS.keys() == PRECISIONS.keys()


@pytest.mark.parametrize("row", ROWS[:1])
def test_a_row_is_a_configuration(row: dict[str, object], tmp_path: Path) -> None:
    config = small_config(tmp_path, *knobs(row | {"zero": 2, "shard": 2, "dropout": 0.1}))
    assert (config.parallel.zero, config.parallel.shard, config.model.dropout) == (2, 2, 0.1)
    assert on_one_rank(config).parallel == ParallelConfig() and on_one_rank(config).model == config.model


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_wrong_gradient_is_seen_in_every_precision(precision: str) -> None:
    row = ROWS[0] | {"precision": precision}
    right = {"loss and norm": torch.ones(2), "model/w": torch.ones(1000), "gradient/w": torch.randn(1000)}
    assert too_far(right, right, row) == {}
    assert too_far(right | {"gradient/w": right["gradient/w"] * 1.1}, right, row).keys() == {"gradient"}
    assert too_far(right | {"model/w": right["model/w"] * torch.nan}, right, row).keys() == {"model"}


# ---- the matrix of meshes


def test_every_schedule_every_mesh_and_every_choice_of_the_other_matrix_is_in_a_run() -> None:
    found = {axis: {row[axis] for row in grids.ROWS} for axis in grids.AXES}
    assert all(found[axis] == set(values) for axis, values in grids.AXES.items())
    kinds = {made[0].partition("=")[2] if made else "1f1b" for made in grids.SCHEDULES.values()}
    assert kinds == set(SCHEDULES)
    assert all(AXES[axis] == grids.AXES[axis] for axis in ("precision", "recompute", "zero", "dropout"))


def test_each_schedule_meets_each_pipeline_precision_recomputation_and_stage() -> None:
    pairs = {pair for row in grids.ROWS for pair in met(row)}
    pipelines = [mesh for mesh, (pp, _, _) in grids.MESHES.items() if pp > 1]
    plain = [precision for precision in PRECISIONS if not precision.startswith("fp8")]
    for schedule in grids.SCHEDULES:
        others = {"mesh": pipelines, "precision": [*plain, grids.FP8[schedule]]}
        more = ("recompute", "zero", "optimizer", "model", "microbatch", "layers")
        others |= {axis: grids.AXES[axis] for axis in more}
        for axis, values in others.items():
            missing = [x for x in values if frozenset({("schedule", schedule), (axis, x)}) not in pairs]
            assert not missing, (schedule, axis)


@pytest.mark.parametrize("row", grids.ROWS, ids=lambda row: row["mesh"])
def test_a_row_of_meshes_is_a_configuration_of_as_many_ranks(row: dict[str, object], tmp_path: Path) -> None:
    parallel = small_config(tmp_path, *grids.SIZES, *grids.knobs(row)).parallel
    assert parallel.pp * parallel.dp * parallel.tp == grids.ranks_of(row)
