"""The command that says what orders of ranks are worth."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.bench.place import LAYOUTS, Row, run
from hpctrain.cli import app
from hpctrain.config import load
from tests.unit.slurm_dumps import tasks

CONFIG = Path(__file__).parents[2] / "configs/llama-8b.toml"


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return run(load(CONFIG), "frontier")


@pytest.mark.parametrize("scenario", LAYOUTS)
def test_layouts_are_those_that_slurm_gave(scenario: str) -> None:
    nodes = [environ["SLURMD_NODENAME"].removeprefix("node") for _, environ in sorted(tasks(scenario))]
    assert "".join(nodes) == LAYOUTS[scenario]


def test_no_order_sends_more_over_the_farthest_links_than_the_one_given(rows: list[Row]) -> None:
    assert {row.leaving for row in rows} == {"node", "switch", "group"}
    assert all(row.placed_gib <= row.given_gib for row in rows)


def test_ranks_in_blocks_stay_and_ranks_dealt_out_in_turn_send_a_tenth(rows: list[Row]) -> None:
    blocks, cyclic = ([row for row in rows if row.job == job] for job in ("4x4", "4x4-cyclic"))
    assert [row.part for row in blocks] == [1.0] * 4
    assert all(row.part < 0.15 for row in cyclic)
    assert [row.placed_gib for row in cyclic] == [row.given_gib for row in blocks]


def test_the_command_tells_both_as_json() -> None:
    words = ["bench", "place", str(CONFIG), "--ranks", "2048", "--set", "train.batch=2048", "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    told = json.loads(done.stdout)
    assert len(told["orders"]) > 10
    assert [one["part"] for one in told["parts"]][-1] == "all of it"
    assert {one["ranks"] for one in told["parts"]} == {2048}
