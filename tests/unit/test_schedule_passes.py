"""Messages between ranks: each where it must be, received in the order of its sends, and never in a circle."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpctrain.schedule.action import Action, Schedule
from hpctrain.schedule.check import check
from hpctrain.schedule.kinds import SCHEDULES, find, make
from hpctrain.schedule.passes import add_messages, drop_messages
from hpctrain.schedule.simulate import Costs, simulate
from tests.support.schedules import LARGEST, build, examples, schedules


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_small_pipeline_comes_to_its_end(kind):
    """One after the other, few micro-batches and odd numbers: where warm-ups are cut short."""
    several = (1, 2, 3) if find(kind).chunks is None else (find(kind).usual_chunks,)
    for ranks, microbatches, chunks in product(range(1, 6), range(1, 10), several):
        for group in {ranks, ranks + 1, max(ranks, microbatches)} if find(kind).grouped else {None}:
            check(add_messages(make(kind, ranks, microbatches, chunks, group)))


@examples(40)
@given(schedules())
@example(build("interleaved", LARGEST))
def test_ranks_come_to_their_end_even_where_a_send_waits_for_its_receive(schedule):
    assert len(check(add_messages(schedule), buffers=0)) >= sum(map(len, schedule.ranks))


@examples(30)
@given(schedules(microbatches=20), st.integers(1, 4))
def test_what_ends_without_buffers_ends_with_them(schedule, buffers):
    check(add_messages(schedule), buffers)


@examples(40)
@given(schedules(microbatches=20))
def test_messages_are_added_to_what_is_computed_and_drop_out_of_it(schedule):
    told = add_messages(schedule)
    assert drop_messages(told) == schedule
    assert add_messages(told) == told
    crossing = sum(map(schedule.crosses, range(schedule.stages)))
    assert sum(action.is_message for _, action in told) == 4 * schedule.microbatches * crossing


@examples(40)
@given(schedules(microbatches=20))
def test_two_ranks_receive_in_the_order_in_which_they_send(schedule):
    told = add_messages(schedule)
    sent, received = defaultdict(list), defaultdict(list)
    for rank, action in told:
        if action.is_message:
            other = told.home[action.peer.stage]
            (sent[rank, other] if action.is_send else received[other, rank]).append((action, action.peer))
    assert sent.keys() == received.keys()
    for way, messages in sent.items():
        assert [receive for _, receive in messages] == [receive for receive, _ in received[way]]


@examples(40)
@given(schedules(microbatches=20))
def test_a_send_follows_what_it_sends_at_once(schedule):
    for actions in add_messages(schedule).ranks:
        for before, action in zip(actions, actions[1:], strict=False):
            if action.is_send:
                made = "F" if action.op == "SEND_F" else "BI"
                assert before.op in made and (before.stage, before.microbatch) == (action.stage, action.microbatch)


@examples(40)
@given(schedules(microbatches=20), st.integers(0, 5))
def test_saying_the_messages_changes_no_time(schedule, message):
    costs = Costs(3, 4, 2, message)
    told, plain = simulate(add_messages(schedule), costs), simulate(schedule, costs)
    assert (told.makespan, told.spans, told.work) == (plain.makespan, plain.spans, plain.work)


def test_messages_read_as_what_travels():
    assert str(add_messages(make("1f1b", 2, 2))) == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1\n"
    )


def test_stages_of_one_rank_send_nothing_to_each_other():
    folded = add_messages(make("zb-v", 2, 4))
    assert {action.stage for _, action in folded if action.op == "SEND_F"} == {0, 2}
    alone = make("interleaved", 1, 4)
    assert add_messages(alone) == alone
    assert Action(0, "SEND_F", 0) not in dict.fromkeys(action for _, action in alone)
    assert add_messages(Schedule.parse("0F0 0B0")) == Schedule.parse("0F0 0B0")
