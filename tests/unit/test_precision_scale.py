"""The loss scale: when it grows, when it shrinks, and which steps it leaves out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import PrecisionConfig
from hpctrain.precision.scale import CEILING, LossScale, Scale

CONFIG = PrecisionConfig(compute="fp16", scale=1024.0, scale_interval=3, scale_floor=4.0)


def test_it_doubles_after_as_many_good_steps_as_the_interval_says_and_halves_at_an_overflow() -> None:
    values, now = [], Scale(1024.0)
    for overflowed in [False, False, True, False, False, False, False, True, True]:
        now = now.next(overflowed, CONFIG)
        values.append(now.value)
    assert values == [1024, 1024, 512, 512, 512, 1024, 1024, 512, 256]


@given(st.lists(st.booleans(), max_size=200))
def test_it_is_always_a_power_of_two_between_its_floor_and_its_ceiling(course: list[bool]) -> None:
    now = Scale(1024.0)
    for overflowed in course:
        now = now.next(overflowed, CONFIG)
        assert math.frexp(now.value)[0] == 0.5 and CONFIG.scale_floor <= now.value <= CEILING
        assert 0 <= now.steps < CONFIG.scale_interval


def test_a_scale_that_starts_above_the_ceiling_stays_there_until_an_overflow() -> None:
    high = Scale(2 * CEILING, steps=2)
    assert high.next(False, CONFIG).value == 2 * CEILING and high.next(True, CONFIG).value == CEILING


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_overflowed_is_left_out_until_the_scale_is_at_its_floor(bad: float) -> None:
    scale = LossScale(CONFIG)
    assert not scale.skips(3.0) and scale.value == 1024
    left_out = [scale.skips(bad) for _ in range(10)]
    assert left_out == [True] * 8 + [False] * 2 and scale.value == CONFIG.scale_floor


def test_a_run_goes_on_with_the_scale_and_the_count_that_it_stopped_with() -> None:
    one, other = LossScale(CONFIG), LossScale(CONFIG)
    for norm in (1.0, math.inf, 1.0, 1.0):
        one.skips(norm)
    other.states()["scale"].copy_(one.states()["scale"])
    assert other.value == one.value == 512
    assert [scale.skips(1.0) for scale in (one, other)] == [False, False] and one.value == other.value == 1024


@pytest.mark.parametrize("compute", ["fp64", "fp32", "bf16"])
def test_other_formats_have_no_scale_and_leave_nothing_out(compute: str) -> None:
    scale = LossScale(PrecisionConfig(compute=compute))
    assert not scale.skips(math.inf) and not scale.skips(1.0)
    assert scale.value == 1 and scale.states() == {}
