"""Deals: how many blocks each stage of a pipeline has, where nobody says it.

A step takes no less than its dearest stage, and no less than its dearest rank, which may have several stages. The one
is met by equal stages, the first ones the larger; the other by giving block after block to the rank that has least to
do. Which is better depends on how stages wait for each other, so the simulator decides.
"""

from __future__ import annotations

from collections import Counter

from hpctrain.plan.layout import piece
from hpctrain.schedule.action import Schedule
from hpctrain.schedule.simulate import Costs, simulate

# Forwards that are simulated, in some tenths of a second. Of a longer step its beginning decides: at least three times
# as many micro-batches as ranks, which shows how a pipeline fills and what it does when it is full.
FORWARDS = 2048
ROUNDS = 3

Deal = tuple[int, ...]


def deal(layers: int, head: float, schedule: Schedule) -> Deal:
    """Blocks of each stage, of at least as many ``layers`` as stages; ``head`` is the cost of the head, in blocks.

    A step takes no longer than with the blocks in equal stages; of a long one, which would take long to simulate, that
    is so of its beginning.
    """
    choices = dict.fromkeys((by_stage(layers, head, schedule.stages), by_rank(layers, head, schedule)))
    if len(choices) == 1:
        return next(iter(choices))
    simulated = beginning(schedule, max(ROUNDS * len(schedule.ranks), FORWARDS // schedule.stages))
    return min(choices, key=lambda one: round(seconds(one, head, simulated), 6))  # the first of equals


def by_stage(layers: int, head: float, count: int) -> Deal:
    """Stages as equal as can be, the first ones larger; the last one has fewer, by what the head costs."""
    if count == 1:
        return (layers,)

    def dealt(last: int) -> Deal:
        rest = [piece(layers - last, count - 1, number) for number in range(count - 1)]
        return (*(stop - start for start, stop in rest), last)

    choices = [dealt(last) for last in range(1, layers - count + 2)]
    return min(choices, key=lambda deal: (max(*deal[:-1], deal[-1] + head), -deal[-1]))


def by_rank(layers: int, head: float, schedule: Schedule) -> Deal:
    """Ranks as equal as can be, the first ones first; on a rank the later stages are larger, which wait longer."""
    home, cost = schedule.home, [1.0] * (schedule.stages - 1) + [1.0 + head]
    work = Counter()
    for stage, one in enumerate(cost):
        work[home[stage]] += one
    found = [1] * schedule.stages
    for _ in range(layers - schedule.stages):
        stage = min(range(schedule.stages), key=lambda one: (work[home[one]], home[one], cost[one], -one))
        found[stage] += 1
        cost[stage] += 1
        work[home[stage]] += 1
    return tuple(found)


def seconds(deal: Deal, head: float, schedule: Schedule) -> float:
    """What a step takes, a block's forward, and the gradients of its input and of its weights, taking 1 each."""
    cost = (*map(float, deal[:-1]), deal[-1] + head)
    return simulate(schedule, Costs(cost, cost, cost)).makespan


def beginning(schedule: Schedule, microbatches: int) -> Schedule:
    """What a schedule does with its first micro-batches, without messages: what is left of a good order is one too."""
    return Schedule(
        tuple(
            tuple(one for one in actions if one.microbatch < microbatches and not one.is_message)
            for actions in schedule.ranks
        )
    )
