"""The course of the learning rate."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import OptimConfig
from hpctrain.optim.rate import SHAPES, rate

configs = st.builds(
    OptimConfig,
    rate=st.floats(1e-6, 1.0),
    shape=st.sampled_from(sorted(SHAPES)),
    warmup=st.integers(0, 20),
    floor=st.floats(0, 1),
    cooldown=st.floats(0.01, 1),
)
falling = configs.filter(lambda config: config.shape != "constant")


@given(configs, st.integers(1, 200), st.integers(0, 300))
def test_the_rate_stays_between_nothing_and_the_highest(config, steps, step):
    assert 0 <= rate(config, step, steps) <= config.rate * (1 + 1e-12)


@given(configs.filter(lambda config: config.warmup), st.integers(30, 200))
def test_the_warm_up_rises_in_equal_parts_and_ends_at_the_highest(config, steps):
    course = [rate(config, step, steps) for step in range(config.warmup)]
    assert course == pytest.approx([config.rate * (step + 1) / config.warmup for step in range(config.warmup)])


@given(configs, st.integers(30, 200))
def test_after_the_warm_up_the_rate_never_rises(config, steps):
    course = [rate(config, step, steps) for step in range(max(config.warmup, 1) - 1, steps + 5)]
    assert course[0] == pytest.approx(config.rate)
    assert all(after <= before * (1 + 1e-12) for before, after in zip(course, course[1:], strict=False))


@given(falling, st.integers(30, 200))
def test_the_last_step_and_all_beyond_are_at_the_floor(config, steps):
    for step in (steps - 1, steps, steps + 50):
        assert rate(config, step, steps) == pytest.approx(config.rate * config.floor, abs=1e-15)


@given(configs, st.integers(30, 200))
def test_no_step_falls_further_than_its_shape_allows(config, steps):
    span = steps - max(config.warmup, 1)
    steepest = {"constant": 0.0, "linear": 1.0, "cosine": 1.6, "wsd": 1 / config.cooldown}[config.shape]
    course = [rate(config, step, steps) for step in range(config.warmup, steps)]
    drops = [before - after for before, after in zip(course, course[1:], strict=False)]
    assert max(drops) <= config.rate * (1 - config.floor) * steepest / span + 1e-15


def test_shapes_at_a_quarter_and_at_half_of_the_way():
    def at(shape: str, step: int) -> float:
        return rate(OptimConfig(rate=1.0, floor=0.0, warmup=0, shape=shape, cooldown=0.25), step, 101)

    assert [at("constant", 25), at("constant", 50)] == [1.0, 1.0]
    assert [at("linear", 25), at("linear", 50)] == [0.75, 0.5]
    assert [at("cosine", 25), at("cosine", 50)] == pytest.approx([0.5 + 0.125**0.5, 0.5])
    assert [at("wsd", 75), at("wsd", 90)] == pytest.approx([1.0, 0.4])


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_of_one_step_has_the_highest_rate(steps):
    assert rate(OptimConfig(rate=1.0, warmup=0), 0, steps) == 1.0


def test_a_run_shorter_than_its_warm_up_only_rises():
    assert [rate(OptimConfig(rate=1.0, warmup=4), step, 3) for step in range(3)] == [0.25, 0.5, 0.75]


def test_the_course_of_the_rate_needs_no_torch():
    code = "import sys, hpctrain.optim.rate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
