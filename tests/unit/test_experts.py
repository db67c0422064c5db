"""Experts: each token gets what its own experts make of it, wherever these are, and all are pulled to equal use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hpctrain.config import ModelConfig
from hpctrain.model import experts
from hpctrain.model.experts import Experts, Rows, choice, grouped
from hpctrain.model.frame import Balance, Frame, Tokens
from hpctrain.model.init import initialise
from hpctrain.model.parts import Spread
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import ModelShape
from hpctrain.precision.fp8 import in_fp8
from tests.support.toys import deck, on_threads, toy

WIDTH, ROWS, LENGTH = 8, 3, 7
EVERY = [(1, 1), (4, 2), (5, 1), (3, 3)]


def block(count: int = 4, per_token: int = 2) -> Experts:
    """The experts of a block, in fp64 and at random."""
    config = ModelConfig(
        family="mixtral", layers=1, width=WIDTH, heads=2, mlp_width=6, experts=count, experts_per_token=per_token
    )
    with torch.random.fork_rng():
        torch.manual_seed(count)
        part = Experts(ModelShape.of(config, 11)).double()
        for parameter in part.parameters():
            nn.init.normal_(parameter)
    return part


def inputs() -> Tensor:
    make = torch.Generator().manual_seed(2)
    return torch.randn(ROWS, LENGTH, WIDTH, generator=make, dtype=torch.float64).requires_grad_()


def frame(balance: Balance | None = None) -> Frame:
    return Frame(Tokens.whole(ROWS, LENGTH), balance=balance)


def token_by_token(part: Experts, x_BTD: Tensor) -> Tensor:
    """The definition: of each token the most probable experts, each with its probability among those."""
    x_ND, made = part.norm(x_BTD).flatten(0, 1), []
    for x_D in x_ND:
        probabilities_E = (part.router.weight @ x_D).softmax(0)
        chosen = probabilities_E.argsort(descending=True)[: part.per_token]
        total = probabilities_E[chosen].sum()
        makes = [(F.silu(part.gate.weight[e] @ x_D) * (part.up.weight[e] @ x_D)) @ part.down.weight[e] for e in chosen]
        made.append(sum(probabilities_E[e] / total * y_D for e, y_D in zip(chosen, makes, strict=True)))
    return torch.stack(made).view(x_BTD.shape)


def gradients(act: Callable[[Tensor], Tensor], part: Experts) -> list[Tensor]:
    """What it makes, and the gradients of what goes in and of all weights."""
    x, weights = inputs(), list(part.parameters())
    y = act(x)
    way = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], way)]


@pytest.mark.parametrize(("count", "per_token"), EVERY)
def test_each_token_gets_the_sum_of_its_experts_by_their_probabilities(count: int, per_token: int) -> None:
    part = block(count, per_token)
    found = gradients(lambda x: part(x, frame()), part)
    expected = gradients(lambda x: token_by_token(part, x), part)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_weights_of_the_chosen_add_up_to_one_and_the_most_probable_come_first() -> None:
    weights, chosen = choice(torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.3, 0.5]]), 2)
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3], [5 / 8, 3 / 8]]))
    assert chosen.tolist() == [[1, 2], [2, 1]]


def test_no_token_is_dropped_where_all_want_one_expert_and_the_others_have_no_gradient() -> None:
    part = block(4, 1)
    nn.init.zeros_(part.router.weight)
    with torch.no_grad():
        part.router.weight[2] = inputs().mean((0, 1))
    x = (inputs() + 9 * inputs().mean((0, 1))).detach()
    part.norm.weight.data.fill_(1.0)
    y = part(x, frame())
    torch.testing.assert_close(y, token_by_token(part, x), rtol=1e-12, atol=1e-12)
    y.square().sum().backward()
    for stack in (part.gate, part.up, part.down):
        assert stack.weight.grad.shape == (4, 6, WIDTH)
        assert [bool(one.any()) for one in stack.weight.grad] == [False, False, True, False]


def test_the_products_are_in_the_format_of_the_activations_and_the_choice_is_in_fp32() -> None:
    part, told = block().bfloat16(), []
    original = torch.Tensor.softmax

    def softmax(x: Tensor, dim: int) -> Tensor:
        told.append(x.dtype)
        return original(x, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "softmax", softmax)
        y = part(inputs().bfloat16(), frame())
    assert (y.dtype, told) == (torch.bfloat16, [torch.float32])


# ---- who has which experts


@given(st.lists(st.integers(0, 5), max_size=3), st.booleans())
@settings(deadline=None, max_examples=20)
def test_what_runs_of_experts_make_adds_up_to_what_all_make(edges: list[int], balanced: bool) -> None:
    whole, edges = block(5, 3), [0, *sorted(edges), 5]

    def loss(part: Experts, x_ND: Tensor, first: int) -> Tensor:
        balance = Balance() if balanced else None
        y_ND = part.through(x_ND, part.router.weight, balance, first)
        way = torch.randn(y_ND.shape, generator=torch.Generator().manual_seed(3), dtype=y_ND.dtype)
        # Every rank knows the whole balance, and has a part of its gradient.
        more = balance.total() if balanced else torch.zeros(())
        return (y_ND * way).sum() + more - (more.detach() if first or not len(part.gate.weight) else 0)

    def made(start: int, stop: int) -> list[Tensor]:
        part, x_ND = block(5, 3), inputs().detach().flatten(0, 1).requires_grad_()
        for stack in (part.gate, part.up, part.down):
            stack.weight = nn.Parameter(stack.weight[start:stop].detach())
        value = loss(part, x_ND, start)
        return [value.detach(), *torch.autograd.grad(value, [x_ND, part.router.weight, part.gate.weight])]

    parts = [made(start, stop) for start, stop in zip(edges, edges[1:], strict=False) if start < stop]
    values, *shared, gates = (list(column) for column in zip(*parts, strict=True))
    value, *expected = made(0, 5)
    assert whole.gate.weight.shape == torch.cat(gates).shape
    torch.testing.assert_close(sum(values), value, rtol=1e-12, atol=1e-12)
    for pieces, one in zip(shared, expected[:2], strict=True):
        torch.testing.assert_close(sum(pieces), one, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat(gates), expected[2], rtol=1e-12, atol=1e-12)


@given(st.integers(1, 6), st.data())
def test_every_choice_is_one_row_of_the_expert_that_was_chosen(count: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.permutations(range(count)), min_size=1, max_size=9))
    per_token, edges = data.draw(st.integers(1, count)), [0, data.draw(st.integers(0, count)), count]
    chosen_NK = torch.tensor(chosen)[:, :per_token]
    places = []
    for start, stop in zip(edges, edges[1:], strict=False):
        if start < stop:
            rows = Rows.of(chosen_NK, count, range(start, stop))
            here = torch.arange(start, stop).repeat_interleave(rows.ends.long().diff(prepend=torch.zeros(1).long()))
            assert torch.equal(chosen_NK.flatten()[rows.places], here)
            places += rows.places.tolist()
    assert sorted(places) == list(range(chosen_NK.numel()))


# ---- products


RUNS = [(3, 3, 8), (0, 0, 0), (5, 8, 8), (0, 8, 8)]


def given_products(ends: tuple[int, ...], dtype: torch.dtype, turned: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, matrices, where the runs end, and a gradient."""
    make = torch.Generator().manual_seed(1)
    shapes = ((ends[-1], 16), (3, 16, 24) if turned else (3, 24, 16), (ends[-1], 24))
    x, weight, gradient = (torch.randn(shape, generator=make, dtype=torch.float64).to(dtype) for shape in shapes)
    return x.requires_grad_(), weight.requires_grad_(), torch.tensor(ends, dtype=torch.int32), gradient


