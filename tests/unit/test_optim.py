"""AdamW against torch's own, and the norm and clipping of gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.group import SoloGroup
from hpctrain.config import OptimConfig
from hpctrain.errors import ShapeError
from hpctrain.optim import adamw
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.clip import CHUNK, global_norm, scale_
from hpctrain.optim.flat import Flat

SHAPES = [(7, 5), (11,), (3, 2, 4), (0, 4), (1,)]
CONFIG = OptimConfig(beta1=0.8, beta2=0.97, epsilon=1e-6, decay=0.3)


def flat_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def torchs(parameters: list[torch.Tensor]) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": CONFIG.decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (CONFIG.beta1, CONFIG.beta2)
    return torch.optim.AdamW(groups, lr=1.0, betas=betas, eps=CONFIG.epsilon, foreach=False)


@pytest.mark.parametrize("update", [adamw.UPDATE, adamw.plain], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ten_updates_are_those_of_torch(update, dtype, monkeypatch):
    monkeypatch.setattr(adamw, "UPDATE", update)
    make = torch.Generator().manual_seed(1)
    parameters = [torch.randn(shape, dtype=dtype, generator=make) for shape in SHAPES]
    parameters[0] = torch.randn(5, 7, dtype=dtype, generator=make).t()  # a transposed view: its flat copy is in order
    parameters = [p.requires_grad_() for p in parameters]
    split = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]
    flats = [Flat(flat_of(ps), torch.empty_like(flat_of(ps)), ps is split[0]) for ps in split]
    ours, theirs = AdamW(flats, CONFIG), torchs(parameters)
    for step in range(10):
        rate = 0.01 * (step + 1)
        for p in parameters:
            p.grad = torch.randn(p.shape, dtype=dtype, generator=make)
        for flat, ps in zip(flats, split, strict=True):
            flat.gradient.copy_(flat_of([p.grad for p in ps]))
        for group in theirs.param_groups:
            group["lr"] = rate
        theirs.step()
        ours.update(rate, step)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for i, ps in enumerate(split):
        for actual, expected in [
            (flats[i].parameter, flat_of(ps)),
            *((ours.states()[name][i], flat_of([theirs.state[p][name] for p in ps])) for name in ours.states()),
        ]:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_updates_go_on_from_states_that_were_filled_in_place():
    def fresh() -> AdamW:
        return AdamW([Flat(torch.linspace(-1, 1, 9), torch.linspace(2, -1, 9), True)], CONFIG)

    unbroken, first, second = fresh(), fresh(), fresh()
    for step in range(6):
        unbroken.update(0.1, step)
    for step in range(3):
        first.update(0.1, step)
    second.flats[0].parameter.copy_(first.flats[0].parameter)
    for name, tensors in second.states().items():
        tensors[0].copy_(first.states()[name][0])
    for step in range(3, 6):
        second.update(0.1, step)
    assert torch.equal(second.flats[0].parameter, unbroken.flats[0].parameter)


@given(st.integers(0, 60), st.integers(0, 60))
def test_an_interval_is_updated_as_it_is_within_the_whole(a, b):
    start, stop = sorted((a, b))
    make = torch.Generator().manual_seed(2)
    x, gradient = torch.randn(2, 60, dtype=torch.float64, generator=make)
    whole = Flat(x.clone(), gradient, True)
    part = Flat(x[start:stop].clone(), gradient[start:stop], True)
    for flat in (whole, part):
        AdamW([flat], CONFIG).update(0.1, 0)
    torch.testing.assert_close(part.parameter, whole.parameter[start:stop], rtol=1e-14, atol=0)


@pytest.mark.parametrize("tensor", [torch.zeros(4, 3), torch.zeros(8)[::2]], ids=["matrix", "gaps"])
def test_what_is_not_flat_is_refused_with_its_mend(tensor):
    with pytest.raises(ShapeError, match="is not flat") as told:
        Flat(tensor, tensor, True)
    assert "view of a flat buffer" in told.value.mend


@pytest.mark.parametrize("gradient", [torch.zeros(3), torch.zeros(4, dtype=torch.float64)])
def test_gradients_that_do_not_fit_are_refused(gradient):
    with pytest.raises(ShapeError, match="4 parameters in torch.float32 do not go with"):
        Flat(torch.zeros(4), gradient, True)


# ---- norm and clip -----------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2 * CHUNK + 5), max_size=3), st.sampled_from([torch.float32, torch.float64]))
def test_the_norm_is_that_of_all_elements_in_double_precision(sizes, dtype):
    make = torch.Generator().manual_seed(3)
    gradients = [torch.randn(size, generator=make).to(dtype) for size in sizes]
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    for group in (None, SoloGroup()):
        assert global_norm(gradients, group) == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-6)


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_clipped_norm_is_the_smaller_of_norm_and_limit(size, limit):
    gradients = [torch.full((3,), size, dtype=torch.float64), torch.full((2, 2), -size, dtype=torch.float64)]
    norm = global_norm(gradients)
    scale_(gradients, norm, limit)
    assert global_norm(gradients) == pytest.approx(min(norm, limit), rel=1e-12)
    assert (gradients[1] < 0).all()


def test_a_limit_of_zero_clips_nothing():
    gradient = torch.tensor([3.0, 4.0])
    scale_([gradient], 5.0, 0.0)
    assert gradient.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("fault", [math.inf, -math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_told_and_changes_nothing(fault):
    gradient = torch.tensor([1.0, fault])
    norm = global_norm([gradient])
    assert not math.isfinite(norm)
    scale_([gradient], norm, 0.5)
    assert gradient[0] == 1.0
