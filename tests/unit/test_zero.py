"""Sharing a model: every stage gives the gradients and the mean over tokens that one rank has, in one fixed order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group, Handle, SoloGroup
from hpctrain.config import ModelConfig
from hpctrain.data.batch import IGNORE, MicroBatch
from hpctrain.errors import HpctrainError
from hpctrain.model.init import filler, hollow, initialise
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.pipeline import Pipe, Runner
from hpctrain.parallel.zero import Sharded, shard
from hpctrain.plan.spans import Span
from hpctrain.plan.weights import ModelShape
from hpctrain.schedule.action import accumulate
from hpctrain.watch.meter import PHASES, Meter
from tests.support import threads
from tests.support.shards import gradients

STAGES = [0, 1, 2, 3]


class Chain(nn.Module):
    """Layers of one width, each used after the other, or only some of them."""

    def __init__(self, layers: int = 6, width: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers)).double()
        own = torch.Generator().manual_seed(0)  # the global one is shared by the threads
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5, generator=own)

    def forward(self, x: Tensor, used: Sequence[int]) -> Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x.sum()


def backward(data: Sharded, *losses: Tensor) -> None:
    """One step over these losses."""
    for number, loss in enumerate(losses, 1):
        with data.reducing(last=number == len(losses)):
            loss.backward()
    data.finish()


def plain(*uses: tuple[Tensor, Sequence[int]]) -> dict[str, Tensor]:
    """The gradients of the sum of all losses, without data parallelism; zeros where there is none."""
    model = Chain()
    torch.stack([model(x, used) for x, used in uses]).sum().backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def inputs(count: int) -> list[Tensor]:
    return list(torch.randn(count, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


class Recorder(SoloGroup):
    """A group of one that writes down what is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[object] = []

    def _all_reduce(self, x: Tensor, op: str, later: bool) -> Handle:
        self.events.append(x.numel())
        return super()._all_reduce(x, op, later)


# ---- the step


def step_of(data: Sharded, *uses: tuple[Tensor, Sequence[int]]) -> dict[str, Tensor]:
    """The gradients of a step of these micro-batches."""
    data.begin()
    backward(data, *(data.module(x, used) for x, used in uses))
    return gradients(data)


def test_weights_keep_their_values() -> None:
    for stage in STAGES:
        data = shard(Chain(), SoloGroup(), stage)
        with data.whole() as model:
            for (name, parameter), expected in zip(model.named_parameters(), Chain().parameters(), strict=True):
                assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_add_up_and_the_step_before_is_forgotten(stage: int) -> None:
    data = shard(Chain(), SoloGroup(), stage)
    a, b, c = inputs(3)
    step_of(data, (c, range(6)))
    found = step_of(data, (a, range(6)), (b, [0, 2]))
    assert_equal(found, plain((a, range(6)), (b, [0, 2])))
    assert all(parameter.grad is None for parameter in data.module.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_without_a_backward_has_no_gradient(stage: int) -> None:
    data = shard(Chain(), SoloGroup(), stage)
    step_of(data, (inputs(1)[0], range(6)))
    data.begin()
    data.finish()
    assert all((gradient == 0).all() for gradient in gradients(data).values())


def test_a_unit_is_reduced_while_the_backward_goes_on() -> None:
    model, group = Chain(), Recorder()
    data = shard(model, group, 0)
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: group.events.append("first layer"))
    x = inputs(1)[0]
    data.begin()
    with data.reducing(last=False):
        model(x, range(6)).backward()
    assert group.events == ["first layer"]  # nothing is reduced before the last backward
    group.events.clear()
    with data.reducing():
        model(x, range(6)).backward()
        assert len(group.events) == 7
    assert group.events.index("first layer") >= 5


def test_every_unit_is_reduced_once_whatever_was_used() -> None:
    group = Recorder()
    data = shard(Chain(), group, 0)
    for used in (range(6), [0], [5, 1]):
        group.events.clear()
        step_of(data, (inputs(1)[0], used))
        assert group.events == [20] * 6


def test_a_second_gradient_on_its_way_is_refused() -> None:
    model = Chain()
    data = shard(model, SoloGroup(), 2)
    data.begin()
    with pytest.raises(HpctrainError, match="bias got a second gradient.*\n.*\n  put one backward in each"):
        with data.reducing():
            model(inputs(1)[0], range(6)).backward()
            model(inputs(1)[0], range(6)).backward()


USED = {
    "all": [range(6)] * 3,
    "twice": [[0, 1, 0, 2, 1]] * 3,
    "not all": [[4, 2]] * 3,
    "different ones": [[0, 3], [5, 1], [2]],
    "half on one": [range(6), [1], [1]],
}
ALIKE = ("all", "twice", "not all")  # stage 3 has every rank use the same units, in one order


@pytest.mark.parametrize(("used", "stage"), [(u, s) for u in USED for s in STAGES if s < 3 or u in ALIKE])
def test_gradients_are_the_sum_over_the_ranks_also_where_some_parameters_are_not_used(used: str, stage: int) -> None:
    xs = inputs(6)

    def act(group: Group) -> dict[str, Tensor]:
        data = shard(Chain(), group, stage)
        step_of(data, (xs[5], range(6)))  # so that there is something to forget
        own = USED[used][group.rank]
        return step_of(data, (xs[2 * group.rank], own), (xs[2 * group.rank + 1], own))

    expected = plain(*((xs[2 * rank + half], USED[used][rank]) for rank in range(3) for half in range(2)))
    for found in threads.run(3, act):
        assert_equal(found, expected)


# ---- the mean over tokens


