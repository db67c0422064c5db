"""When actions are done and how much is held, by hand where a hand can count it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.schedule.action import Schedule
from hpctrain.schedule.kinds import make
from hpctrain.schedule.simulate import Costs, peaks, simulate
from hpctrain.schedule.walk import needs
from tests.support.schedules import examples, schedules

TWO = Schedule.parse("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")


def ends(schedule: Schedule, costs: Costs) -> dict[str, float]:
    return {str(action): end for end, _, action in simulate(schedule, costs).ends()}


def test_an_action_begins_when_its_rank_is_free_and_what_it_needs_is_there():
    assert ends(TWO, Costs()) == {
        **{"0F0": 1, "0F1": 2, "0B0": 6, "0B1": 9},
        **{"1F0": 2, "1B0": 4, "1F1": 5, "1B1": 7},
    }


def test_a_message_delays_what_another_rank_does_with_it():
    assert ends(TWO, Costs(message=0.5)) == {
        **{"0F0": 1, "0F1": 2, "0B0": 6.5 + 0.5, "0B1": 10},
        **{"1F0": 2.5, "1B0": 4.5, "1F1": 5.5, "1B1": 7.5},
    }


def test_costs_can_differ_from_stage_to_stage():
    costs = Costs(forward=(1, 4), input=(2, 2), weight=(0, 3), message=(10, 20))
    assert ends(Schedule.parse("0F0 0B0\n1F0 1I0 1W0"), costs) == {
        "0F0": 1,
        "1F0": 1 + 10 + 4,
        "1I0": 15 + 2,
        "1W0": 17 + 3,
        "0B0": 17 + 20 + 2 + 0,
    }


def test_a_timeline_tells_makespan_work_spans_and_bubble():
    found = simulate(TWO, Costs())
    assert found.makespan == 9
    assert found.work == (6, 6)
    assert found.spans == (9, 6)
    assert found.bubble == 1 - 12 / 18
    assert simulate(Schedule.parse("0F0 0B0")).bubble == 0
    assert simulate(TWO, Costs(0, 0, 0)).bubble == 0


@examples(60)
@given(schedules(microbatches=16), st.tuples(*[st.integers(0, 9)] * 4))
def test_ranks_do_one_thing_at_a_time_and_nothing_too_early(schedule, numbers):
    costs = Costs(*numbers)
    found = simulate(schedule, costs)
    done = {part: (rank, end) for end, rank, action in found.ends() for part in action.parts}
    for rank, (actions, times) in enumerate(zip(schedule.ranks, found.times, strict=True)):
        clock = 0.0
        for action, (begin, end) in zip(actions, times, strict=True):
            there = [
                when + costs.message * (where != rank) for where, when in (done[n] for n in needs(action, schedule))
            ]
            assert begin == max([clock, *there])
            assert end == begin + costs.of(action)
            clock = end


@examples(60)
@given(schedules(microbatches=16), st.integers(0, 5))
def test_longer_messages_make_no_step_shorter(schedule, message):
    assert simulate(schedule, Costs(message=message)).makespan >= simulate(schedule).makespan


def test_an_activation_is_held_from_its_forward_to_its_weights_gradient():
    assert peaks(Schedule.parse("0F0 0F1 0I0 0F2 0W0 0I1 0F3 0I2 0I3 0W1 0W2 0W3")) == (3,)
    assert peaks(TWO) == (2, 1)
    assert peaks(Schedule.parse("0F0 0B0\n")) == (1,)


def test_held_bytes_are_those_of_each_stage():
    schedule = make("interleaved", 2, 2)
    assert schedule.to_json()[1] == "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    assert peaks(schedule, (100, 10, 100, 7)) == (400, 27)
    assert peaks(schedule, 5) == (20, 15)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (
            Costs(weight=(1, 2, 3)),
            "3 costs for weight, and 2 stages\n  a table has one entry a stage\n  give one number for all, or one each",
        ),
        (
            Costs(message=-1),
            "a cost of -1 for message\n  an action ends after it begins, and some time\n  take numbers from 0 on",
        ),
        (
            Costs(forward=(1, -2)),
            "a cost of (1, -2) for forward\n  an action ends after it begins, and some time\n  take numbers from 0 on",
        ),
        (
            Costs(input=float("nan")),
            "a cost of nan for input\n  an action ends after it begins, and some time\n  take numbers from 0 on",
        ),
    ],
    ids=["a table of another length", "a negative number", "a negative entry", "no number"],
)
def test_costs_that_cannot_be_are_refused(costs, message):
    with pytest.raises(PlanError) as caught:
        simulate(TWO, costs)
    assert str(caught.value) == message


def test_what_never_ends_is_not_simulated():
    with pytest.raises(PlanError, match="rank 0 waits for ever at 0B0"):
        simulate(Schedule.parse("0B0 0F0"))