def products(ends: tuple[int, ...], dtype: torch.dtype, turned: bool, act: Callable[..., Tensor]) -> list[Tensor]:
    x, weight, ends_E, gradient = given_products(ends, dtype, turned)
    y = act(x, weight.transpose(1, 2) if turned else weight, ends_E)
    return [y, *torch.autograd.grad(y, [x, weight], gradient)]


def by_runs(x: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    runs = zip([0, *ends_E.tolist()], ends_E.tolist(), weight_EOI, strict=False)
    return torch.cat([F.linear(x[start:stop], weight_OI) for start, stop, weight_OI in runs])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ends", RUNS)
def test_each_run_is_multiplied_with_its_matrix_also_where_it_is_empty(ends: tuple[int, ...], turned: bool) -> None:
    found, expected = (products(ends, torch.float64, turned, act) for act in (grouped, by_runs))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ends", RUNS)
@pytest.mark.parametrize("dtype", experts.KERNELS["cpu"], ids=str)
def test_one_kernel_for_all_runs_gives_the_numbers_of_the_loop(
    dtype: torch.dtype, ends: tuple[int, ...], turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert experts.one_kernel(given_products(ends, dtype, turned)[1])
    kernel = products(ends, dtype, turned, grouped)
    monkeypatch.setattr(experts, "one_kernel", lambda weight: False)
    for one, other in zip(kernel, products(ends, dtype, turned, grouped), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 8, 8), torch.float64), ((2, 7, 8), torch.float32)])