class Priced(nn.Module):
    """A model whose loss of a token is its price times a weight of one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def frame(self, *micro_batch: object, balanced: bool) -> None:
        return None

    def through(self, span: Span, tokens: Tensor, frame: None) -> Tensor:
        return tokens

    def imbalance(self, frame: None) -> None:
        """It has no experts."""

    def price(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = targets != IGNORE
        return self(tokens * counts), counts.sum()

    def forward(self, prices: Tensor) -> Tensor:
        return (self.head * prices).sum()


def priced(*prices: float | None) -> MicroBatch:
    """One sequence; None is a token that does not count."""
    tokens = torch.tensor([[9.0 if price is None else price for price in prices]], dtype=torch.float64)
    targets = torch.tensor([[IGNORE if price is None else 1 for price in prices]])
    return MicroBatch(tokens, targets, None, (0,))


def step(dealt: Sequence[Sequence[MicroBatch]], stage: int) -> list[tuple[float, int, float, float]]:
    """What each rank finds for its micro-batches: mean loss, tokens, gradient, and mean loss without gradients."""

    def act(group: Group) -> tuple[float, int, float, float]:
        model = Priced()
        data = shard(model, group, stage)
        mine = dealt[group.rank]
        meter, pipe = Meter(torch.device("cpu"), 1.0, 1.0), Pipe((Span(0, 0, embed=True, head=True),), accumulate)
        runner = Runner(accumulate(len(mine)), model, data, group, meter, 0, pipe)
        loss, tokens = runner.run(mine, 0)
        return loss, tokens, float(gradients(data)["head"]), runner.evaluate(mine)

    return threads.run(len(dealt), act)


A, B = priced(4.0, None, None, None), priced(0.0, 0.0, 0.0, None)
DEALT = {"in micro-batches": [[A, B]], "over ranks": [[A], [B]], "over both": [[A, B], [B, A]]}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dealt", DEALT.values(), ids=DEALT)
def test_the_mean_is_over_tokens_and_not_over_means(dealt, stage: int) -> None:
    tokens = 4 * sum(map(len, dealt)) // 2
    assert step(dealt, stage) == [(1.0, tokens, 1.0, 1.0)] * len(dealt)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_without_any_token_that_counts_changes_nothing(stage: int) -> None:
    assert step([[priced(None, None)], [priced(4.0, 2.0)]], stage) == [(3.0, 2, 3.0, 3.0)] * 2


def test_a_step_without_any_token_that_counts_has_no_loss_and_no_gradient() -> None:
    assert step([[priced(None)], [priced(None)]], 3) == [(0.0, 0, 0.0, 0.0)] * 2


# ---- a real model

SHAPE = ModelShape.of(ModelConfig(layers=2, width=8, heads=2, sequence=6, dropout=0.1), vocabulary=11)
SAMPLES = 8


def sample_batch(rows: Sequence[int]) -> MicroBatch:
    """These samples of the step; in later ones fewer tokens count."""
    tokens = torch.randint(11, (SAMPLES, 7), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    for row in range(SAMPLES):
        targets[row, 6 - row % 7 :] = IGNORE
    return MicroBatch(tokens[list(rows), :-1], targets[list(rows)], None, tuple(rows))


def of_transformer(dealt: Sequence[Sequence[Sequence[int]]], stage: int = 0) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a step whose samples are dealt to ranks and micro-batches like this."""

    def act(group: Group) -> tuple[float, dict[str, Tensor]]:
        model = Transformer(SHAPE).double()
        initialise(model, SHAPE, seed=5)
        data = shard(model, group, stage)
        mine = [sample_batch(rows) for rows in dealt[group.rank]]
        meter = Meter(torch.device("cpu"), 1.0, 1.0)
        loss, _ = Runner(accumulate(len(mine)), model, data, group, meter, seed=5).run(mine, step=2)
        assert set(meter.read(1).phases) == set(PHASES)
        return loss, gradients(data)

    return threads.run(len(dealt), act)[0]


@pytest.mark.parametrize(
    "dealt",
    [
        [[range(8)]],
        [[[7, 6], [5, 4], [3, 2], [1, 0]]],
        [[[0, 2, 4], [6]], [[1, 3, 5], [7]]],
        [[[6, 1]], [[0, 7]], [[2, 5]], [[4, 3]]],
        [[[0], [1]], [[2], [3]], [[4], [5]], [[7], [6]]],
    ],
)
@pytest.mark.parametrize("stage", STAGES)
def test_however_samples_are_dealt_to_ranks_and_micro_batches_the_gradients_are_equal(dealt, stage: int) -> None:
    loss, found = of_transformer(dealt, stage)
    expected_loss, expected = of_transformer([[range(4), range(4, 8)]])
    assert abs(loss - expected_loss) < 1e-12
    assert_equal(found, expected)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_makes_just_the_weights_that_it_owns(stage: int) -> None:
    make = filler(SHAPE, 5)

    def act(group: Group) -> tuple[dict[str, Tensor], int, int]:
        asked: list[int] = []

        def fill(name: str, first: int, out: Tensor) -> None:
            asked.append(out.numel())
            make(name, first, out)

        model = hollow(lambda: Transformer(SHAPE), torch.float64, torch.device("cpu"))
        data = shard(model, group, stage, fill=fill)
        with data.whole():
            found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        return found, sum(asked), sum(part.own.numel() for part in data.parts)

    expected = Transformer(SHAPE).double()
    initialise(expected, SHAPE, seed=5)
    for found, asked, owned in threads.run(3, act):
        assert asked == owned
        assert all(torch.equal(found[name], parameter) for name, parameter in expected.named_parameters())
