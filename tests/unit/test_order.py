"""Order: permutations that are pure functions of their key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.order import mix, order, shuffled

KEYS = st.integers(0, 2**64 - 1)


@given(st.integers(0, 300), KEYS)
def test_an_order_has_every_number_once(n, key):
    assert sorted(order(n, key)) == list(range(n))


@given(st.integers(1, 300), KEYS)
def test_a_shuffle_has_every_number_once(n, key):
    assert sorted(shuffled(np.arange(n), n, key)) == list(range(n))


@given(st.integers(1, 10**15), st.data(), KEYS)
def test_an_element_of_a_shuffle_is_found_alone_as_among_others(n, data, key):
    chosen = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    together = shuffled(chosen, n, key)
    assert all(0 <= x < n for x in together)
    assert [int(shuffled(i, n, key)[0]) for i in chosen] == together.tolist()


def test_each_element_may_have_its_own_length_and_key():
    together = shuffled([1, 2, 3], [4, 5, 6], 9, [7, 7, 8])
    assert together.tolist() == [
        int(shuffled(i, n, 9, key)[0]) for i, n, key in zip([1, 2, 3], [4, 5, 6], [7, 7, 8], strict=True)
    ]


@pytest.mark.parametrize("n", [2, 5, 100])
def test_over_many_keys_every_number_comes_to_every_place(n):
    keys = np.arange(200 * n)
    by_shuffle = np.bincount(shuffled(0, n, 3, keys), minlength=n)
    by_order = np.bincount([order(n, 3, int(key))[0] for key in keys], minlength=n)
    # 200 are expected in each place, with a standard deviation of less than sqrt(200)
    assert abs(by_shuffle - 200).max() < 6 * np.sqrt(200)
    assert abs(by_order - 200).max() < 6 * np.sqrt(200)


def test_keys_are_told_apart_by_value_and_by_place():
    assert len({int(mix(*key)[0]) for key in [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2**63,), (-1,)]}) == 8


def test_orders_are_the_same_in_every_release():
    """Others would break the resumption of runs."""
    assert order(8, 1, 2).tolist() == [1, 3, 7, 2, 6, 4, 5, 0]
    assert shuffled(np.arange(8), 8, 1, 2).tolist() == [5, 7, 3, 4, 6, 2, 1, 0]
