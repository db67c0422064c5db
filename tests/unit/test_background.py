"""Saves in the background: what the file has, when it ends, and what a failure leaves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import flight, format, save
from hpctrain.checkpoint import state as agreement
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.saver import Saver
from hpctrain.checkpoint.snapshot import Room, fits
from hpctrain.checkpoint.state import Held, State
from hpctrain.cluster.deadline import Pace
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import saving, states
from tests.support.saving import ROWS, behind, each, resume, slow
from tests.support.threads import ThreadGroup

MIXED = {
    "model/rows": Layout((400, 301), "bfloat16", (Cut(0, ("dp",)),)),
    "model/columns": Layout((60, 101), "float32", (Cut(1, ("dp",)),)),
    "model/replicated": Layout((1100, 1000), "float32"),
    "model/codes": Layout((999,), "float8_e4m3fn", (Cut(0, ("dp",)),)),
    "model/mask": Layout((37, 3), "bool"),
    "model/none": Layout((3, 0, 5), "float32"),
    "model/scalar": Layout((), "int64"),
    "optim/exp_avg/flat": Layout((500, 301), "float64", (), Flat(("dp",), 3, 500 * 301 + 10)),
    "optim/exp_avg/both": Layout((60, 404), "float32", (Cut(1, ("tp",)),), Flat(("dp",), 7, 60 * 404 + 11)),
}


def over(mesh: Mesh) -> dict[str, Layout]:
    """Those that this mesh can cut."""
    names = {name for name, _ in mesh.axes}
    return {name: layout for name, layout in MIXED.items() if set(layout.axes) <= names}


# ---- what the file has -----------------------------------------------------------------------------------------------


GRIDS = [(("dp", 1), ("tp", 1)), (("dp", 4),), (("dp", 2), ("tp", 2)), (("tp", 2), ("dp", 3))]


@pytest.mark.parametrize("sizes", GRIDS)
def test_the_file_is_that_of_a_save_that_the_run_waits_for_whatever_changes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: tuple
):
    mesh, layouts = Mesh(sizes), over(Mesh(sizes))

    waited = saving.save(tmp_path / "waited", layouts, mesh)
    monkeypatch.setattr(flight, "TURN_BYTES", 300_001)  # many turns, none at a page's end
    assert saving.save(tmp_path / "behind", layouts, mesh, way="background").read_bytes() == waited.read_bytes()
    assert sorted(os.listdir(tmp_path / "behind")) == ["latest", "step-00000001.h5"]


def test_tensors_that_are_not_contiguous_are_saved_as_they_are(tmp_path: Path):
    strided = torch.arange(600.0).reshape(20, 30).t()
    state = {"model/a": Held(Layout((30, 20), "float32"), strided)}
    point = Checkpoint(CheckpointConfig(sync=False), tmp_path, Mesh(()), SoloGroup())
    point.begin(1, state, {})
    into = {"model/a": replace(state["model/a"], tensor=torch.zeros(30, 20))}
    assert point.resume(into) == 1 and torch.equal(into["model/a"].tensor, strided)


def test_a_save_has_the_attributes_of_the_moment_when_it_began(tmp_path: Path):
    mesh = Mesh((("dp", 2),))

    def act(point: Checkpoint, rank: int) -> list[dict]:
        found, attributes = [], {"seen": [0]}
        for step in (1, 2, 3, 4):
            attributes["seen"] += [step] * (step != 3)  # those of step 3 are as before
            point.begin(step, states.filled(ROWS, mesh, rank, step), attributes)
            attributes["seen"].append(-step)
            found.append(format.read_attributes(point.wait()))
            attributes["seen"].pop()
        return found

    told = [{"seen": [0, 1]}, {"seen": [0, 1, 2]}, {"seen": [0, 1, 2]}, {"seen": [0, 1, 2, 4]}]
    assert each(tmp_path, mesh, act, {"keep": 4}) == [told, told]
    assert resume(tmp_path, ROWS, Mesh((("dp", 3),))) == 4


def test_ranks_agree_on_the_tensors_once_and_again_when_one_rank_has_others(tmp_path: Path, monkeypatch):
    mesh, calls, real = Mesh((("dp", 2),)), [], agreement.agree
    monkeypatch.setattr(agreement, "agree", lambda *rest: calls.append(1) or real(*rest))

    def act(point: Checkpoint, rank: int) -> None:
        for step in (1, 2):
            behind(point, rank, ROWS, mesh, step)
        more = {"model/b": Layout((5,), "float32")} if rank else {}
        behind(point, rank, ROWS | more, mesh, 3)

    each(tmp_path, mesh, act)
    assert len(calls) == 4
    assert resume(tmp_path, ROWS | {"model/b": Layout((5,), "float32")}, Mesh(())) == 3


# ---- when it ends ----------------------------------------------------------------------------------------------------


def test_a_file_has_its_name_after_two_steps_and_the_third_says_so(tmp_path: Path):
    mesh, path = Mesh((("dp", 4),)), tmp_path / "step-00000001.h5"

    def act(point: Checkpoint, rank: int) -> list[tuple[Path | None, bool]]:
        point.begin(1, states.filled(ROWS, mesh, rank), {})
        return [one_step(point) for _ in range(3)]

    def one_step(point: Checkpoint) -> tuple[Path | None, bool]:
        """A step that takes longer than what its thread does; what it ends, and whether the file was there before."""
        flight.wait([point._flight._task])
        point.group.barrier()
        there = path.exists()
        return point.advance(), there

    assert each(tmp_path, mesh, act) == [[(None, False), (None, False), (path, True)]] * 4


def test_a_save_goes_on_over_many_steps_that_do_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mesh, go = Mesh((("dp", 3),)), slow(monkeypatch)

    def act(point: Checkpoint, rank: int) -> Path:
        point.begin(1, states.filled(ROWS, mesh, rank, 1), {})
        assert [point.advance() for _ in range(50)] == [None] * 50
        assert point.under_way
        point.group.barrier()
        go.set()
        while not (path := point.advance()):
            time.sleep(0.001)
        assert not point.under_way and point.advance() is None and point.wait() is None
        return path

    assert each(tmp_path, mesh, act) == [tmp_path / "step-00000001.h5"] * 3
    assert resume(tmp_path, ROWS, mesh) == 1


def test_no_thread_but_the_runs_own_talks_to_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mesh, talking, real = Mesh((("dp", 4),)), set(), ThreadGroup._all

    def spy(self: ThreadGroup, value: Any) -> list[Any]:
        talking.add(threading.current_thread().name)
        return real(self, value)

    monkeypatch.setattr(ThreadGroup, "_all", spy)
    layouts = {name: layout for name, layout in MIXED.items() if "tp" not in layout.axes}
    own = each(tmp_path, mesh, lambda point, rank: (behind(point, rank, layouts, mesh), _thread())[1])
    assert talking <= set(own)


def test_a_save_that_is_due_waits_for_the_one_before_and_says_so(tmp_path: Path, monkeypatch, caplog):
    mesh, go = Mesh((("dp", 2),)), slow(monkeypatch)

    def act(point: Checkpoint, rank: int) -> list[str]:
        point.begin(1, states.filled(ROWS, mesh, rank, 1), {})
        threading.Timer(0.2, go.set).start()
        point.begin(2, states.filled(ROWS, mesh, rank, 2), {})
        found = sorted(os.listdir(tmp_path)) if rank == 0 else []
        point.wait()
        return found

    found = each(tmp_path, mesh, act)[0]
    assert "step-00000001.h5" in found and "step-00000002.h5" not in found
    assert [record.getMessage() for record in caplog.records] == [
        "the save of step 1 is still under way when the next is due, so the run waits for it: saves are too frequent"
        " for this disk (checkpoint.every)"
    ]
    assert resume(tmp_path, ROWS, mesh) == 2


@pytest.mark.parametrize("then", ["resume", "newest", "save"])
def test_whatever_else_is_asked_of_checkpoints_waits_for_the_save_under_way(tmp_path: Path, then: str):
    mesh = Mesh((("dp", 2),))
    asks: dict[str, Callable[[Checkpoint, State], Any]] = {
        "resume": lambda point, state: point.resume(state),
        "newest": lambda point, state: point.newest(),
        "save": lambda point, state: point.save(7, state, {}),
    }

    def act(point: Checkpoint, rank: int) -> Any:
        state = states.filled(ROWS, mesh, rank, 5)
        point.begin(5, state, {})
        found = asks[then](point, state)
        assert not point.under_way
        return found

    found = {"resume": 5, "newest": tmp_path / "step-00000005.h5", "save": tmp_path / "step-00000007.h5"}[then]
    assert each(tmp_path, mesh, act) == [found, found]
    assert (tmp_path / "step-00000005.h5").exists()


def test_a_rank_that_sees_the_file_late_writes_it_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mesh, real, looks = Mesh((("dp", 3),)), flight._opens, []

    def late(path: Path) -> bool:
        looks.append(path)
        return looks.count(path) > 9 and real(path)

    monkeypatch.setattr(flight, "_opens", late)
    each(tmp_path, mesh, lambda point, rank: behind(point, rank, ROWS, mesh))
    assert resume(tmp_path, ROWS, mesh) == 1


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_a_rank_copies_what_it_writes_and_not_all_that_it_holds(tmp_path: Path):
    mesh = Mesh((("dp", 4),))
    layouts = {"model/replicated": Layout((4, 1 << 20), "float32"), "model/cut": ROWS["model/a"]}

    def act(point: Checkpoint, rank: int) -> tuple[int, int]:
        addresses = set()
        for step in (1, 2):
            behind(point, rank, layouts, mesh, step)
            addresses.add(point._background._snapshot._memory.data_ptr())
        return point._background._snapshot.nbytes, len(addresses)

    assert each(tmp_path, mesh, act) == [(4 * (1 << 20) + 4 * 1_000_000, 1)] * 4  # and in the same memory each time


ROOM = Room("a", needed=10, held=50, free=100, limit=200)


@pytest.mark.parametrize(
    ("rooms", "found"),
    [
        ([ROOM], True),
        ([ROOM] * 2, True),
        ([replace(ROOM, free=20)] * 2, True),
        ([replace(ROOM, free=19)] * 2, False),
        ([replace(ROOM, free=19), replace(ROOM, host="b", free=19)], True),
        ([replace(ROOM, limit=120)] * 2, True),
        ([replace(ROOM, limit=119)] * 2, False),
        ([ROOM, replace(ROOM, host="b", needed=101)], False),
    ],
)
def test_copies_fit_where_each_node_has_room_for_those_of_its_ranks(rooms: list[Room], found: bool):
    assert fits(rooms) is found


def test_without_memory_for_the_copy_of_one_rank_all_save_at_once_and_say_so_once(tmp_path: Path, monkeypatch, caplog):
    mesh = Mesh((("dp", 3),))
    monkeypatch.setattr(Room, "seen", lambda needed: Room("a", needed, 0, 11_000_000, 1 << 40))

    def act(point: Checkpoint, rank: int) -> list[Path | None]:
        return [point.begin(step, states.filled(ROWS, mesh, rank, step), {}) for step in (1, 2)]

    assert each(tmp_path, mesh, act) == [[tmp_path / f"step-0000000{step}.h5" for step in (1, 2)]] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "memory has no room for a copy of what is saved, so the run waits for each save"
    ]


@pytest.mark.parametrize(("config", "said"), [({"background": False}, 0), ({}, 1)])
def test_saves_that_cannot_be_in_the_background_are_whole_when_they_have_begun(
    tmp_path: Path, caplog, config: dict, said: int
):
    point = Checkpoint(CheckpointConfig(sync=False, **config), tmp_path, Mesh(()), SoloGroup())
    if said:
        point._write = save.mpio  # it needs MPI, and these ranks have none

        point.save = lambda step, state, attributes, whole=point.save: _with(point, save.direct, whole, step, state)
    state = states.filled(ROWS, Mesh((("dp", 1),)), 0)
    assert [point.begin(step, state, {}) for step in (1, 2)] == [tmp_path / f"step-0000000{n}.h5" for n in (1, 2)]
    assert [record.getMessage() for record in caplog.records] == [
        'checkpoint.writer = "mpio" talks by MPI while it writes, so the run waits for each save: "auto" writes the'
        " same file in the background"
    ] * said


# ---- what a training loop calls --------------------------------------------------------------------------------------


def test_a_run_saves_when_it_is_due_and_after_its_last_step_and_says_so(tmp_path: Path):
    mesh = Mesh((("dp", 2),))

    def act(point: Checkpoint, rank: int) -> tuple[list[str], list[int]]:
        state, said, stood = states.filled(ROWS, mesh, rank, 0), [], []
        with Saver(point, state, {}, said.append) as saver:
            for step in range(1, 9):
                for held in state.values():
                    held.tensor.copy_(states.piece(held.layout, mesh, rank, step))
                stood += [step] * ("save_seconds" in saver.step(step, last=step == 8))
        return said, stood

    said, stood = each(tmp_path, mesh, act, {"every": 5})[0]
    assert said == [f"saved {tmp_path}/step-0000000{step}.h5" for step in (5, 8)]
    assert stood[0] == 5 and stood[-1] == 8
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000005.h5", "step-00000008.h5"]
    assert resume(tmp_path, ROWS, mesh) == 8


def test_each_save_of_a_run_tells_how_long_it_took_and_whether_one_is_under_way(tmp_path: Path):
    mesh, told, go = Mesh((("dp", 1),)), [], threading.Event()
    pace = Pace()
    pace.saved = told.append

    def act(point: Checkpoint, rank: int) -> None:
        state = states.filled(ROWS, mesh, rank, 1)
        point._background.folder.publish = _when(go, point._background.folder.publish)
        with Saver(point, state, {}, lambda line: None, pace) as saver:
            saver.step(1, last=False)
            assert pace.saving and told == []
            go.set()
            saver.step(2, last=True)
            assert not pace.saving and len(told) == 2 and min(told) > 0

    each(tmp_path, mesh, act, {"every": 1})


def _when(go: threading.Event, act: Callable) -> Callable:
    def later(*words: Any) -> Any:
        assert go.wait(60)
        return act(*words)

    return later


def _thread() -> str:
    return threading.current_thread().name


def _with(point: Checkpoint, write: Any, act: Callable, step: int, state: State) -> Path:
    before, point._write = point._write, write
    try:
        return act(step, state, {})
    finally:
        point._write = before
