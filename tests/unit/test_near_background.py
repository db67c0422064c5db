"""Near saves that a run does not wait for: it trains on while its nodes' disks take what it had."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.checkpoint import disk, near_write, streams
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.saver import Saver
from hpctrain.errors import CheckpointError
from hpctrain.plan.layout import Cut, Flat, Layout
from tests.support import states
from tests.support.near import Cluster
from tests.support.threads import ThreadGroup

LAYOUTS = {
    "model/columns": Layout((30, 71), "float32", (Cut(1, ("dp",)),)),
    "model/copied": Layout((90_000,), "bfloat16"),
    "model/rows": Layout((301, 70), "float32", (Cut(0, ("dp",)),)),
    "optim/exp_avg/flat": Layout((50, 301), "float64", (), Flat(("dp",), 3, 50 * 301 + 10)),
}
LONG_SECONDS = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Four ranks on two nodes."""
    return Cluster(tmp_path, LAYOUTS, "aabb")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written to any node before this event is set."""
    go, write = threading.Event(), disk.write

    def waiting(path: Path, *rest: Any, **more: Any) -> None:
        assert "near" in threading.current_thread().name, "only that thread touches a node's disk"
        assert go.wait(LONG_SECONDS)
        write(path, *rest, **more)

    monkeypatch.setattr(near_write.disk, "write", waiting)
    return go


def begin(point: Checkpoint, rank: int, step: int) -> int:
    """Begin to save a step, and spoil the state that it was taken from."""
    state = states.filled(LAYOUTS, point.mesh, rank, step)
    saved = point.begin_near(step, state)
    for held in state.values():
        held.tensor.zero_()
    return saved


def bring_on(point: Checkpoint) -> int:
    """Steps of a run, until the save has ended; its step."""
    limit = time.monotonic() + LONG_SECONDS
    while not (step := point.near.advance()):
        assert time.monotonic() < limit
        time.sleep(0.001)
    return step


@pytest.mark.parametrize(("copies", "hosts"), [(1, "aabb"), (2, "aabb"), (2, "abcd"), (2, "aaab"), (2, "a")])
def test_what_is_saved_is_what_was_there_when_the_save_began(
    cluster: Cluster, copies: int, hosts: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streams, "ROUND_BYTES", 50_001)
    monkeypatch.setattr(near_write, "TURN_BYTES", 33_000)
    knobs = {"hosts": hosts, "near_copies": copies}
    assert cluster.each(lambda point, rank: begin(point, rank, 7), **knobs) == [0] * len(hosts)
    saved = cluster.each(lambda point, rank: (begin(point, rank, 8), bring_on(point))[1], **knobs)
    assert saved == [8] * len(hosts)
    assert cluster.resume(hosts=hosts) == 8 and cluster.resume(hosts=hosts[::-1]) == 8


def test_a_run_goes_on_for_many_steps_while_a_disk_takes_its_time(cluster: Cluster, slow: threading.Event):
    def act(point: Checkpoint, rank: int) -> int:
        assert begin(point, rank, 3) == 0
        assert [point.near.advance() for _ in range(50)] == [0] * 50
        assert point.near.under_way == 3
        point.group.barrier()
        slow.set()
        return bring_on(point)

    assert cluster.each(act) == [3] * 4
    assert cluster.resume() == 3


def test_no_thread_but_the_run_s_own_talks_to_other_ranks(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    talking, real = set(), ThreadGroup._all

    def spy(self: ThreadGroup, value: Any) -> list[Any]:
        talking.add(threading.current_thread().name)
        return real(self, value)

    monkeypatch.setattr(ThreadGroup, "_all", spy)
    own = cluster.each(lambda point, rank: (begin(point, rank, 3), bring_on(point), threading.current_thread().name)[2])
    assert talking <= set(own)


def test_the_former_save_stays_until_the_next_is_whole(cluster: Cluster, slow: threading.Event):
    def act(point: Checkpoint, rank: int) -> None:
        begin(point, rank, 5)
        point.near.advance()
        point.near.close()

    slow.set()
    cluster.save(3)
    slow.clear()
    threading.Timer(0.3, slow.set).start()
    cluster.each(act)
    assert cluster.resume() == 3
    assert not [path for host in "ab" for path in cluster.files(host) if "00000005" in path.name]


@pytest.mark.parametrize("where", ["disk", "_reserve", "_publish"])
def test_an_error_of_one_node_is_met_by_all_and_leaves_nothing_of_that_save(
    cluster: Cluster, where: str, monkeypatch: pytest.MonkeyPatch
):
    cluster.save(3)
    before = {host: cluster.files(host) for host in "ab"}
    owner, name = (disk, "write") if where == "disk" else (near_write, where)
    real = getattr(owner, name)

    def failing(one: Any, *rest: Any, **more: Any) -> None:
        path = one if where == "disk" else one.path
        if "3.copy" in path.name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        real(one, *rest, **more)

    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(CheckpointError, match="rank 1: .* failed"):
        cluster.each(lambda point, rank: (begin(point, rank, 5), bring_on(point)))
    monkeypatch.undo()
    assert {host: cluster.files(host) for host in "ab"} == before
    assert cluster.resume() == 3


@pytest.mark.parametrize(
    "then",
    [
        lambda point, rank: point.near.save(9, states.filled(LAYOUTS, point.mesh, rank, 9)),
        lambda point, rank: point.begin_near(9, states.filled(LAYOUTS, point.mesh, rank, 9)),
        lambda point, rank: point.begin(9, states.filled(LAYOUTS, point.mesh, rank, 9), {}),
        lambda point, rank: point.resume(states.blank(LAYOUTS, point.mesh, rank)),
    ],
    ids=["save", "begin_near", "begin", "resume"],
)
def test_whatever_else_is_asked_waits_for_the_save_under_way(cluster: Cluster, then: Callable[[Checkpoint, int], Any]):
    def act(point: Checkpoint, rank: int) -> int:
        begin(point, rank, 5)
        then(point, rank)
        saving = point.near.under_way
        point.near.wait()
        point.wait()
        return saving

    assert cluster.each(act)[0] in (0, 9)
    assert cluster.resume() in (5, 9)


def test_while_a_whole_save_is_under_way_the_copy_is_its_own_and_the_run_waits_for_a_near_one(cluster: Cluster):
    def act(point: Checkpoint, rank: int) -> tuple[int, int]:
        point.begin(4, states.filled(LAYOUTS, point.mesh, rank, 4), {})
        near = begin(point, rank, 5)
        point.wait()
        return near, point.near.under_way

    assert cluster.each(act) == [(5, 0)] * 4
    assert cluster.resume() == 5
    assert cluster.resume(near=None, near_every=0) == 4


def test_a_run_that_wants_no_background_saves_at_once(cluster: Cluster):
    assert cluster.each(lambda point, rank: begin(point, rank, 5), background=False) == [5] * 4
    assert cluster.resume() == 5


@pytest.mark.parametrize("full", [False, True], ids=["room", "full"])
def test_a_training_loop_says_what_was_saved_near_and_what_was_not(
    cluster: Cluster, full: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    write = disk.write

    def failing(path: Path, *rest: Any, **more: Any) -> None:
        if full and "step-00000004" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, *rest, **more)

    def act(point: Checkpoint, rank: int) -> list[str]:
        state, said = states.filled(LAYOUTS, point.mesh, rank, 0), []
        with Saver(point, state, {}, said.append) as saver:
            for step in range(1, 8):
                for held in state.values():
                    held.tensor.copy_(states.piece(held.layout, point.mesh, rank, step))
                saver.step(step, last=step == 7)
        return said

    monkeypatch.setattr(disk, "write", failing)
    with caplog.at_level(logging.WARNING):
        said = cluster.each(act, near_every=2, on_full="go on")[0]
    near = [step for step in (2, 4, 6) if not (full and step == 4)]
    assert said == [
        *(f"saved step {step} near, on the nodes' own disks" for step in near), f"saved {cluster.run}/step-00000007.h5",
    ]  # fmt: skip
    assert ("step 4 was not saved near: " in caplog.text) == full
    assert cluster.resume() == 7


@pytest.mark.parametrize("whole", [2, 5], ids=["older", "of the same step"])
def test_a_run_that_went_on_from_a_near_one_knows_it_and_can_leave_a_whole_one(cluster: Cluster, whole: int):
    def act(point: Checkpoint, rank: int) -> bool:
        state = states.blank(LAYOUTS, point.mesh, rank)
        near = point.resume(state) == 5 and point.resumed_near
        with Saver(point, state, {}, print) as saver:
            saver.step(5, last=True)
        return near

    cluster.save(whole, 5, whole=[whole])
    assert cluster.each(act) == [whole != 5] * 4
    assert not any(cluster.disks.rglob("step-*"))
    assert cluster.resume(near=None, near_every=0) == 5