def test_what_the_kernel_does_not_take_goes_through_the_loop(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert not experts.one_kernel(torch.zeros(shape, dtype=dtype))


def test_experts_and_their_router_are_not_multiplied_in_fp8() -> None:
    shape = ModelShape.of(ModelConfig(family="mixtral", layers=1, width=16, heads=2, sequence=8), 11)
    model = Transformer(shape)
    in_fp8(model.blocks, "tensor")
    part = model.blocks["0"].mlp
    assert all(stack.grouped is grouped for stack in (part.gate, part.up, part.down))
    changed = [m for m in model.modules() if isinstance(m, Spread) and m.product is not F.linear]
    assert len(changed) == 3  # attention's query, key and value


# ---- the balance loss


def test_the_balance_loss_is_experts_times_shares_times_probabilities() -> None:
    part, balance = block(4, 2), Balance()
    part(inputs(), frame(balance))
    x_ND = part.norm(inputs()).flatten(0, 1)
    probabilities = (x_ND @ part.router.weight.t()).softmax(-1)
    _, chosen = choice(probabilities, 2)
    shares = [(chosen == expert).any(1).double().mean() for expert in range(4)]
    expected = 4 * sum(share * p for share, p in zip(shares, probabilities.mean(0), strict=True))
    torch.testing.assert_close(balance.total(), expected, rtol=1e-12, atol=0)


def test_it_is_as_many_as_a_token_goes_to_where_all_are_used_alike_and_more_where_one_is_preferred() -> None:
    part = block(4, 1)
    part.norm.epsilon = 0.0
    with torch.no_grad():
        part.norm.weight.fill_(1.0)
        part.router.weight.copy_(5 * torch.eye(4, WIDTH))

    def loss(which: list[int]) -> float:
        x, balance = torch.eye(WIDTH, dtype=torch.float64)[which], Balance()
        part.through(x, part.router.weight, balance)
        return balance.total().item()

    assert loss([0, 1, 2, 3]) == pytest.approx(1.0, rel=1e-12)
    assert loss([0, 0, 0, 1]) > 2.0


def test_following_its_gradient_spreads_the_tokens() -> None:
    part = block(4, 1)
    with torch.no_grad():
        part.router.weight[0] += 0.5 * part.norm(inputs()).mean((0, 1))

    def shares() -> Tensor:
        x_ND = part.norm(inputs()).flatten(0, 1)
        return choice((x_ND @ part.router.weight.t()).softmax(-1), 1)[1].flatten().bincount(minlength=4)

    before = shares().max()
    for _ in range(50):
        balance = Balance()
        part(inputs(), frame(balance))
        (pull,) = torch.autograd.grad(balance.total(), [part.router.weight])
        part.router.weight.data.sub_(0.5 * pull)
    assert shares().max() < before


def model_of(**knobs: float) -> Transformer:
    config = dict(family="mixtral", layers=3, width=WIDTH, heads=2, sequence=LENGTH, init_std=0.3, experts=4) | knobs
    shape = ModelShape.of(ModelConfig(**config), 11)
    model = Transformer(shape).double()
    initialise(model, shape, seed=1)
    return model


def test_each_target_counts_the_mean_of_the_layers_in_where_it_is_asked_for() -> None:
    model, tokens = model_of(balance_loss=0.3), torch.arange(LENGTH)[None] % 11
    told = model.frame(tokens, None, None, balanced=True)
    (plain, count), (loss, _) = (model.loss(tokens, tokens, balanced=balanced) for balanced in (False, True))
    x = model.embed(tokens, told)
    for layer in model.blocks.values():
        x = layer(x, told)
    torch.testing.assert_close((loss - plain) / count, 0.3 * told.balance.total() / 3)
    assert model_of(balance_loss=0.0).frame(tokens, None, None, balanced=True).balance is None


def test_a_step_adds_the_mean_over_micro_batches_by_their_targets_and_validation_adds_nothing() -> None:
    words = ("model.family=mixtral", "model.experts=4", "model.dropout=0", "model.balance_loss")
    with_it, without = (toy(*words[:3], f"{words[3]}={value}") for value in (0.5, 0.0))

    def told(job) -> tuple[float, float, list[float]]:
        parts = deck(with_it).part(3, 0, 1)
        pulls = []
        for m in parts:
            frame = job.runner.model.frame(m.tokens, None, None, balanced=True)
            job.runner.model.through(job.runner.pipe.spans[0], m.tokens, frame)
            more = job.runner.model.imbalance(frame)
            pulls.append((m.predicted, float(more.detach()) if more is not None else 0.0))
        return job.runner.run(parts, 3)[0], job.runner.evaluate(parts), pulls

    ((loss, validated, pulls),), ((plain, same, _),) = (on_threads(config, told) for config in (with_it, without))
    total = sum(count for count, _ in pulls)
    assert len({count for count, _ in pulls}) > 1
    assert loss - plain == pytest.approx(sum(count * pull for count, pull in pulls) / total, rel=1e-10)
    assert validated == same
