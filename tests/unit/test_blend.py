"""Blend: which source gives which sample."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.data.blend import LONGEST, Blend, quotas
from hpctrain.errors import ConfigError

WHOLE = st.lists(st.integers(1, 40), min_size=1, max_size=8)
REAL = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


def counts_after_each(blend: Blend, samples: int) -> np.ndarray:
    """How many samples each source has given after 1, 2, ... samples, [samples, sources]."""
    source, _ = blend.pick(np.arange(samples))
    return np.cumsum(source[:, None] == np.arange(len(blend.quotas)), axis=0)


@given(WHOLE)
def test_at_every_sample_each_source_has_given_its_share_to_less_than_one(weights):
    samples = 3 * sum(weights)
    given_so_far = counts_after_each(Blend.of(weights), samples)
    # In whole numbers: |count - n w / sum| < 1
    off = given_so_far * sum(weights) - np.arange(1, samples + 1)[:, None] * np.array(weights)
    assert abs(off).max() < sum(weights)


@settings(max_examples=15)
@given(REAL)
def test_real_weights_keep_their_shares_too(weights):
    blend = Blend.of(weights)
    shares = np.array(weights) / sum(weights)
    assert abs(blend.quotas / blend.period - shares).max() < 2 * len(weights) / LONGEST
    off = counts_after_each(blend, 500) - np.arange(1, 501)[:, None] * blend.quotas / blend.period
    assert abs(off).max() < 1


@given(WHOLE, st.integers(0, 10**14))
def test_a_source_gives_its_samples_one_after_the_other(weights, first):
    blend = Blend.of(weights)
    source, index = blend.pick(np.arange(first, first + 200))
    for one in range(len(weights)):
        mine, when = index[source == one], first + np.flatnonzero(source == one)
        assert (np.diff(mine) == 1).all()
        # sample i comes no earlier than its share of the samples before says, and no later than that of sample i + 1
        assert all(i * sum(weights) < (int(n) + 1) * weights[one] for i, n in zip(mine.tolist(), when, strict=True))
        assert all(int(n) * weights[one] < (i + 1) * sum(weights) for i, n in zip(mine.tolist(), when, strict=True))


@given(WHOLE)
def test_a_sample_is_found_alone_as_among_others(weights):
    blend = Blend.of(weights)
    source, index = blend.pick(np.arange(50))
    alone = [blend.pick(n) for n in range(50)]
    assert [int(one) for one, _ in alone] == source.tolist()
    assert [int(i) for _, i in alone] == index.tolist()


@given(WHOLE, st.data())
def test_reach_ends_just_before_a_source_would_give_more_than_it_has(weights, data):
    stocks = data.draw(st.lists(st.integers(0, 30), min_size=len(weights), max_size=len(weights)))
    blend = Blend.of(weights)
    reach = blend.reach(stocks)
    source, index = blend.pick(np.arange(reach + 1))
    within = index < np.array(stocks)[source]
    assert within[:-1].all() and not within[-1]


@pytest.mark.parametrize(
    ("weights", "whole"),
    [([0.3, 0.7], (3, 7)), ([1, 1], (1, 1)), ([0.1, 0.2], (1, 2)), ([5], (1,)), ([2, 4, 1e-9], (21845, 43691, 1))],
)
def test_weights_become_whole_numbers(weights, whole):
    assert quotas(weights) == whole


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf"), 1.0]])
def test_weights_that_cannot_be_blended_are_refused(weights):
    with pytest.raises(ConfigError, match="cannot be blended\n.*give each a weight above 0"):
        Blend.of(weights)
