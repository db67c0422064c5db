"""Bubbles and peaks of simulated schedules are the published ones: Qi 2023, table 1; Narayanan 2021, section 2.2.

``bubble`` is what a step takes beside the computing. Costs are those of one stage: where a rank has v of them, each
takes a v-th of what all its layers would.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpctrain.schedule.kinds import Shape, groups
from hpctrain.schedule.simulate import Costs, Timeline, peaks, simulate
from tests.support.schedules import build, examples, shapes

times = st.integers(1, 20)
costs = st.builds(Costs, times, times, times)
UNIT = Costs(1, 1, 1)


def bubble(timeline: Timeline) -> float:
    """What a step takes longer than its computing, all ranks starting together."""
    return timeline.makespan - max(timeline.work)


def bubble_of_a_rank(timeline: Timeline) -> float:
    """The same for the rank that is at it longest, each starting when it can."""
    return max(timeline.spans) - max(timeline.work)


# ---- backwards in one piece


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
def test_the_bubble_is_one_passage_of_the_other_ranks(kind):
    @examples(25)
    @given(shapes(kind), costs)
    def check(shape: Shape, costs: Costs) -> None:
        found = simulate(build(kind, shape), costs)
        assert bubble(found) == (shape.ranks - 1) * (costs.forward + costs.input + costs.weight)

    check()


@pytest.mark.parametrize("kind", ["interleaved", "looped-bfs"])
def test_the_bubble_of_v_chunks_is_one_passage_of_chunks(kind):
    """So it is (p - 1) / (v m) of the ideal time: for any groups, and where they are uneven too."""

    @examples(25)
    @given(shapes(kind), costs)
    def check(shape: Shape, costs: Costs) -> None:
        assume(shape.microbatches >= shape.ranks)
        found, chunk = simulate(build(kind, shape), costs), costs.forward + costs.input + costs.weight
        assert bubble(found) == (shape.ranks - 1) * chunk
        ideal = shape.chunks * shape.microbatches * chunk
        over_ideal = (shape.ranks - 1) / (shape.chunks * shape.microbatches)
        assert bubble(found) / ideal == pytest.approx(over_ideal, rel=1e-12)

    check()


@examples(40)
@given(shapes("1f1b"))
def test_a_rank_of_1f1b_holds_a_micro_batch_for_each_rank_that_follows(shape):
    expected = tuple(min(shape.ranks - rank, shape.microbatches) for rank in range(shape.ranks))
    assert peaks(build("1f1b", shape)) == expected


@pytest.mark.parametrize("kind", ["gpipe", "looped-bfs"])
def test_all_forwards_first_hold_every_micro_batch(kind):
    @examples(25)
    @given(shapes(kind))
    def check(shape: Shape) -> None:
        assert set(peaks(build(kind, shape))) == {shape.chunks * shape.microbatches}

    check()


@examples(40)
@given(shapes("interleaved"))
def test_the_first_rank_of_interleaved_1f1b_holds_most(shape):
    """Its warm-up and one more, for any groups."""
    p, v, m, group = shape.ranks, shape.chunks, shape.microbatches, len(groups(shape)[0])
    expected = tuple(min(2 * (p - 1 - rank) + (v - 1) * group + 1, v * m) for rank in range(p))
    assert peaks(build("interleaved", shape)) == expected


@examples(40)
@given(st.integers(1, 16), st.integers(1, 4), st.integers(1, 4))
def test_interleaving_depth_first_takes_as_much_more_memory_as_published(ranks, rounds, chunks):
    """1 + (p - 1) / (p v) times the layers of 1F1B's first rank, which are p micro-batches (Korthikanti 2022)."""
    shape = Shape(ranks, 2 * rounds * ranks, chunks, ranks)
    whole = peaks(build("interleaved", shape))[0] / chunks
    assert whole == pytest.approx(ranks * (1 + (ranks - 1) / (ranks * chunks)), rel=1e-12)


