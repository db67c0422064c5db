"""The benchmarks' parts that need no ranks: what is refused, what a process's accounts say, and how they are summed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from hpctrain.bench.ckpt import CUTS, Plan, check, layouts
from hpctrain.bench.deepspeed import load_deepspeed, settings
from hpctrain.bench.footprint import watch
from hpctrain.bench.memory import Row, run, table
from hpctrain.bench.step import contestant
from hpctrain.cli.bench import _pairs
from hpctrain.config import Config, ModelConfig, parse
from hpctrain.errors import ConfigError, UsageError
from hpctrain.plan.weights import ModelShape

MIB = 2**20
SHAPE = ModelShape.of(ModelConfig(layers=2, width=16, heads=2, sequence=8), 32)


def test_an_unknown_contestant_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="--against zero-4: not a known peer\n  take some of one, apart, hpctrain, zer"
    ):
        contestant("zero-4")


def test_deepspeed_that_is_not_installed_is_told_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ConfigError) as caught:
        load_deepspeed(0)
    assert caught.value.what.startswith("--against deepspeed: ")
    assert caught.value.mend == "install it: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed"


def test_a_package_that_is_missing_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ConfigError, match="--against deepspeed: No module named 'deepspeed'"):
        run(tmp_path / "there is none.toml", 2, "no-launcher {ranks}", ("zero-0", "deepspeed-1"), 1)


@pytest.mark.parametrize("compute", ["fp16", "fp64"])
def test_deepspeed_is_not_compared_in_formats_that_differ(compute: str) -> None:
    config = parse({"precision": {"compute": compute}})
    with pytest.raises(ConfigError, match=f'precision.compute = "{compute}" does not go with --against deepspeed'):
        settings(config, SHAPE, 2, 1)


@pytest.mark.parametrize(("batch", "ranks", "microbatch", "accumulated"), [(16, 2, 4, 2), (16, 4, 4, 1), (4, 4, 1, 1)])
def test_deepspeed_takes_the_micro_batches_that_we_take(
    batch: int, ranks: int, microbatch: int, accumulated: int
) -> None:
    config = parse({"train": {"batch": batch, "microbatch": 4}})
    found = settings(config, SHAPE, ranks, 3)
    assert found["train_micro_batch_size_per_gpu"] == microbatch
    assert found["gradient_accumulation_steps"] == accumulated
    assert found["gradient_clipping"] == Config().optim.clip


def test_a_process_sees_its_own_peak_and_then_begins_anew() -> None:
    with watch() as look:
        before = look()
        torch.ones(64 * MIB)  # 256 MiB, and gone again
        peak, after = look(), look()
    assert 250 * MIB < peak[0] - before[0]
    assert after[0] < before[0] + 50 * MIB
    assert all(bytes > 0 for bytes in (*before, *peak, *after))


def test_rows_have_the_rank_that_has_most_and_the_sum_of_what_all_took() -> None:
    ranks = [(100 * MIB, 300 * MIB, 250 * MIB), (90 * MIB, 110 * MIB, 260 * MIB)]
    found = {"tokens_per_second": 5.0, "plan": 7 * MIB, "bytes": {"resident": ranks, "shared": ranks[:1]}}
    assert list(table("zero-1", found)) == [
        Row("zero-1", "resident", 5.0, 7, 100, 300, 260, 170, 320),
        Row("zero-1", "shared", 5.0, 7, 100, 300, 250, 150, 150),
    ]
    assert [row.plan for row in table("ddp", found | {"plan": None})] == [None, None]


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (Plan(against=("tape",)), "--against tape: not a known peer\n  take some of dcp, dcp-4, dcp-async, apart"),
        (
            Plan(writers=("pen",)),
            "--writers pen: not a known writer\n  take some of direct, mpio, background, near, apart",
        ),
        (Plan(cut="slices"), "--cut slices: not a known cut\n  take one of flat, rows, columns"),
        (
            Plan(against=("dcp",)),
            "--cut flat does not go with --against dcp\n  DTensor has no pieces of a flat buffer\n"
            "  give --cut rows or --cut columns",
        ),
        (Plan(onto=((1, 3),)), "--onto 1:3: there are 1 ranks\n  start as many as the most"),
    ],
)
def test_checkpoints_that_cannot_be_timed_are_refused(plan: Plan, told: str) -> None:
    with pytest.raises(UsageError) as caught:
        check(plan, 1)
    assert str(caught.value) == told


def test_pairs_of_ranks_are_two_numbers_each() -> None:
    assert _pairs("4:3,2:4") == ((4, 3), (2, 4))
    with pytest.raises(UsageError) as caught:
        _pairs("4:3:2")
    assert str(caught.value) == "--onto 4:3:2: not pairs of ranks\n  each is two numbers, as in 4:3,2:4"


@pytest.mark.parametrize("cut", CUTS)
def test_every_dim_that_is_cut_divides_for_all_ranks(cut: str) -> None:
    for layout in layouts(Plan(0.01, cut=cut), 12).values():
        assert all(layout.shape[one.dim] % 12 == 0 for one in layout.cuts)
    total = sum(layout.nbytes for layout in layouts(Plan(0.1, cut=cut), 12).values())
    assert total == pytest.approx(0.1 * 2**30, rel=0.1)
