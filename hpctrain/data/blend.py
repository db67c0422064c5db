"""Blend: which source gives the n-th sample of a run, and which of its samples that is.

The answer depends on n alone, so a run resumes from its step. Weights become whole turns of a period; within it each
turn goes to the source whose next sample is due first. Sample k of a source with share w may come no earlier than turn
k/w and must be there at turn (k+1)/w. Serving the earliest deadline keeps all these windows (Pfair scheduling: Baruah,
Cohen, Plaxton and Varvel 1996), so at every n each source has given n x w samples, to less than one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.errors import ConfigError

# Weights that do not fit a period of this length are rounded to it: a change of a share by less than 1/65536.
LONGEST = 65536


@dataclass(frozen=True, eq=False)
class Blend:
    """A period of turns; ``quotas[s]`` of them belong to source s."""

    turns: NDArray[np.int64]
    earlier: NDArray[np.int64]
    quotas: NDArray[np.int64]

    @classmethod
    def of(cls, weights: Sequence[float]) -> Blend:
        """Blend sources in proportion to ``weights``."""
        shares = quotas(weights)
        turns, earlier = _turns(shares)
        return cls(turns, earlier, np.array(shares))

    @property
    def period(self) -> int:
        return len(self.turns)

    def pick(self, n: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The source of each sample ``n``, and how many samples that source gave before."""
        periods, turn = np.divmod(np.asarray(n, np.int64), self.period)
        source = self.turns[turn]
        return source, periods * self.quotas[source] + self.earlier[turn]

    def reach(self, stocks: Sequence[int]) -> int:
        """How many samples can be taken before one is wanted from a source that has given its whole stock."""
        return min(self._wants(source, stock) for source, stock in enumerate(stocks))

    def _wants(self, source: int, index: int) -> int:
        """The n at which ``source`` gives its sample ``index``."""
        periods, rest = divmod(index, int(self.quotas[source]))
        return periods * self.period + int(np.flatnonzero(self.turns == source)[rest])


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportion of ``weights``: exact when they add up to no more than ``LONGEST``."""
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"data.sources: weights {list(weights)} cannot be blended", "", "give each a weight above 0")
    # repr, not the float's own value: 0.1 is meant as one tenth.
    exact = [Fraction(repr(weight)) for weight in weights]
    whole = math.lcm(*(part.denominator for part in exact))
    counts = [int(part * whole) for part in exact]
    common = math.gcd(*counts)
    if (total := sum(counts) // common) <= LONGEST:
        return tuple(count // common for count in counts)
    return tuple(max(1, round(Fraction(count, common * total) * LONGEST)) for count in counts)


def _turns(quotas: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The source of each turn of a period, and how many turns that source had before."""
    period = sum(quotas)
    turns, earlier = np.empty(period, np.int64), np.empty(period, np.int64)
    given = [0] * len(quotas)
    waiting = [(0, source) for source in range(len(quotas))]
    ready: list[tuple[int, int]] = []
    for turn in range(period):
        while waiting and waiting[0][0] <= turn:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(given[source] + 1) * period // quotas[source]), source))
        source = heapq.heappop(ready)[1]
        turns[turn], earlier[turn] = source, given[source]
        given[source] += 1
        if given[source] < quotas[source]:
            heapq.heappush(waiting, (given[source] * period // quotas[source], source))
    return turns, earlier
