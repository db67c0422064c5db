"""Data parallelism: flat buckets, reduced in one order, and a mean over the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hpctrain.comm.group import Group, Handle, SoloGroup
from hpctrain.config import ModelConfig
from hpctrain.data.batch import IGNORE, MicroBatch
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.data import DataParallel
from hpctrain.parallel.pipeline import Runner
from hpctrain.plan.weights import ModelShape, weights
from hpctrain.schedule.action import accumulate
from hpctrain.watch.meter import PHASES, Meter
from tests.support import threads

LIMIT = 400  # bytes: a few of the parameters below


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


def decays(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.dim() > 1 for name, parameter in model.named_parameters()}


def parallel(model: nn.Module, group: Group, limit: int = LIMIT) -> DataParallel:
    return DataParallel(model, decays(model), group, limit)


def backward(data: DataParallel, *losses: Tensor) -> None:
    """One step over these losses."""
    data.begin()
    *first, last = losses
    for loss in first:
        loss.backward()
    with data.reducing():
        last.backward()
    data.finish()


def gradients(data: DataParallel) -> dict[str, Tensor]:
    return {slot.name: slot.of(b.flat.gradient).clone() for b in data.buckets for slot in b.slots}


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


# ---- buckets


@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans()), min_size=1, max_size=20),
    limit=st.integers(1, 500),
)
def test_buckets_hold_each_parameter_once_in_reverse_order_and_below_the_limit(sizes, limit: int) -> None:
    model = nn.Module()
    for number, (size, _, double) in enumerate(sizes):
        value = torch.arange(float(size), dtype=torch.float64 if double else torch.float32)
        model.register_parameter(f"p{number:02}", nn.Parameter(value))
    kinds = {f"p{number:02}": (decay, double) for number, (_, decay, double) in enumerate(sizes)}
    data = DataParallel(model, {name: decay for name, (decay, _) in kinds.items()}, SoloGroup(), limit)

    held = [slot.name for bucket in data.buckets for slot in bucket.slots]
    assert sorted(held) == sorted(kinds)
    for kind in set(kinds.values()):
        own = [name for name in held if kinds[name] == kind]
        assert own == sorted(own, reverse=True)
    for bucket in data.buckets:
        (kind,) = {kinds[slot.name] for slot in bucket.slots}
        assert (bucket.flat.decay, bucket.flat.parameter.dtype == torch.float64) == kind
        assert len(bucket.slots) == 1 or bucket.flat.gradient.nbytes <= limit
        assert [slot.start for slot in bucket.slots] == [0, *(slot.stop for slot in bucket.slots)][:-1]
        assert bucket.slots[-1].stop == bucket.flat.parameter.numel() == bucket.flat.gradient.numel()


def test_parameters_keep_their_values_and_become_views_of_their_bucket() -> None:
    model, same = Chain(), Chain()
    data = parallel(model, SoloGroup())
    assert len(data.buckets) > 2
    for (name, parameter), expected in zip(model.named_parameters(), same.parameters(), strict=True):
        assert torch.equal(parameter, expected), name
    for flat in data.flats():
        flat.parameter.fill_(7.0)
    assert all((parameter == 7.0).all() for parameter in model.parameters())


def test_gradients_are_views_of_their_bucket() -> None:
    model = Chain()
    data = parallel(model, SoloGroup())
    backward(data, *(model(x, range(6)) for x in inputs(2)))
    for flat in data.flats():
        flat.gradient.fill_(7.0)
    assert all((parameter.grad == 7.0).all() for parameter in model.parameters())


def test_frozen_parameters_are_in_no_bucket() -> None:
    model = Chain()
    model.layers[2].weight.requires_grad_(False)
    assert "layers.2.weight" not in gradients(parallel(model, SoloGroup()))


# ---- the step


def test_micro_batches_add_up_and_the_step_before_is_forgotten() -> None:
    model = Chain()
    data = parallel(model, SoloGroup())
    a, b, c = inputs(3)
    backward(data, model(c, range(6)))
    backward(data, model(a, range(6)), model(b, [0, 2]))
    assert_equal(gradients(data), plain((a, range(6)), (b, [0, 2])))


def test_a_bucket_is_reduced_while_the_backward_goes_on() -> None:
    model, group = Chain(), Recorder()
    data = parallel(model, group)
    model.layers[0].weight.register_post_accumulate_grad_hook(lambda _: group.events.append("first layer"))
    data.begin()
    model(inputs(1)[0], range(6)).backward()
    assert group.events == ["first layer"]  # nothing is reduced before the last backward
    group.events.clear()
    with data.reducing():
        model(inputs(1)[0], range(6)).backward()
        assert len(group.events) == len(data.buckets) + 1
    assert group.events.index("first layer") >= len(data.buckets) - 2  # all but the last matrices and vectors


def test_every_bucket_is_reduced_once_whatever_was_used() -> None:
    group = Recorder()
    model = Chain()
    data = parallel(model, group)
    for used in (range(6), [0], [5, 1]):
        group.events.clear()
        backward(data, model(inputs(1)[0], used))
        assert group.events == [bucket.flat.gradient.numel() for bucket in data.buckets]


USED = {"all": [range(6)] * 3, "different ones": [[0, 3], [5, 1], [2]], "half on one": [range(6), [1], [1]]}


@pytest.mark.parametrize("used", USED.values(), ids=USED)
def test_gradients_are_the_sum_over_the_ranks_also_where_some_parameters_are_not_used(used) -> None:
    xs = inputs(6)

    def act(group: Group) -> dict[str, Tensor]:
        model = Chain()
        data = parallel(model, group)
        backward(data, model(xs[5], range(6)))  # so that there is something to forget
        own = used[group.rank]
        backward(data, model(xs[2 * group.rank], own), model(xs[2 * group.rank + 1], own))
        return gradients(data)

    expected = plain(*((xs[2 * rank + half], used[rank]) for rank in range(3) for half in range(2)))
    for found in threads.run(3, act):
        assert_equal(found, expected)


# ---- the mean over tokens


class Priced(nn.Module):
    """A model whose loss of a token is its price times a weight of one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def loss(self, tokens: Tensor, targets: Tensor, documents: None, noise: object = None) -> tuple[Tensor, Tensor]:
        counts = targets != IGNORE
        return (self.weight * tokens * counts).sum(), counts.sum()


