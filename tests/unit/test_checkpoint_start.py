"""A new run may start with the weights of another one's checkpoint, at step 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.errors import CheckpointError
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.saving import each, resume, save

MESH = Mesh((("dp", 3),))
SAVED = {
    "model/a": Layout((7, 4), "float32"),
    "model/b": Layout((5,), "float32"),
    "optim/m/a": Layout((7, 4), "float32"),
}
HELD = {
    "model/a": Layout((7, 4), "float32", (Cut(0, ("dp",)),)),
    "model/b": Layout((5,), "float32", (), Flat(("dp",), 2, 9)),
    "optim/square/a": Layout((7, 4), "float32"),  # another optimizer than the one that saved
}


def started(folder: Path, source: Path, layouts: dict[str, Layout], step: int = 9) -> None:
    """Start on three ranks, and check each element: weights of step 9 of the other run, and nothing else."""

    def act(point: Checkpoint, rank: int) -> None:
        state = states.blank(layouts, MESH, rank)
        assert point.resume(state) == 0
        for name, held in state.items():
            expected = states.piece(held.layout, MESH, rank, step) if name.startswith("model/") else 0
            assert torch.equal(held.tensor, torch.zeros_like(held.tensor) + expected), name

    each(folder, MESH, act, {"start_from": str(source)})


@pytest.mark.parametrize("of", ["file", "folder"])
def test_weights_alone_are_taken_by_any_mesh_and_any_optimizer(of: str, tmp_path: Path):
    source = save(tmp_path / "other", SAVED, Mesh((("dp", 2),)), 9)
    started(tmp_path / "run", source if of == "file" else source.parent, HELD)


@pytest.mark.parametrize(("saved", "held"), [("bfloat16", "float32"), ("float32", "float64"), ("float64", "bfloat16")])
def test_weights_in_another_format_are_converted(saved: str, held: str, tmp_path: Path):
    def of(layouts: dict[str, Layout], dtype: str) -> dict[str, Layout]:
        return {name: Layout(one.shape, dtype, one.cuts, one.flat) for name, one in layouts.items()}

    source = save(tmp_path / "other", of(SAVED, saved), MESH, 9)
    started(tmp_path / "run", source, of(HELD, held))


def test_a_checkpoint_of_the_run_itself_comes_first(tmp_path: Path):
    other = save(tmp_path / "other", SAVED, MESH, 9)
    save(tmp_path / "run", HELD, MESH, 4)
    other.unlink()  # it is not even looked for

    def act(point: Checkpoint, rank: int) -> int:
        return point.resume(states.blank(HELD, MESH, rank))

    assert set(each(tmp_path / "run", MESH, act, {"start_from": str(other)})) == {4}
    assert resume(tmp_path / "run", HELD, MESH) == 4


@pytest.mark.parametrize(
    ("layouts", "told"),
    [
        ({"model/a": Layout((7, 5), "float32")}, "model/a: float32 [7, 4] in the file, this run wants float32 [7, 5]"),
        ({"model/c": Layout((1,), "float32")}, "model/c: not in the file, this run wants float32 [1]"),
        ({"model/a": SAVED["model/a"]}, "model/b: in the file alone"),
    ],
)
def test_weights_of_another_model_are_refused(layouts: dict[str, Layout], told: str, tmp_path: Path):
    source = save(tmp_path / "other", SAVED, MESH, 9)

    def act(point: Checkpoint, rank: int) -> Any:
        with pytest.raises(CheckpointError, match=f"{source} does not fit this run") as caught:
            point.resume(states.blank(layouts, MESH, rank))
        return caught.value.why.split("\n  ")

    assert all(told in faults for faults in each(tmp_path / "run", MESH, act, {"start_from": str(source)}))


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path):
    def act(point: Checkpoint, rank: int) -> Any:
        with pytest.raises(CheckpointError, match="none.h5 is not there"):
            point.resume(states.blank(HELD, MESH, rank))

    each(tmp_path / "run", MESH, act, {"start_from": str(tmp_path / "none.h5")})
