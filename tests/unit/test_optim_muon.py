"""Muon against torch's own, its polynomial against the singular values, and who owns which matrix."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.group import SoloGroup
from hpctrain.config import OptimConfig
from hpctrain.optim import muon
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.muon import Matrix, Muon, newton_schulz, waves
from hpctrain.optim.optimizer import Entry
from hpctrain.plan.states import orthogonal
from tests.contract.optimizer import SHAPES, OptimizerContract
from tests.support import shards

CONFIG = OptimConfig(kind="muon", decay=0.3, momentum=0.9, beta1=0.8)
HIDDEN = {"blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.large.weight", "blocks.0.experts"}


class TestMuon(OptimizerContract):
    make = staticmethod(partial(Muon, config=CONFIG))


@pytest.mark.parametrize("cuts", [(), (0.1, 0.35, 0.8)], ids=["one rank", "four ranks"])
def test_ten_updates_are_those_of_torch(cuts, monkeypatch):
    """Torch's iteration is in bf16 on every device; ours too, here."""
    monkeypatch.setitem(muon.FORMATS, "cpu", torch.bfloat16)
    weights = shards.random(SHAPES, 1, torch.float32)
    gradients = [shards.random(SHAPES, 2 + step, torch.float32) for step in range(10)]
    stacks = {name: weights[name].view(-1, *SHAPES[name][-2:]).unbind() for name in HIDDEN}
    theirs = {name: [x.clone().requires_grad_() for x in stack] for name, stack in stacks.items()}
    reference = torch.optim.Muon(
        [x for stack in theirs.values() for x in stack],
        lr=0.01, weight_decay=0.3, momentum=0.9, ns_steps=5, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    for now in gradients:
        for name, stack in theirs.items():
            for x, gradient in zip(stack, now[name].view(-1, *SHAPES[name][-2:]), strict=True):
                x.grad = gradient
        reference.step()
    found, states = shards.course(lambda flats, group: Muon(flats, CONFIG, group), weights, gradients, cuts)
    for name, stack in theirs.items():
        momentum = torch.stack([reference.state[x]["momentum_buffer"] for x in stack]).view(SHAPES[name])
        torch.testing.assert_close(states["momentum"][name], momentum, rtol=1e-5, atol=1e-6)
        expected = torch.stack([x.detach() for x in stack]).view(SHAPES[name])
        # A momentum that is rounded to bf16 the other way moves a step by a 256th at most.
        way = (expected - weights[name]).abs().max()
        assert (found[name] - expected).abs().max() < 4e-3 * way


def test_what_is_no_hidden_matrix_goes_with_adamw():
    weights = shards.random(SHAPES, 1)
    gradients = [shards.random(SHAPES, 2 + step) for step in range(3)]
    found, states = shards.course(lambda flats, group: Muon(flats, CONFIG, group), weights, gradients)
    expected, _ = shards.course(lambda flats, group: AdamW(flats, CONFIG, group), weights, gradients)
    assert set(states["momentum"]) == HIDDEN and set(states["exp_avg"]) == set(SHAPES) - HIDDEN
    for name in set(SHAPES) - HIDDEN:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(20, 7), (7, 20), (12, 12), (1, 5)])
def test_the_iteration_is_its_polynomial_on_the_singular_values(shape):
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(x / x.norm(), full_matrices=False)
    one, three, five = muon.COEFFICIENTS
    for _ in range(5):
        values = one * values + three * values**3 + five * values**5
    torch.testing.assert_close(newton_schulz(x, 5), left @ values.diag() @ right, rtol=0, atol=1e-12)
    assert ((values > 0.65) & (values < 1.25)).all()


@pytest.mark.parametrize(
    ("name", "shape", "taken"),
    [
        ("blocks.0.mlp.up.weight", (8, 4), True),
        ("layers.3.self_attn.in_proj_weight", (8, 4), True),
        ("blocks.0.mlp.up.bias", (8,), False),
        ("blocks.0.experts", (2, 8, 4), True),
        ("blocks.0.stem", (2, 8, 3, 3), False),
        ("embed.tokens", (8, 4), False),
        ("head.logits.weight", (8, 4), False),
        ("model.embed_tokens.weight", (8, 4), False),
        ("transformer.wte.weight", (8, 4), False),
        ("lm_head.weight", (8, 4), False),
        ("nothing", (0, 4), False),
    ],
)
def test_the_matrices_of_hidden_layers_are_taken_and_no_others(name, shape, taken):
    assert orthogonal(name, shape, OptimConfig().muon_except) == taken


def test_names_may_be_excepted_by_the_configuration():
    config = CONFIG.model_copy(update={"muon_except": ("*.up.*",)})
    weights = shards.random(SHAPES, 1)
    states = Muon(shards.flats(weights, weights), config, SoloGroup()).states()
    taken = {one.parameter for one in states["momentum"]}
    assert taken == {"embed.tokens", *HIDDEN} - {"blocks.0.up.weight"}


@given(st.integers(1, 4), st.lists(st.integers(0, 4 * 6), max_size=3))
def test_a_stack_is_as_many_matrices_whose_elements_are_where_the_stacks_are(count, edges):
    edges = [min(edge, count * 6) for edge in [0, *sorted(edges), count * 6]]
    runs = tuple(zip(edges, edges[1:], strict=False))
    found = Matrix.all_of(Entry("experts", (count, 2, 3), True, runs))
    assert [one.number for one in found] == list(range(count))
    for rank, (start, stop) in enumerate(runs):
        spread = [one.number * 6 + place for one in found for place in range(*one.runs[rank])]
        assert spread == list(range(start, stop))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), max_size=12), st.integers(1, 5))
def test_each_matrix_has_one_owner_and_those_of_a_wave_cost_alike(shapes, ranks):
    matrices = [Matrix(f"w{number}", 0, shape, True, ()) for number, shape in enumerate(shapes)]
    found = waves(matrices, ranks)
    assert sorted(one.name for wave in found for one in wave) == sorted(one.name for one in matrices)
    assert all(len(wave) == ranks for wave in found[:-1])
    costs = [min(one.shape) * one.size for wave in found for one in wave]
    assert costs == sorted(costs, reverse=True)