def priced(*prices: float | None) -> MicroBatch:
    """One sequence; None is a token that does not count."""
    tokens = torch.tensor([[9.0 if price is None else price for price in prices]], dtype=torch.float64)
    targets = torch.tensor([[IGNORE if price is None else 1 for price in prices]])
    return MicroBatch(tokens, targets, None, (0,))


def step(dealt: Sequence[Sequence[MicroBatch]]) -> list[tuple[float, int, float, float]]:
    """What each rank finds for its micro-batches: mean loss, tokens, gradient, and mean loss without gradients."""

    def act(group: Group) -> tuple[float, int, float, float]:
        model = Priced()
        data = DataParallel(model, {"weight": False}, group, LIMIT)
        mine = dealt[group.rank]
        runner = Runner(accumulate(len(mine)), model, data, group, Meter(torch.device("cpu"), 1.0, 1.0), seed=0)
        loss, tokens = runner.run(mine, 0)
        return loss, tokens, float(data.flats()[0].gradient), runner.evaluate(mine)

    return threads.run(len(dealt), act)


A, B = priced(4.0, None, None, None), priced(0.0, 0.0, 0.0, None)
DEALT = {"in micro-batches": [[A, B]], "over ranks": [[A], [B]], "over both": [[A, B], [B, A]]}


@pytest.mark.parametrize("dealt", DEALT.values(), ids=DEALT)
def test_the_mean_is_over_tokens_and_not_over_means(dealt) -> None:
    tokens = 4 * sum(map(len, dealt)) // 2
    assert step(dealt) == [(1.0, tokens, 1.0, 1.0)] * len(dealt)


def test_a_rank_without_any_token_that_counts_changes_nothing() -> None:
    assert step([[priced(None, None)], [priced(4.0, 2.0)]]) == [(3.0, 2, 3.0, 3.0)] * 2


def test_a_step_without_any_token_that_counts_has_no_loss_and_no_gradient() -> None:
    assert step([[priced(None)], [priced(None)]]) == [(0.0, 0, 0.0, 0.0)] * 2


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


def of_transformer(dealt: Sequence[Sequence[Sequence[int]]]) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of a step whose samples are dealt to ranks and micro-batches like this."""

    def act(group: Group) -> tuple[float, dict[str, Tensor]]:
        model = Transformer(SHAPE).double()
        initialise(model, SHAPE, seed=5)
        data = DataParallel(model, {weight.name: weight.decay for weight in weights(SHAPE)}, group, 1000)
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
def test_however_samples_are_dealt_to_ranks_and_micro_batches_the_gradients_are_equal(dealt) -> None:
    loss, found = of_transformer(dealt)
    expected_loss, expected = of_transformer([[range(4), range(4, 8)]])
    assert abs(loss - expected_loss) < 1e-12
    assert_equal(found, expected)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-3
