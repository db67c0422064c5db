"""Order: permutations that are pure functions of a key, the same on every mesh, machine and version of NumPy.

NumPy promises the bits of its generators but not what ``permutation`` makes of them (NEP 19), so a run resumed after an
upgrade could meet its samples in another order. Here everything comes from one integer hash.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Hashes = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = 2**64 - 1
_ROUNDS = 64


def mix(*keys: ArrayLike) -> Hashes:
    """A hash of integer keys, which are broadcast against each other; at least one element long.

    Each key in turn goes through the finaliser of SplitMix64 (Steele, Lea and Flood 2014).
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _scramble(state + _word(key) + _GAMMA)
    return state


def order(n: int, *key: int) -> NDArray[np.int64]:
    """A permutation of ``range(n)`` that depends on ``n`` and ``key`` alone."""
    return np.argsort(mix(*key, np.arange(n)), kind="stable")


def shuffled(i: ArrayLike, n: ArrayLike, *key: ArrayLike) -> NDArray[np.int64]:
    """Element ``i`` of a permutation of ``range(n)``, without making the permutation.

    All arguments are broadcast, so each element may come from another permutation. Swap-or-not (Hoang, Morris and
    Rogaway 2012): each round pairs every number with one partner and swaps the two, or not, by a bit that both see.
    """
    x, n, start = np.broadcast_arrays(_word(i), _word(n), mix(*key))
    for turn in range(1, _ROUNDS + 1):
        now = _scramble(start + _word(turn) * _GAMMA)
        partner = (now % n + n - x) % n
        swap = _scramble(now ^ np.maximum(x, partner)) >> np.uint64(63)
        x = np.where(swap == 1, partner, x)
    return x.astype(np.int64)


def _word(key: ArrayLike) -> Hashes:
    """A key as 64-bit words; at least one long, since NumPy warns when a lone scalar wraps around."""
    if isinstance(key, int):
        return np.full(1, key & _WORD, np.uint64)
    return np.atleast_1d(np.asarray(key)).astype(np.uint64)


def _scramble(z: Hashes) -> Hashes:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
