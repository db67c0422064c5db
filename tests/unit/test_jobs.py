"""Whole jobs on ranks that are threads: what must stay equal on them while a model is trained."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.train import Job
from tests.support.toys import alone, deck, on_threads, toy

Weights = dict[str, Tensor]


def trained(job: Job, steps: int) -> tuple[list[dict], Weights]:
    """What some steps told, and the weights after them; Collective."""
    told = [job.step(number, deck(job.config)) for number in range(steps)]
    with job.sharded.whole() as model:
        return told, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("sequence", ["true", "false"])
def test_what_ranks_have_whole_is_bit_for_bit_one_after_many_steps(family: str, sequence: str) -> None:
    more = (f"model.family={family}", "model.kv_heads=1", f"parallel.sequence={sequence}")
    config = toy("parallel.tp=2", "model.tied=true", "optim.rate=1e-3", *more)
    ((_, whole),) = on_threads(alone(config), lambda job: trained(job, 20))
    first, second = (weights for _, weights in on_threads(config, lambda job: trained(job, 20)))
    alike = [name for name, weight in first.items() if weight.shape == whole[name].shape]
    assert sum("norm" in name for name in alike) >= 5 and any("attention.key" in name for name in alike)
    for name in alike:
        assert torch.equal(first[name], second[name]), name
        # Adam divides by the root of squares, which enlarges last bits of what is nothing but rounding: keys' biases.
        assert "key.bias" in name or torch.allclose(first[name], whole[name], rtol=0, atol=1e-9), name


GRIDS = [
    ("parallel.pp=2",),
    ("parallel.pp=2", "parallel.schedule=zb-h1"),
    ("parallel.tp=2",),
    ("parallel.tp=2", "parallel.sequence=false", "model.kv_heads=1"),
    ("parallel.pp=2", "parallel.tp=2"),
    ("parallel.pp=2", "parallel.dp=2", "parallel.zero=2"),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_all_ranks_leave_out_a_step_that_overflowed_on_one(grid: tuple[str, ...]) -> None:
    """A loss times 2^24 overflows fp16; the scale comes down alike on ranks that have other blocks or other parts.

    A tied weight would differ: on one rank its two gradients are added up in fp16, and may overflow by that alone.
    """
    config = toy("precision.compute=fp16", "precision.scale=16777216", "model.dropout=0.0", "model.tied=false", *grid)
    steps = 10
    ((expected, _),) = on_threads(alone(config), lambda job: trained(job, steps))
    scales = [told["scale"] for told in expected]
    found = on_threads(config, lambda job: trained(job, steps))
    assert expected[0]["norm"] is None and expected[-1]["norm"] is not None and len(set(scales)) > 2
    for told, _ in found:
        assert [one["scale"] for one in told] == scales
        assert [one["norm"] is None for one in told] == [one["norm"] is None for one in expected]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("layers", ["[1,5]", "[5,1]"])
def test_stages_of_very_different_sizes_take_the_same_steps(layers: str, zero: int) -> None:
    grid = ("parallel.pp=2", "parallel.dp=2", f"parallel.layers_per_stage={layers}", f"parallel.zero={zero}")
    config = toy("model.layers=6", "model.tied=false", *grid)
    ((expected, _),) = on_threads(alone(config), lambda job: trained(job, 3))
    for told, _ in on_threads(config, lambda job: trained(job, 3)):
        for key in ("loss", "norm", "tokens"):
            assert [one[key] for one in told] == pytest.approx([one[key] for one in expected], rel=1e-10)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_mean_is_over_tokens_however_they_are_dealt_out(grid: tuple[str, ...]) -> None:
    """Samples have one to five targets that count: the mean is over these, and not over micro-batches."""
    config = toy("train.batch=10", "train.microbatch=1", *grid)
    together = alone(toy("train.batch=10", "train.microbatch=10", *grid))
    ((expected, _),) = on_threads(together, lambda job: trained(job, 2))
    for told, _ in on_threads(config, lambda job: trained(job, 2)):
        for key in ("loss", "norm", "tokens"):
            assert [one[key] for one in told] == pytest.approx([one[key] for one in expected], rel=1e-10)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_many_ranks_that_share_parts_of_products_update_each_element_once(kind: str, zero: int) -> None:
    """Of eight intervals of a block some end in keys, and more of what lies before these comes behind."""
    grid = ("parallel.tp=2", "parallel.dp=8", f"parallel.zero={zero}", "train.batch=8")
    config = toy(f"optim.kind={kind}", *grid)
    ((expected, _),) = on_threads(alone(config), lambda job: trained(job, 3))
    for told, _ in on_threads(config, lambda job: trained(job, 3)):
        for key in ("loss", "norm"):
            assert [one[key] for one in told] == pytest.approx([one[key] for one in expected], rel=1e-10)
