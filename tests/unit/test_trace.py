"""What a trace records, what it says of a schedule, and its file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import parse
from hpctrain.errors import ConfigError, PlanError
from hpctrain.schedule.action import Action, Schedule, accumulate
from hpctrain.schedule.kinds import SCHEDULES, make
from hpctrain.schedule.passes import add_messages
from hpctrain.schedule.simulate import Costs, Timeline, simulate
from hpctrain.watch.trace import UNTRACED, Trace, bubbles, costs, read, write
from tests.support import threads

KINDS = st.sampled_from(sorted(SCHEDULES))
TIMES = st.floats(0.1, 10.0)
CPU = torch.device("cpu")


def pipeline(kind: str, ranks: int, microbatches: int) -> Schedule:
    return add_messages(make(kind, ranks, microbatches))


@given(KINDS, st.integers(1, 4), st.integers(1, 6), st.tuples(TIMES, TIMES, TIMES))
def test_of_a_timeline_without_noise_measured_and_simulated_bubble_are_the_same(
    kind: str, ranks: int, microbatches: int, each: tuple[float, float, float]
) -> None:
    timeline = simulate(pipeline(kind, ranks, microbatches), Costs(*each))
    found = bubbles(timeline)
    assert found["bubble"] == pytest.approx(timeline.bubble)
    assert found["simulated_bubble"] == pytest.approx(found["bubble"], abs=1e-9)


@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_the_costs_of_each_stage_are_found_again(data: st.DataObject, ranks: int, microbatches: int) -> None:
    schedule = pipeline("zb-v", ranks, microbatches)
    table = st.lists(TIMES, min_size=schedule.stages, max_size=schedule.stages).map(tuple)
    given_costs = Costs(*(data.draw(table) for _ in range(3)))
    found = costs(simulate(schedule, given_costs))
    for name in ("forward", "input", "weight"):
        assert getattr(found, name) == pytest.approx(getattr(given_costs, name))


def test_costs_are_means_over_micro_batches() -> None:
    schedule = accumulate(2)
    timeline = Timeline(schedule, (((0.0, 1.0), (1.0, 5.0), (5.0, 8.0), (8.0, 10.0)),))
    assert costs(timeline) == Costs((2.0,), (1.5,), (1.5,))


@given(KINDS, st.integers(1, 4), st.integers(1, 6))
def test_a_file_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, kind: str, ranks: int, microbatches: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    timeline = simulate(pipeline(kind, ranks, microbatches), Costs(0.25, 0.5, 0.125))
    write(path, timeline)
    found = read(path)
    assert found.schedule == timeline.schedule
    assert found.times == timeline.times


def test_a_file_has_a_row_for_each_rank_and_microseconds(tmp_path: Path) -> None:
    write(tmp_path / "trace.json", simulate(make("1f1b", 2, 1)))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"] == [(0, "rank 0"), (1, "rank 1")]
    assert [(e["tid"], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        (0, "0F0", 0.0, 1e6), (0, "0B0", 4e6, 2e6), (1, "1F0", 1e6, 1e6), (1, "1B0", 2e6, 2e6),
    ]  # fmt: skip


@pytest.mark.parametrize("text", [None, "no JSON", "[]", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": []}'])
def test_what_is_no_trace_is_refused_with_its_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "other.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=r"other\.json is no trace: ") as caught:
        read(path)
    assert caught.value.mend == "name a file that log.trace made"


def test_ranks_record_from_one_moment_and_waiting_is_between_actions() -> None:
    schedule = make("1f1b", 2, 2)

    def act(group: threads.Group) -> Timeline:
        time.sleep(0.05 * group.rank)  # who comes late makes all begin late
        trace, came = Trace(CPU), time.perf_counter()
        trace.begin(group.barrier)
        began = time.perf_counter()
        for action in schedule.ranks[group.rank]:
            group.barrier()
            with trace.recording(action):
                time.sleep(0.01)
        assert group.rank or began - came > 0.02
        return trace.timeline(schedule, group.collect)

    found, other = threads.run(2, act)
    assert found == other and found.schedule is schedule
    for times in found.times:
        assert all(0 <= begin and end - begin >= 0.01 for begin, end in times)
        assert all(end <= begin for (_, end), (begin, _) in zip(times, times[1:], strict=False))
    assert sum(found.work) <= 2 * found.makespan


def test_an_untraced_step_meets_nobody_and_records_nothing() -> None:
    UNTRACED.begin(lambda: pytest.fail("nobody is to be waited for"))
    with UNTRACED.recording(Action(0, "F", 0)):
        pass
    assert UNTRACED.timeline(accumulate(1), lambda times: pytest.fail("nothing is to be collected")) is None


def test_a_step_before_the_first_cannot_be_traced() -> None:
    with pytest.raises(ConfigError, match=r"log.trace = \[10, 0\]: no step has the number 0\n  steps are counted from"):
        parse({"log": {"trace": [10, 0]}})
