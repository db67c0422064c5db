"""Flat tensors, the norm of gradients, and clipping it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.group import SoloGroup
from hpctrain.errors import ShapeError
from hpctrain.optim.clip import CHUNK, global_norm, scale_
from hpctrain.optim.flat import Flat


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
