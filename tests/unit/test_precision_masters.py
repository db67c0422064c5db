"""Masters: small updates and small gradients are not lost to the 16-bit format that the products are taken in."""

from __future__ import annotations

import pytest
import torch

from hpctrain.plan.formats import FORMATS
from hpctrain.precision.masters import Masters, accumulate, wide

SHORT = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_updates_too_small_for_the_format_add_up(dtype: torch.dtype) -> None:
    masters = Masters([torch.ones(4, dtype=dtype)])
    for _ in range(1000):
        masters.tensors[0].add_(1e-4)
        masters.round()
    torch.testing.assert_close(masters.weights[0].float(), torch.full((4,), 1.1), rtol=2**-9, atol=0)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_weights_are_the_nearest_numbers_to_values_that_the_format_does_not_have(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    weights = torch.zeros(1000, dtype=dtype)
    masters = Masters([weights], [values])
    assert torch.equal(masters.tensors[0], values) and masters.tensors[0] is not values
    assert torch.equal(weights, values.to(dtype)) and masters.weights[0] is weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_formats_are_their_own_masters_and_cost_nothing(dtype: torch.dtype) -> None:
    weights = torch.zeros(3, dtype=dtype)
    masters = Masters([weights], [torch.arange(3)])
    assert masters.tensors[0] is weights and weights.tolist() == [0, 1, 2]
    assert masters.nbytes == 0 and Masters([torch.zeros(3, dtype=torch.bfloat16)]).nbytes == 12


def test_an_interval_without_elements_has_a_master_without_elements() -> None:
    assert [m.numel() for m in Masters([torch.empty(0, dtype=torch.bfloat16)]).tensors] == [0]


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_small_gradients_of_many_microbatches_add_up(dtype: torch.dtype) -> None:
    total = torch.full((1,), torch.nan, dtype=wide(dtype))
    for microbatch in range(512):
        accumulate(total, torch.full((1,), 1.0 if microbatch == 0 else 2**-9, dtype=dtype), microbatch == 0)
    assert total.item() == 1 + 511 * 2**-9


def test_the_plan_and_the_tensors_agree_about_formats_and_bytes() -> None:
    for form in FORMATS.values():
        compute, master = getattr(torch, form.compute), getattr(torch, form.master)
        weights = torch.zeros(10, dtype=compute)
        assert wide(compute) == master and wide(master) == master
        assert form.mixed == (compute != master)
        assert form.weight_bytes(10) == weights.nbytes and form.master_bytes(10) == Masters([weights]).nbytes
        assert form.gradient_bytes(10) == torch.zeros(10, dtype=master).nbytes
