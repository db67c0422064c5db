"""A step through a pipeline: by every schedule the gradients of one rank, and nothing kept that is not needed."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hpctrain.config import Config
from hpctrain.optim.clip import global_norm
from hpctrain.parallel import pipeline
from hpctrain.parallel.pipeline import Pass, Runner
from hpctrain.plan.spans import TIED
from hpctrain.schedule.kinds import SCHEDULES
from hpctrain.train import Job
from tests.support.toys import alone, deck, gradients, on_threads, toy

EVERY = list(SCHEDULES)


def config_of(schedule: str, ranks: int, microbatches: int, *more: str) -> Config:
    """A pipeline with two layers in its first stage and one in the others."""
    stages = ranks * SCHEDULES[schedule].usual_chunks
    return toy(
        f"parallel.pp={ranks}",
        f"parallel.schedule={schedule}",
        f"model.layers={stages + 1}",
        f"parallel.layers_per_stage={[2, *[1] * (stages - 1)]}",
        f"train.batch={microbatches}",
        *more,
    )


def step(job: Job) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, tokens and gradients of a step, whose micro-batches are one sample each."""
    microbatches = deck(job.config).part(3, 0, 1)
    return *job.runner.run(microbatches, 3), gradients(job)


@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 9])
def test_any_number_of_micro_batches_goes_through_as_on_one_rank(schedule: str, microbatches: int) -> None:
    compare(config_of(schedule, 4, microbatches))


@pytest.mark.parametrize("schedule", EVERY)
def test_experts_and_their_balance_go_through_as_on_one_rank(schedule: str) -> None:
    kind = ("none", "full")[EVERY.index(schedule) % 2]
    experts = ("model.family=mixtral", "model.experts=4", "model.balance_loss=0.5", f"train.recompute={kind}")
    compare(config_of(schedule, 2, 3, *experts))


@pytest.mark.parametrize(("chunks", "group"), [(1, 2), (2, 3), (2, 7), (3, 5)])
def test_groups_and_chunks_of_any_size_are_as_one_rank(chunks: int, group: int) -> None:
    own = (f"parallel.chunks={chunks}", f"parallel.group={group}", f"model.layers={2 * chunks}")
    compare(toy("parallel.pp=2", "parallel.schedule=interleaved", "train.batch=7", *own))


def compare(config: Config) -> None:
    """Loss, tokens and gradients of a step on the ranks of a pipeline with those on one rank."""
    ((loss, tokens, expected),) = on_threads(alone(config), step)
    found = on_threads(config, step)
    assert {name for one in found for name in one[2]} == expected.keys()
    for their_loss, their_tokens, theirs in found:
        assert their_loss == pytest.approx(loss, rel=1e-12) and their_tokens == tokens
        for name, gradient in theirs.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-12)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3


@pytest.mark.parametrize("schedule", EVERY)
def test_the_loss_without_gradients_needs_no_number_of_micro_batches_of_the_schedules(schedule: str) -> None:
    config = config_of(schedule, 2, 3)

    def evaluate(job: Job) -> list[float]:
        return [job.runner.evaluate(deck(toy(f"train.batch={many}")).part(5, 0, 1)) for many in (1, 2, 7)]

    (expected,) = on_threads(alone(config), evaluate)
    for found in on_threads(config, evaluate):
        assert found == pytest.approx(expected, rel=1e-12)


