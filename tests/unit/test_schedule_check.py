"""A schedule that is not whole, or cannot come to its end, is refused with the rank and action of the fault."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.schedule.action import Action, Schedule
from hpctrain.schedule.check import check
from hpctrain.schedule.passes import add_messages
from tests.support.schedules import examples, schedules

ONCE = "each micro-batch goes through each stage once, forwards and backwards"

small = schedules(ranks=4, microbatches=5)
told = st.tuples(small, st.booleans()).map(lambda pair: add_messages(pair[0]) if pair[1] else pair[0])


def with_line(schedule: Schedule, rank: int, line: list[Action]) -> Schedule:
    return replace(schedule, ranks=tuple(tuple(line) if r == rank else own for r, own in enumerate(schedule.ranks)))


def refusal(schedule: Schedule, buffers: int = 0) -> str:
    """The whole message of the error."""
    with pytest.raises(PlanError) as caught:
        check(schedule, buffers)
    return str(caught.value)


# ---- faults by hand


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0\n1F0 1B0", f"rank 0 never does 0B0\n  {ONCE}\n  add 0B0"),
        ("0F0 0I0\n1F0 1B0", f"rank 0 never does 0W0\n  {ONCE}\n  add 0W0"),
        ("0F0 0B0\n2F0 2B0", f"no rank has stage 1 of 3\n  {ONCE}\n  number stages from 0, without gaps"),
        ("\n", f"no rank of the schedule does anything\n  {ONCE}\n  give at least 0F0 0B0"),
        ("0F0 0B0 0W0", f"rank 0 does 0W0 after it was done\n  {ONCE}\n  leave one of them out"),
        (
            "0F0 0B0 1F0\n1B0",
            "rank 1 does 1B0\n"
            "  stage 1 is on rank 0, and a rank has only its own stages\n"
            "  give each stage to one rank",
        ),
        (
            "0F0 1F0 1B0 0B0 0SEND_F0",
            "rank 0 does 0SEND_F0, which nobody needs\n"
            "  messages go between neighbouring stages that are on different ranks\n"
            "  leave it out",
        ),
        (
            "0F0 0SEND_F0 0B0\n1RECV_F0 1F0 1B0 1SEND_B0",
            f"rank 0 never does 0RECV_B0\n  {ONCE}\n  add 0RECV_B0",
        ),
        (
            "0B0 0F0",
            "rank 0 waits for ever at 0B0\n  it needs 0F0, which it does later\n  put 0F0 first",
        ),
        (
            "0F0 0W0 0I0",
            "rank 0 waits for ever at 0W0\n  it needs 0I0, which it does later\n  put 0I0 first",
        ),
        ("0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", ""),  # another order of forwards alone hurts nobody
        (
            "0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0",
            "rank 0 waits for ever at 0B0\n"
            "  it needs 1I0, which rank 1 has yet to do: it waits at 1F1\n"
            "  put 1I0 first",
        ),
        (
            "0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1RECV_F0 1B0 1SEND_B0",
            "rank 1 waits for ever at 1F0\n  it needs 1RECV_F0, which it does later\n  put 1RECV_F0 first",
        ),
        (
            "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
            "rank 0 waits for ever at 0SEND_F1\n"
            "  rank 1 is not there to receive it: it waits at 1RECV_F0\n"
            "  change the order, or let more messages be under way",
        ),
    ],
    ids=lambda value: value.split("\n")[0],
)
def test_the_first_fault_is_named_with_its_rank_and_action(text, message):
    schedule = Schedule.parse(text)
    assert (refusal(schedule) == message) if message else check(schedule)


def test_messages_that_run_ahead_need_buffers():
    """Two ranks that both send before they receive meet nowhere, until one message may be under way."""
    crossed = Schedule.parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    )
    assert refusal(crossed, buffers=0).startswith("rank 0 waits for ever at 0SEND_F1\n  rank 1 is not there")
    assert len(check(crossed, buffers=1)) == 16


def test_a_buffer_holds_as_many_messages_as_it_says():
    ahead = "0F0 0F1 0F2 0SEND_F2 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2\n"
    behind = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2"
    schedule = Schedule.parse(ahead + behind)
    assert refusal(schedule, buffers=1).startswith("rank 0 waits for ever at 0SEND_F1\n")
    assert len(check(schedule, buffers=2)) == 24


# ---- faults by chance


@examples(100)
@given(told, st.data())
def test_an_action_that_is_dropped_is_named(schedule, data):
    rank, action = data.draw(st.sampled_from(list(schedule)))
    line = [other for other in schedule.ranks[rank] if other != action]
    assert refusal(with_line(schedule, rank, line)).startswith(f"rank {rank} never does {action}\n")


@examples(100)
@given(told, st.data())
def test_an_action_that_is_done_twice_is_named(schedule, data):
    rank, action = data.draw(st.sampled_from(list(schedule)))
    line = list(schedule.ranks[rank])
    line.insert(data.draw(st.integers(0, len(line))), action)
    assert refusal(with_line(schedule, rank, line)).startswith(f"rank {rank} does {action} after it was done\n")


@examples(100)
@given(told, st.data())
def test_an_action_on_another_rank_is_found(schedule, data):
    rank, action = data.draw(st.sampled_from(list(schedule)))
    other = data.draw(st.integers(0, len(schedule.ranks)).filter(lambda other: other != rank))
    padded = Schedule((*schedule.ranks, ()))
    moved = with_line(padded, rank, [own for own in padded.ranks[rank] if own != action])
    moved = with_line(moved, other, [*moved.ranks[other], action])
    assert f"stage {action.stage} is on rank {min(rank, other)}, and" in refusal(moved)


@examples(300)
@given(told, st.integers(0, 2), st.data())
def test_actions_in_another_order_are_refused_just_when_ranks_would_lock_up(schedule, buffers, data):
    rank = data.draw(st.integers(0, len(schedule.ranks) - 1))
    line = list(schedule.ranks[rank])
    a, b = (data.draw(st.integers(0, len(line) - 1)) for _ in range(2))
    line[a], line[b] = line[b], line[a]
    swapped = with_line(schedule, rank, line)
    if ends(swapped, buffers):
        check(swapped, buffers)
    else:
        assert " waits for ever at " in refusal(swapped, buffers)


def ends(schedule: Schedule, buffers: int) -> bool:
    """Whether ranks come to their end, found by another way: one state after the other, pairs of messages together."""
    lines = [[str(action) for action in actions] for actions in schedule.ranks]
    done: set[str] = set()
    moved = True
    while moved:
        moved = False
        for line in lines:
            if line and _possible(Action.parse(line[0]), lines, done, schedule, buffers):
                done.add(line.pop(0))
                moved = True
    return not any(lines)


def _possible(action: Action, lines: list[list[str]], done: set[str], schedule: Schedule, buffers: int) -> bool:
    s, m = action.stage, action.microbatch
    backward = {f"{s + 1}B{m}", f"{s + 1}I{m}"} & done or s + 1 == schedule.stages
    through = schedule.has_messages
    if action.op == "F":
        needed = f"{s}RECV_F{m}" if through and schedule.crosses(s - 1) else f"{s - 1}F{m}"
        return s == 0 or needed in done
    if action.op in "BI":
        arrived = f"{s}RECV_B{m}" in done if through and schedule.crosses(s) else backward
        return f"{s}F{m}" in done and bool(arrived)
    if action.op == "W":
        return f"{s}I{m}" in done
    if action.op.startswith("RECV"):
        return str(action.peer) in done
    made = {f"{s}F{m}"} if action.op == "SEND_F" else {f"{s}B{m}", f"{s}I{m}"}
    here, there = schedule.home[s], schedule.home[action.peer.stage]
    sent = [Action.parse(text) for text in done if "SEND" in text]
    ways = [a for a in sent if (schedule.home[a.stage], schedule.home[a.peer.stage]) == (here, there)]
    under_way = sum(str(a.peer) not in done for a in ways)
    return bool(made & done) and (under_way < buffers or lines[there][:1] == [str(action.peer)])