@examples(40)
@given(shapes("1f1b", microbatches=32), costs, st.integers(1, 3))
def test_a_longer_warm_up_hides_messages(shape, costs, message):
    """Interleaving one chunk is 1F1B two ahead of the next rank: as long without messages, never longer with them."""
    ahead = build("interleaved", Shape(shape.ranks, shape.microbatches, 1, shape.ranks))
    plain = build("1f1b", shape)
    assert simulate(ahead, costs).makespan == simulate(plain, costs).makespan
    late = replace(costs, message=message)
    assert simulate(ahead, late).makespan <= simulate(plain, late).makespan


# ---- backwards in two pieces


def no_longer_weights(costs: Costs) -> bool:
    """Published bubbles take the gradient of the weights to be no longer than the other two."""
    return costs.weight <= min(costs.forward, costs.input)


@examples(40)
@given(shapes("zb-h1"), costs)
def test_zb_h1_fills_the_end_of_1f1bs_bubble_and_holds_no_more(shape, costs):
    schedule, p, m = build("zb-h1", shape), shape.ranks, shape.microbatches
    assert set(peaks(schedule)) == {min(p, m)}
    assume(m >= p)
    assert bubble(simulate(schedule, UNIT)) == p - 1
    if no_longer_weights(costs):
        assert bubble(simulate(schedule, costs)) == (p - 1) * (costs.forward + costs.input - costs.weight)


@examples(40)
@given(shapes("zb-h2"), costs)
def test_zb_h2_has_no_bubble_and_holds_almost_twice_as_much(shape, costs):
    schedule, p, m = build("zb-h2", shape), shape.ranks, shape.microbatches
    assert set(peaks(schedule)) == {min(2 * p - 1, m)}
    assume(m >= 2 * p - 1)
    found = simulate(schedule, UNIT)
    assert (bubble_of_a_rank(found), bubble(found)) == (0, p - 1)
    if no_longer_weights(costs):
        expected = (p - 1) * (costs.forward + costs.input - 2 * costs.weight)
        assert bubble_of_a_rank(simulate(schedule, costs)) == expected


@examples(40)
@given(shapes("zb-v"))
def test_zb_v_has_no_bubble_and_holds_no_more_than_1f1b(shape):
    schedule, p, m = build("zb-v", shape), shape.ranks, shape.microbatches
    assert max(peaks(schedule)) <= min(2 * p, 2 * m)
    assume(m >= 2 * p)
    assert set(peaks(schedule)) == {2 * p}  # of half a rank's layers each: p micro-batches, as on the first of 1F1B
    found = simulate(schedule, UNIT)
    assert (bubble_of_a_rank(found), bubble(found)) == (0, p - 1)


@examples(40)
@given(shapes("dualpipe-v"), costs)
def test_dualpipe_v_waits_no_longer_than_published_and_holds_one_chunk_more_than_zb_v(shape, costs):
    """Published is (p - 1)(F&B + B - 3W), DeepSeek-AI 2024, table 2, for half the ranks; here F&B is F and then B."""
    schedule, p, m = build("dualpipe-v", shape), shape.ranks, shape.microbatches
    assert max(peaks(schedule)) <= min(2 * p + 1, 2 * m)
    assume(m >= 2 * p)
    assert set(peaks(schedule)) == {2 * p + 1}
    assert bubble(simulate(schedule, UNIT)) == p - 1
    whole = costs.input + costs.weight
    if no_longer_weights(costs) and costs.forward <= whole:
        assert bubble(simulate(schedule, costs)) <= (p - 1) * (costs.forward + 2 * whole - 3 * costs.weight)


@pytest.mark.parametrize("kind", ["zb-h1", "zb-h2"])
def test_a_split_backward_waits_no_longer_than_1f1b_however_few_micro_batches_there_are(kind):
    @examples(30)
    @given(shapes(kind, microbatches=20))
    def check(shape: Shape) -> None:
        assert simulate(build(kind, shape), UNIT).makespan <= simulate(build("1f1b", shape), UNIT).makespan

    check()
