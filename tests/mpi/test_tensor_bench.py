"""The benchmark of ranks that share a model: every contestant does the same work."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist
from mpi4py import MPI

from hpctrain.bench.tensor import CONTESTANTS, Scene, run
from hpctrain.cluster.world import World
from hpctrain.config import Config, parse
from hpctrain.errors import UsageError

pytestmark = pytest.mark.mpi(min_size=4)

KNOBS = ("layers=2", "width=32", "heads=4", "sequence=16", "vocabulary=64")
FAMILIES = {"gpt2": ("family=gpt2",), "llama": ("family=llama", "kv_heads=2"), "qwen2": ("family=qwen2",)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_contestant_has_a_row_and_the_loss_of_the_others(
    family: str, first: Callable[[int], MPI.Comm | None]
) -> None:
    part = first(2)
    if part is None:
        return
    config: Config = parse({}, tuple(f"model.{knob}" for knob in (*KNOBS, *FAMILIES[family])))
    rows = run(Scene.open(config, World.of(part)), turns=1)
    dist.destroy_process_group()
    assert [row.name for row in rows] == list(CONTESTANTS)
    losses = [row.loss for row in rows if row.name != "one" or part.rank == 0]
    assert losses == pytest.approx([rows[-1].loss] * len(losses), rel=1e-5)
    assert all(row.tokens_per_second == pytest.approx(config.train.microbatch * 16 / row.seconds) for row in rows)


def test_a_model_with_experts_is_refused(first: Callable[[int], MPI.Comm | None]) -> None:
    part = first(2)
    if part is None:
        return
    knobs = (*KNOBS, "family=mixtral", "kv_heads=2", "experts=4", "experts_per_token=2")
    with pytest.raises(UsageError, match="bench tensor has no model with experts: model.experts is 4"):
        Scene.open(parse({}, tuple(f"model.{knob}" for knob in knobs)), World.of(part))
