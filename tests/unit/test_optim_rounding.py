"""Stochastic rounding: right on average, and the same bits whoever rounds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.group import SoloGroup
from hpctrain.config import OptimConfig, parse
from hpctrain.errors import ConfigError
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.flat import Flat, Piece
from hpctrain.optim.rounding import BLOCK, random_bits, round_

CPU = torch.device("cpu")


COUNT = 1 << 18


def bits(first: int, count: int, name: str = "w", step: int = 0, seed: int = 1) -> torch.Tensor:
    whole = Piece(name, (4 * BLOCK,), first, 0, count)
    return torch.cat([random_bits(seed, step, piece, CPU) for piece in whole.split(BLOCK)])


@given(st.integers(0, 2000), st.integers(1, 3000))
def test_a_part_has_the_bits_of_the_whole_also_across_blocks(first, count):
    whole = bits(BLOCK - 1000, 5000)
    assert torch.equal(bits(BLOCK - 1000 + first, count), whole[first : first + count])


def test_every_bit_is_set_half_the_time_and_none_goes_with_another():
    words = bits(0, COUNT)
    table = torch.stack([(words >> place) & 1 for place in range(32)]).double()
    sigma = COUNT**-0.5
    assert ((table.mean(1) - 0.5).abs() < 5 * sigma / 2).all()
    correlation = torch.corrcoef(torch.cat([table, table.roll(1, 1), table.roll(7, 1)])).fill_diagonal_(0)
    assert correlation.abs().max() < 6 * sigma  # of 4560 pairs


@pytest.mark.parametrize("other", [{"name": "v"}, {"step": 1}, {"seed": 2}, {"first": BLOCK}])
def test_another_parameter_step_seed_or_block_has_other_bits(other):
    agree = (bits(**{"first": 0, "count": 1 << 16} | other) ^ bits(0, 1 << 16)).bitwise_and(0xFFFF) == 0
    assert agree.sum() < 12  # of 65536, one is expected


@pytest.mark.parametrize("number", [1.001, -1.001, 3e-5, -7.77e20, 1e-38])
def test_a_number_is_rounded_to_one_of_its_two_neighbours_and_to_itself_on_average(number):
    x = torch.full((COUNT,), number)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    round_(out, x.clone(), bits(0, COUNT))
    low, high = out.double().min(), out.double().max()
    exact = x[0].double()
    assert set(out.tolist()) == {float(low), float(high)} and low < exact < high
    share = (exact - low) / (high - low)
    sigma = (share * (1 - share) / (COUNT)) ** 0.5
    assert ((out.double().mean() - low) / (high - low) - share).abs() < 4 * sigma


@pytest.mark.parametrize("number", [0.0, -0.0, 1.0, -1.5, float("inf"), float("-inf")])
def test_what_bf16_holds_stays_itself(number):
    x = torch.full((COUNT,), number)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    round_(out, x.clone(), bits(0, COUNT))
    assert torch.equal(out.float(), x)


def test_means_in_bf16_follow_what_rounding_to_nearest_would_lose():
    """A mean that takes in a 1000th of each square moves by less than half of what bf16 can tell."""
    config = OptimConfig(states="bf16", beta1=0.9, beta2=0.999, decay=0.0)
    x, gradient = torch.zeros(4096), torch.ones(4096)
    optimizer = AdamW([Flat(x, gradient, True, (Piece("w", (4096,), 0, 0, 4096),))], config, SoloGroup())
    for step in range(1000):
        optimizer.update(1e-3, step)
    expected = 1 - 0.999**1000
    assert optimizer.exp_avg_sq[0].dtype == torch.bfloat16
    assert optimizer.exp_avg_sq[0].double().mean() == pytest.approx(expected, rel=2e-3)
    assert x.mean() == pytest.approx(-1.0, rel=2e-2)


def test_states_in_bf16_are_for_adamw_alone():
    with pytest.raises(ConfigError, match='optim.states = "bf16" does not go with optim.kind = "muon"') as told:
        parse({"optim": {"kind": "muon", "states": "bf16"}})
    assert "leave optim.states out" in told.value.mend
