from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.schedule.action import OPS, Action, Schedule, accumulate

PROPERTY = settings(derandomize=True, deadline=None, max_examples=200)

actions = st.builds(Action, st.integers(0, 300), st.sampled_from([*OPS]), st.integers(0, 3000))
schedules = st.lists(st.lists(actions, max_size=6).map(tuple), min_size=1, max_size=5).map(
    lambda ranks: Schedule(tuple(ranks))
)

NO_ACTION = (
    "{!r} is not an action\n"
    "  an action is a stage, an op and a micro-batch, such as 2F0, both counted from 0\n"
    "  use one of the ops F (forward), B (backward: I and W in one), I (gradient of the input), "
    "W (gradient of the weights), SEND_F (send the activation to the next stage), "
    "RECV_F (receive it from the stage before), SEND_B (send the gradient to the stage before), "
    "RECV_B (receive it from the next stage)"
)


@PROPERTY
@given(actions)
def test_an_action_comes_back_from_its_text_as_the_same_value(action):
    assert Action.parse(str(action)) == action
    assert hash(Action.parse(str(action))) == hash(action)


@PROPERTY
@given(st.text("01FBIW29 -x_SENDRECV", max_size=5))
def test_a_text_is_the_text_of_the_action_it_gives_or_is_refused_by_name(text):
    try:
        assert str(Action.parse(text)) == text
    except PlanError as error:
        assert str(error) == NO_ACTION.format(text)


@PROPERTY
@given(schedules)
def test_a_schedule_comes_back_from_text_and_json_as_the_same_value(schedule):
    assert Schedule.parse(str(schedule)) == schedule
    assert Schedule.from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
    assert str(schedule).count("\n") == len(schedule.ranks)


@pytest.mark.parametrize("text", ["2X0", "F0", "2F", "02F0", "2f0", "-1F0", "", "2F0 ", "٢F0"])
def test_a_text_that_is_no_action_is_named(text):
    with pytest.raises(PlanError) as caught:
        Action.parse(text)
    assert str(caught.value) == NO_ACTION.format(text)


@pytest.mark.parametrize("parts", [(-1, "F", 0), (0, "FB", 0), (0, "", 0), (0, "F", -1)])
def test_an_action_without_a_text_cannot_be_made(parts):
    with pytest.raises(PlanError) as caught:
        Action(*parts)
    assert str(caught.value) == NO_ACTION.format("{}{}{}".format(*parts))


def test_a_schedule_written_by_hand_is_read():
    schedule = Schedule.parse("0F0  0B0\n\n1F0 1I0 1W0")
    assert schedule.ranks[1] == ()
    assert str(schedule) == "0F0 0B0\n\n1F0 1I0 1W0\n"


def test_a_wrong_word_in_a_schedule_is_named():
    with pytest.raises(PlanError) as caught:
        Schedule.parse("0F0 0B0\n1F0 1Q0\n")
    assert str(caught.value) == NO_ACTION.format("1Q0")


def test_a_message_knows_its_other_end_and_a_backward_its_parts():
    ends = {"2SEND_F5": "3RECV_F5", "3SEND_B0": "2RECV_B0"}
    for send, receive in ends.items():
        assert Action.parse(send).peer == Action.parse(receive)
        assert Action.parse(receive).peer == Action.parse(send)
    assert [action.is_send for action in map(Action.parse, ("2SEND_F5", "3RECV_F5", "2F5"))] == [True, False, False]
    assert Action.parse("4B1").parts == (Action(4, "I", 1), Action(4, "W", 1))
    assert Action.parse("4W1").parts == (Action(4, "W", 1),)


def test_a_schedule_knows_the_rank_of_each_stage_and_what_goes_between_ranks():
    schedule = Schedule.parse("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert (schedule.stages, schedule.microbatches) == (4, 1)
    assert schedule.home == {0: 0, 1: 1, 2: 1, 3: 0}
    assert [schedule.own(rank) for rank in (0, 1, 2)] == [[0, 3], [1, 2], []]
    assert [stage for stage in range(-1, 5) if schedule.crosses(stage)] == [0, 2]
    assert not schedule.has_messages
    assert Schedule.parse("0F0 0SEND_F0").has_messages


def test_a_schedule_without_ranks_is_refused():
    with pytest.raises(PlanError) as caught:
        Schedule(())
    assert str(caught.value) == (
        "the schedule has no ranks\n  one rank is a pipeline too\n  give the actions of each rank"
    )


def test_gradient_accumulation_takes_each_micro_batch_forwards_and_backwards():
    assert str(accumulate(3)) == "0F0 0B0 0F1 0B1 0F2 0B2\n"


def test_a_step_without_micro_batches_is_refused():
    with pytest.raises(PlanError) as caught:
        accumulate(0)
    assert str(caught.value) == (
        "a step of 0 micro-batches has no gradient\n"
        "  a step adds up what its micro-batches give\n"
        "  take 1 micro-batch or more"
    )
