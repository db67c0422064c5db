"""The same actions in the same order as torch.distributed.pipelining, and files that each reads of the other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.schedule.action import Schedule
from hpctrain.schedule.check import check
from hpctrain.schedule.files import from_csv, read, to_csv
from hpctrain.schedule.kinds import make
from hpctrain.schedule.passes import add_messages, drop_messages
from tests.support.schedules import examples, schedules

theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="needs torch's pipelining")


def stages(ranks: int, chunks: int) -> list[SimpleNamespace]:
    """The stages of rank 0, as far as torch looks at them to make a schedule."""
    return [
        SimpleNamespace(
            stage_index=index * ranks,
            num_stages=ranks * chunks,
            group_size=ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=False,
            submod=None,
            has_backward=True,
            stage_index_to_group_rank={},
        )
        for index in range(chunks)
    ]


def computed(order: dict) -> Schedule:
    """What torch computes on each rank: its waiting, and what it does with weights, left out."""
    return from_csv("".join(",".join(str(action or "") for action in order[rank]) + "\n" for rank in sorted(order)))


@examples(30)
@given(st.integers(1, 8), st.integers(1, 20))
def test_gpipe_is_as_torch_does_it(ranks, microbatches):
    schedule = theirs.ScheduleGPipe(stages(ranks, 1)[0], microbatches)
    assert computed(schedule._get_pipeline_order()) == make("gpipe", ranks, microbatches)


@examples(30)
@given(st.integers(1, 8), st.integers(0, 20))
def test_1f1b_is_as_torch_does_it(ranks, more):
    """From as many micro-batches as ranks on: torch refuses fewer, we do not.

    Where torch 2.13 writes this schedule down it counts the forwards of a rank without warm-up, which is the last, from
    1; what it runs begins with micro-batch 0.
    """
    schedule = theirs.Schedule1F1B(stages(ranks, 1)[0], ranks + more)
    found = computed(schedule._get_pipeline_order())
    late = found.ranks[-1][0].microbatch
    last = [replace(one, microbatch=one.microbatch - late * (one.op == "F")) for one in found.ranks[-1]]
    assert replace(found, ranks=(*found.ranks[:-1], tuple(last))) == make("1f1b", ranks, ranks + more)


def test_torch_refuses_fewer_micro_batches_than_stages_for_1f1b():
    with pytest.raises(ValueError, match="microbatches"):
        theirs.Schedule1F1B(stages(4, 1)[0], 3)


@examples(40)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 30))
def test_interleaved_1f1b_is_as_torch_does_it_where_torch_does(ranks, chunks, microbatches):
    """Also for the uneven numbers that it takes: those with equal rounds. Where it refuses, rounds differ by one."""
    rounds = max(1, microbatches // ranks)
    if microbatches % rounds:
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            theirs.ScheduleInterleaved1F1B(stages(ranks, chunks), microbatches)
        return
    schedule = theirs.ScheduleInterleaved1F1B(stages(ranks, chunks), microbatches)
    assert computed(schedule.pipeline_order) == make("interleaved", ranks, microbatches, chunks)


@examples(30)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 20))
def test_looped_bfs_is_as_torch_does_it(ranks, chunks, microbatches):
    schedule = theirs.ScheduleLoopedBFS(stages(ranks, chunks), microbatches)
    assert computed(schedule.pipeline_order) == make("looped-bfs", ranks, microbatches, chunks)


@examples(30)
@given(st.integers(1, 8), st.integers(1, 30))
def test_zb_v_is_as_torch_does_it(ranks, microbatches):
    schedule = theirs.ScheduleZBVZeroBubble(stages(ranks, 2), microbatches)
    assert computed(schedule.pipeline_order) == make("zb-v", ranks, microbatches)


@examples(30)
@given(st.integers(1, 8), st.integers(0, 12))
def test_dualpipe_v_is_as_torch_does_it_one_after_the_other(ranks, more):
    """torch does some pairs of F and B at once, and refuses fewer micro-batches than stages; we do not."""
    schedule = theirs.ScheduleDualPipeV(stages(ranks, 2), 2 * ranks + more)
    assert computed(schedule.pipeline_order) == make("dualpipe-v", ranks, 2 * ranks + more)


def runtime(schedule: Schedule):
    """torch's own runner for a schedule, before it has one."""
    ranks = len(schedule.ranks)
    return theirs._PipelineScheduleRuntime(stages(ranks, schedule.stages // ranks), schedule.microbatches)


@examples(30)
@given(schedules(ranks=6, microbatches=12))
def test_torch_loads_our_files_and_finds_the_same_actions_and_ranks(tmp_path_factory, schedule):
    path = tmp_path_factory.mktemp("schedules") / "it.csv"
    path.write_text(to_csv(schedule))
    found = runtime(schedule)
    found._load_csv(path, format="compute_only")
    assert computed(found.pipeline_order) == schedule
    assert found.stage_index_to_group_rank == schedule.home


@examples(30)
@given(schedules(ranks=6, microbatches=12))
def test_torch_loads_our_files_with_messages_and_finds_that_they_end(tmp_path_factory, schedule):
    told = add_messages(schedule)
    path = tmp_path_factory.mktemp("schedules") / "it.csv"
    path.write_text(to_csv(told))
    found = runtime(schedule)
    found._load_csv(path, format="compute_comms")
    assert computed(found.pipeline_order_with_comms) == told
    assert found._simulate()


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_we_load_torchs_files(name, tmp_path):
    schedule = getattr(theirs, name)(stages(3, 2), 6)
    for written in ("compute_only", "compute_comms"):
        schedule._dump_csv(tmp_path / "it.csv", format=written)
        found = read(tmp_path / "it.csv")
        assert drop_messages(found) == computed(schedule.pipeline_order)
        assert found.has_messages == (written == "compute_comms")
        check(found)
