"""AdamW in 8 bits: the codes, the same under any cut, and as good as AdamW within a bound."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.group import SoloGroup
from hpctrain.config import OptimConfig
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.adamw8bit import AdamW8bit
from hpctrain.optim.codes import decode, encode, largest, stretched, table
from hpctrain.plan.states import BLOCK
from tests.contract.optimizer import OptimizerContract
from tests.support import shards

CPU = torch.device("cpu")
CONFIG = OptimConfig(kind="adamw8bit", beta1=0.8, beta2=0.97, epsilon=1e-6, decay=0.3)
SHAPE = {"w": (90, 71)}  # 25 blocks, the last one not whole


class TestAdamW8bit(OptimizerContract):
    make = staticmethod(partial(AdamW8bit, config=CONFIG))

    def same(self, found, expected, dtype):
        super().same(found, expected, dtype)
        for state in found[1]:  # what is coded is the same bit for bit
            if state.endswith(("_code", "_scale")):
                assert all(torch.equal(found[1][state][name], x) for name, x in expected[1][state].items())
        assert torch.equal(found[0]["blocks.1.large.weight"], expected[0]["blocks.1.large.weight"])


@pytest.mark.parametrize("signed", [True, False])
def test_there_are_256_numbers_up_to_one_and_zero_is_among_them(signed):
    numbers = table(signed, CPU)
    assert len(set(numbers.tolist())) == 256 and numbers.tolist() == sorted(numbers.tolist())
    assert 0.0 in numbers.tolist() and numbers[-1] == 1.0
    assert numbers[0] == pytest.approx(-0.993, abs=1e-3) if signed else numbers[0] == 0.0


@pytest.mark.parametrize("signed", [True, False])
def test_every_code_is_the_code_of_its_number_under_any_scale(signed):
    codes = torch.arange(256, dtype=torch.uint8)
    for scale in (1.0, 3e-30, 7.1e20):
        scales = torch.full((256,), scale)
        assert torch.equal(encode(decode(codes, scales, signed), scales, signed), codes)


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_has_the_code_that_a_search_finds(signed):
    """Every number of fp32 with its low bits at random, at their least and at their most, up to where codes end."""
    make = torch.Generator().manual_seed(1)
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    low = torch.randint(0, 1 << 16, (6, 1 << 16), generator=make, dtype=torch.int32)
    low[0], low[1] = 0, 0xFFFF
    x = (high | low).view(torch.float32).view(-1)
    numbers = table(signed, CPU)
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat([x[x.abs() <= 1.0], middles, torch.nextafter(middles, torch.tensor(-1.0))])
    x = x if signed else x[x > numbers[1]]
    assert torch.equal(encode(x, torch.ones_like(x), signed).long(), torch.bucketize(x, middles, right=True))


@given(st.integers(0, 2**32), st.floats(-20, 20), st.booleans())
def test_a_number_comes_back_within_half_a_step_of_its_decade(seed, size, signed):
    x = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)) * 10.0**size
    x = x if signed else x.abs()
    scales = largest(x, 0).repeat_interleave(BLOCK)
    back = decode(encode(x, scales, signed), scales, signed)
    # The codes of a decade are 0.9 / count apart, the last of one and the first of the next a little more.
    bound = (0.45 / (64 if signed else 128)) + 1e-6
    assert ((back - x).abs() <= bound * scales).all()
    top = x.abs() > 0.11 * scales
    assert ((back - x).abs()[top] <= 0.09 * x.abs()[top]).all()


def test_a_square_that_is_not_zero_never_becomes_zero():
    x = torch.tensor([0.0, 1e-12, 1e-8, 1.0])
    back = decode(encode(x, torch.ones(4), False), torch.ones(4), False)
    assert back[0] == 0 and (back[1:] > 0).all() and back[1] == table(False, CPU)[1]


@given(st.integers(0, 600), st.integers(1, 700))
def test_scales_are_of_blocks_of_the_whole_parameter(first, count):
    whole = torch.randn(1400, generator=torch.Generator().manual_seed(2))
    part = whole[first : first + count]
    found, start = largest(part, first), first // BLOCK
    for number, scale in enumerate(found, start):
        low, high = max(number * BLOCK, first), min((number + 1) * BLOCK, first + count)
        assert scale == whole[low:high].abs().max()
    scales = largest(whole, 0)
    expected = scales[torch.arange(1400) // BLOCK][first : first + count]
    assert torch.equal(stretched(scales, first, first + count), expected)


def test_small_parameters_keep_their_means_as_they_are():
    weights = shards.random({"norm": (4095,), "w": (64, 64)}, 1, torch.float32)
    states = AdamW8bit(shards.flats(weights, weights), CONFIG, SoloGroup()).states()
    assert [one.parameter for one in states["exp_avg"]] == ["norm"]
    assert [(one.parameter, one.tensor.dtype) for one in states["exp_avg_code"]] == [("w", torch.uint8)]
    assert states["exp_avg_sq_scale"][0].tensor.shape == (16,)


def test_fifty_updates_stay_close_to_those_of_adamw():
    """Gradients of one size with noise, as in a step of training; the bound is of the way that the weights went."""
    weights = shards.random(SHAPE, 1, torch.float32)
    drift = shards.random(SHAPE, 2, torch.float32)["w"]
    gradients = [{"w": drift + shards.random(SHAPE, 3 + step, torch.float32)["w"]} for step in range(50)]
    ends = [
        shards.course(lambda flats, group, kind=kind: kind(flats, CONFIG, group), weights, gradients)[0]["w"]
        for kind in (AdamW, AdamW8bit)
    ]
    way = (ends[0] - weights["w"]).square().mean().sqrt()
    assert (ends[1] - ends[0]).square().mean().sqrt() < 0.02 * way


def test_a_row_without_gradients_takes_no_huge_steps():
    """A token that is not in the batch: its means fade, and the mean of a small gradient outlives its square's code."""
    config = OptimConfig(kind="adamw8bit", decay=0.0)
    rows = torch.logspace(-4, 0, BLOCK).expand(16, BLOCK).contiguous()
    gradients = [{"w": rows}, *[{"w": torch.zeros_like(rows)}] * 30]
    weights = {"w": torch.zeros_like(rows)}
    found, _ = shards.course(lambda flats, group: AdamW8bit(flats, config, group), weights, gradients)
    exact, _ = shards.course(lambda flats, group: AdamW(flats, config, group), weights, gradients)
    assert found["w"].abs().max() < 2 * exact["w"].abs().max()
