"""Steps of a real pipeline that are traced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.schedule.walk import needs
from hpctrain.watch.trace import read
from tests.support.runs import course, job, shared_folder, small_config, write_corpus

pytestmark = pytest.mark.mpi(min_size=2)

First = Callable[[int], MPI.Comm | None]
PIPELINE = ("parallel.pp=2", "model.layers=4")


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("trace"))
    if comm.rank == 0:
        write_corpus(folder)
        (folder / "run").mkdir()
    comm.Barrier()
    return folder


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-v"])
def test_a_traced_step_tells_its_bubble_and_leaves_a_file(kind: str, folder: Path, first: First) -> None:
    part = first(2)
    if part is None:
        return
    knobs = (*PIPELINE, f"parallel.schedule={kind}", "log.trace=[2]")
    knobs += ("parallel.chunks=2",) if kind != "1f1b" else ()
    with job(small_config(folder, *knobs), part) as (run, batches):
        told = [run.step(step, batches) for step in range(3)]
        schedule = run.plan.schedule
    part.Barrier()
    assert ["bubble" in values for values in told] == [False, True, False]
    assert 0 < told[1]["simulated_bubble"] < 1
    found = read(folder / "run/trace-2.json")
    assert found.schedule == schedule
    assert found.bubble == pytest.approx(told[1]["bubble"], abs=1e-6)
    assert [path.name for path in sorted((folder / "run").glob("trace-*"))] == ["trace-2.json"]
    part.Barrier()  # the next test writes there


def test_nothing_begins_before_what_it_needs_has_ended(folder: Path, first: First) -> None:
    part = first(2)
    if part is None:
        return
    with job(small_config(folder, *PIPELINE, "log.trace=[2]"), part) as (run, batches):
        for step in range(2):
            run.step(step, batches)
    part.Barrier()
    found = read(folder / "run/trace-2.json")
    ends = {part: end for end, _, action in found.ends() for part in action.parts}
    skew_seconds = 0.1  # ranks that share cores leave a barrier one after the other
    for actions, times in zip(found.schedule.ranks, found.times, strict=True):
        for action, (begin, end) in zip(actions, times, strict=True):
            assert begin <= end
            if not action.is_message:
                needed = [one.peer if one.is_message else one for one in needs(action, found.schedule)]
                assert all(begin > ends[one] - skew_seconds for one in needed if one.is_send)
                assert all(begin >= ends[one] for one in needed if not one.is_send and one.stage == action.stage)


def test_tracing_changes_no_number(folder: Path, first: First) -> None:
    part = first(2)
    if part is None:
        return
    traced, plain = (course(small_config(folder, *PIPELINE, *more), part, 2) for more in (["log.trace=[1,2]"], []))
    assert traced.keys() == plain.keys()
    assert all(bool((traced[name] == plain[name]).all()) for name in plain)
