"""Every kind of schedule, of every size: whole, in order, on the right ranks; and refused where it cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.schedule.action import Action, Schedule, accumulate
from hpctrain.schedule.check import check
from hpctrain.schedule.kinds import SCHEDULES, Shape, alternate, defer, groups, make
from tests.support.schedules import LARGEST, build, examples, kinds, shapes

GOLDEN = Path(__file__).resolve().parents[1] / "golden/schedules"
LOOPED = {"gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2"}
SPLIT = {"zb-h1", "zb-h2", "zb-v"}
WHOLE = {"gpipe", "1f1b", "interleaved", "looped-bfs"}


@examples(60)
@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), shapes(kind))))
@example(("interleaved", LARGEST))
def test_any_number_of_ranks_micro_batches_and_chunks_makes_a_whole_schedule_that_ends(case):
    kind, shape = case
    schedule = build(kind, shape)
    assert len(check(schedule)) == sum(map(len, schedule.ranks))
    assert (len(schedule.ranks), schedule.stages) == (shape.ranks, shape.stages)
    assert schedule.microbatches == shape.microbatches


@examples(60)
@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), shapes(kind))))
def test_stages_are_looped_over_ranks_or_folded_to_a_v(case):
    kind, shape = case
    home, p = build(kind, shape).home, shape.ranks
    if kind in LOOPED:
        assert home == {stage: stage % p for stage in range(shape.stages)}
    else:
        assert home == {stage: min(stage, 2 * p - 1 - stage) for stage in range(2 * p)}


@examples(60)
@given(kinds.flatmap(lambda kind: st.tuples(st.just(kind), shapes(kind))))
def test_backwards_are_whole_or_split_by_the_kind(case):
    kind, shape = case
    ops = {action.op for _, action in build(kind, shape)}
    assert ops == ({"F", "I", "W"} if kind in SPLIT else {"F", "B"}) or kind == "dualpipe-v"
    assert ops <= {"F", "B", "I", "W"}


@examples(40)
@given(st.integers(1, 64))
def test_1f1b_on_one_rank_is_gradient_accumulation(microbatches):
    assert make("1f1b", 1, microbatches) == accumulate(microbatches)


@examples(60)
@given(shapes("interleaved"))
def test_micro_batches_are_cut_in_even_groups_without_losing_one(shape):
    parts = groups(shape)
    assert [m for part in parts for m in part] == list(range(shape.microbatches))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert min(sizes) >= min(shape.ranks, shape.microbatches)
    if shape.microbatches % shape.group == 0:
        assert set(sizes) == {shape.group}


@pytest.mark.parametrize(
    ("ranks", "microbatches", "group", "sizes"),
    [(4, 8, 4, [4, 4]), (4, 10, 4, [5, 5]), (4, 11, 4, [6, 5]), (4, 3, 4, [3]), (4, 16, 6, [6, 5, 5]), (2, 8, 8, [8])],
)
def test_a_group_is_larger_than_asked_only_where_it_would_be_less_than_the_ranks(ranks, microbatches, group, sizes):
    assert [len(part) for part in groups(Shape(ranks, microbatches, 2, group))] == sizes


def test_groups_go_depth_first_or_breadth_first():
    def forwards(group: int) -> str:
        return " ".join(str(action) for action in make("interleaved", 2, 4, 2, group).ranks[1] if action.op == "F")

    assert forwards(2) == "1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3"
    assert forwards(4) == "1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3"


def test_forwards_and_backwards_take_turns_after_the_warm_up():
    forwards, backwards = ([Action(0, op, m) for m in range(3)] for op in "FB")

    def line(warmup: int) -> str:
        return " ".join(map(str, alternate(forwards, backwards, warmup)))

    assert line(0) == "0F0 0B0 0F1 0B1 0F2 0B2"
    assert line(1) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert line(3) == line(9) == "0F0 0F1 0F2 0B0 0B1 0B2"


def test_weight_gradients_come_a_number_of_input_gradients_later():
    inputs = [Action(0, "I", m) for m in range(3)]
    assert " ".join(map(str, defer(inputs, 0))) == "0I0 0W0 0I1 0W1 0I2 0W2"
    assert " ".join(map(str, defer(inputs, 1))) == "0I0 0I1 0W0 0I2 0W1 0W2"
    assert " ".join(map(str, defer(inputs, 9))) == "0I0 0I1 0I2 0W0 0W1 0W2"


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_is_the_one_that_was_written_down(kind):
    """For 4 ranks and 8 micro-batches: what everybody can read, and nobody changes unseen."""
    assert str(make(kind, 4, 8)) == (GOLDEN / f"{kind}.txt").read_text()


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.txt")), ids=lambda path: path.stem)
def test_what_was_written_down_is_a_schedule_of_a_kind_that_there_is(path):
    assert path.stem in SCHEDULES
    check(Schedule.parse(path.read_text()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("1f1d", 4, 8),
            "'1f1d' is not a kind of schedule\n"
            "  there are gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, dualpipe-v\n"
            "  did you mean 1f1b?",
        ),
        (
            ("fastest", 4, 8),
            "'fastest' is not a kind of schedule\n"
            "  there are gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, dualpipe-v\n"
            "  take gpipe, for one",
        ),
        (("1f1b", 0, 8), "a pipeline cannot have 0 ranks\n  it has at least one of each\n  take 1 or more"),
        (("1f1b", 4, 0), "a pipeline cannot have 0 micro-batches\n  it has at least one of each\n  take 1 or more"),
        (
            ("interleaved", 4, 8, 0),
            "a pipeline cannot have 0 chunks a rank\n  it has at least one of each\n  take 1 or more",
        ),
        (
            ("1f1b", 4, 8, 2),
            "1f1b with 2 chunks a rank\n  its ranks have 1\n  leave chunks out, or take one of interleaved, looped-bfs",
        ),
        (
            ("zb-v", 4, 8, 3),
            "zb-v with 3 chunks a rank\n  its ranks have 2\n  leave chunks out, or take one of interleaved, looped-bfs",
        ),
        (
            ("gpipe", 4, 8, 1, 4),
            "gpipe with groups of 4 micro-batches\n  it has no groups\n  leave group out, or take interleaved",
        ),
        (
            ("interleaved", 4, 8, 2, 3),
            "groups of 3 micro-batches on 4 ranks\n"
            "  a group of less than the ranks is back at the first rank before all of it is through\n"
            "  take 4 (depth first) to 8 (breadth first)",
        ),
        (
            ("interleaved", 4, 3, 2, 3),
            "groups of 3 micro-batches on 4 ranks\n"
            "  a group of less than the ranks is back at the first rank before all of it is through\n"
            "  take 4 (depth first) to 4 (breadth first)",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_with_what_can(arguments, message):
    with pytest.raises(PlanError) as caught:
        make(*arguments)
    assert str(caught.value) == message