# ---- a weight that two ranks have


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor"])
def test_a_tied_weight_is_bit_for_bit_one_on_both_ranks_and_that_of_one_rank(zero: int, kind: str) -> None:
    family = ("model.family=llama", "model.tied=true")  # a bias of keys has a gradient of nothing but rounding
    more = ("parallel.dp=2", f"parallel.zero={zero}", f"optim.kind={kind}", *family)
    config = config_of("1f1b", 2, 4, *more)

    def trained(job: Job) -> tuple[list[float], dict[str, torch.Tensor]]:
        norms = [job.step(number, deck(job.config))["norm"] for number in range(4)]
        with job.sharded.whole() as model:
            return norms, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    ((norms, whole),) = on_threads(alone(config), trained)
    found = on_threads(config, trained)
    tied = [weights[TIED] for _, weights in found]
    assert len(tied) == 4 and all(torch.equal(one, tied[0]) for one in tied)
    for theirs, weights in found:
        assert theirs == pytest.approx(norms, rel=1e-10)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, whole[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_fold_has_the_tied_weight_once(schedule: str) -> None:
    names = on_threads(config_of(schedule, 2, 2), lambda job: list(gradients(job)))
    assert [TIED in one for one in names] == [True, False]


# ---- memory


@pytest.mark.parametrize("schedule", EVERY)
def test_after_a_step_nothing_of_it_is_left(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[Pass] = []

    def noted(*given: Any, **more: Any) -> Pass:
        passes.append(Pass(*given, **more))
        return passes[-1]

    monkeypatch.setattr(pipeline, "Pass", noted)
    on_threads(config_of(schedule, 2, 5), lambda job: (step(job), job.runner.evaluate(deck(toy()).part(0, 0, 1))))
    assert len(passes) == 4
    for one in passes:
        held = {name: value for name, value in vars(one).items() if isinstance(value, dict | list)}
        assert len(held.pop("microbatches")) > 1 and len(held) > 4
        assert not any(held.values()), held


@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("training", [True, False])
def test_what_a_stage_made_is_gone_once_it_is_sent(
    schedule: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Runner._OPS["SEND_F"]
    gone: list[bool] = []

    def watched(runner: Runner, now: Pass, action: Any, last: bool) -> None:
        memory = StorageWeakRef(now.made[action.stage, action.microbatch].untyped_storage())
        assert not memory.expired()
        send(runner, now, action, last)
        gone.append(memory.expired())

    monkeypatch.setitem(Runner._OPS, "SEND_F", watched)
    config = config_of(schedule, 2, 3)
    on_threads(config, step if training else lambda job: job.runner.evaluate(deck(job.config).part(0, 0, 1)))
    assert len(gone) >= 3 and all(gone)


# ---- the norm of all gradients

LAST = "blocks.2.mlp.down.weight"
PLANTED = {LAST: {0: 3.0, -1: 4.0}, "blocks.0.attention.norm.weight": {0: 12.0}, TIED: {0: 84.0}}
GRIDS = {
    "one rank": (),
    "pp 2": ("parallel.pp=2",),
    "pp 2, two chunks a rank": ("parallel.pp=2", "parallel.schedule=interleaved", "model.layers=4"),
    "pp 2, folded": ("parallel.pp=2", "parallel.schedule=zb-v", "model.layers=4"),
    "tp 2": ("parallel.tp=2",),
    "tp 2, copies of keys": ("parallel.tp=2", "model.kv_heads=1"),
    "tp 4, copies of keys": ("parallel.tp=4", "model.heads=4", "model.kv_heads=1"),
    "pp 2 x tp 2": ("parallel.pp=2", "parallel.tp=2", "model.kv_heads=1"),
    "dp 2 x tp 2": ("parallel.dp=2", "parallel.tp=2"),
    "pp 2 x dp 2": ("parallel.pp=2", "parallel.dp=2"),
    "pp 2 x dp 2 x tp 2": ("parallel.pp=2", "parallel.dp=2", "parallel.tp=2", "model.kv_heads=1"),
}


def plant(job: Job) -> None:
    """Let some elements of some gradients be what is planted there, and all others 0, wherever they are."""
    for part in job.sharded.parts:
        part.gradient.zero_()
        for slot in part.unit.slots:
            share = part.share(slot, part.gradient)
            for element, value in PLANTED.get(slot.name, {}).items():
                place = element % prod(slot.shape) - part.first(slot)
                if 0 <= place < share.numel():
                    share[place] = value


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("grid", GRIDS)
def test_the_norm_counts_each_element_once_wherever_it_is(grid: str, zero: int) -> None:
    """3, 4, 12 and 84 make 85: a stage, a part of a product, or a replica more or less would make something else."""

    def norm(job: Job) -> float:
        plant(job)
        return global_norm(job.counted, job.owners)

    config = toy("model.layers=3", "model.tied=true", f"parallel.zero={zero}", *GRIDS[grid])
    found = on_threads(config, norm)
    assert found == pytest.approx([85.0] * len(found), rel=1e-15)
