"""A new run that starts from another checkpoint, at step 0: which tensors, under which names, in which dtype."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.choice import renamed
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.state import Held, State, dtype_name
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, DamagedError, UsageError
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.saving import each, save

ALONE = Mesh(())
WEIGHTS = {"model/blocks.0.weight": Layout((40, 30), "float32"), "model/norm": Layout((11,), "float32")}
ADAM = {"optim/exp_avg/blocks.0.weight": Layout((40, 30), "float32"), "optim/exp_avg/norm": Layout((11,), "float32")}
MUON = {"optim/momentum/blocks.0.weight": Layout((40, 30), "float32")}


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The folder of a run that was trained with AdamW for 7 steps; its elements count up from 7."""
    save(tmp_path / "other", WEIGHTS | ADAM, ALONE, 7)
    return tmp_path / "other"


def begun(folder: Path, state: State, start: Path | None, **config) -> int:
    knobs = CheckpointConfig(sync=False, start_from=start and str(start), **config)
    return Checkpoint(knobs, folder, ALONE, SoloGroup()).resume(state)


def tensors(**dtypes: torch.dtype) -> State:
    """Blank tensors of other dtypes, with the names and shapes of WEIGHTS."""
    made = {name: torch.zeros(layout.shape, dtype=dtypes["weights"]) for name, layout in WEIGHTS.items()}
    return {name: Held(Layout(tuple(t.shape), dtype_name(t)), t) for name, t in made.items()}


def test_with_another_optimizer_the_weights_are_taken_and_a_line_says_so(other: Path, tmp_path: Path, caplog):
    state = states.blank(WEIGHTS | MUON, ALONE, 0)
    before = state["optim/momentum/blocks.0.weight"].tensor.clone()
    assert begun(tmp_path / "new", state, other) == 0
    assert states.wrong({name: state[name] for name in WEIGHTS}, ALONE, 0, 7) == []
    assert torch.equal(state["optim/momentum/blocks.0.weight"].tensor, before)
    assert [record.getMessage() for record in caplog.records] == [
        f"took 2 of this run's 3 tensors from {other}/step-00000007.h5 (its step 7);"
        " the others begin anew, and so does the step"
    ]


def test_the_runs_own_checkpoint_comes_first_and_is_never_taken_in_part(other: Path, tmp_path: Path):
    folder = tmp_path / "new"
    save(folder, WEIGHTS | MUON, ALONE, 3)
    state = states.blank(WEIGHTS | MUON, ALONE, 0)
    assert begun(folder, state, other.parent / "not even looked for") == 3
    assert states.wrong(state, ALONE, 0, 3) == []
    with pytest.raises(
        CheckpointError, match="begin a new run from its weights: another run.name, and checkpoint.start_from"
    ):
        begun(folder, states.blank(WEIGHTS | ADAM, ALONE, 0), other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_floats_are_converted(other: Path, tmp_path: Path, dtype: torch.dtype):
    state = tensors(weights=dtype)
    begun(tmp_path / "new", state, other)
    for name, held in state.items():
        assert torch.equal(held.tensor, states.whole(WEIGHTS[name], 7).reshape(held.tensor.shape).to(dtype))


def test_ranks_of_any_mesh_convert_what_they_hold(other: Path, tmp_path: Path):
    mesh = Mesh((("dp", 2), ("tp", 2)))
    layouts = {
        "model/blocks.0.weight": Layout((40, 30), "bfloat16", (Cut(1, ("tp",)),), Flat(("dp",), 5, 700)),
        "model/norm": Layout((11,), "bfloat16", (), Flat(("tp",), 0, 11)),
    }

    def act(point: Checkpoint, rank: int) -> bool:
        state = states.blank(layouts, mesh, rank)
        assert point.resume(state) == 0
        stored = {name: replace(layout, dtype="float32") for name, layout in layouts.items()}
        wanted = states.filled(stored, mesh, rank, 7)
        return all(torch.equal(held.tensor, wanted[name].tensor.bfloat16()) for name, held in state.items())

    assert all(each(tmp_path / "new", mesh, act, {"start_from": str(other)}))


@pytest.mark.parametrize("of", ["file", "folder"])
@pytest.mark.parametrize(("saved", "held"), [("float32", "float32"), ("bfloat16", "float64"), ("float64", "bfloat16")])
def test_weights_alone_are_taken_from_any_mesh_by_any_mesh_with_any_optimizer(
    of: str, saved: str, held: str, tmp_path: Path
):
    layouts, three = {"model/a": Layout((7, 4), saved), "model/b": Layout((5,), saved)}, Mesh((("dp", 3),))
    source = save(tmp_path / "other", layouts | {"optim/m/a": Layout((7, 4), "float32")}, Mesh((("dp", 2),)), 9)
    wanted = {
        "model/a": Layout((7, 4), held, (Cut(0, ("dp",)),)),
        "model/b": Layout((5,), held, (), Flat(("dp",), 2, 9)),
        "optim/square/a": Layout((7, 4), "float32"),
    }

    def act(point: Checkpoint, rank: int) -> None:
        state = states.blank(wanted, three, rank)
        assert point.resume(state) == 0
        for name, one in state.items():
            expected = states.piece(one.layout, three, rank, 9) if name.startswith("model/") else 0
            assert torch.equal(one.tensor, torch.zeros_like(one.tensor) + expected), name

    each(tmp_path / "new", three, act, {"start_from": str(source if of == "file" else source.parent)})


def test_only_and_rename_say_what_is_taken_and_how_it_is_called_there(other: Path, tmp_path: Path):
    layouts = {"model/layers.0.weight": WEIGHTS["model/blocks.0.weight"], "model/norm": WEIGHTS["model/norm"]} | MUON
    state = states.blank(layouts, ALONE, 0)
    rename = {"model/blocks.*": "model/layers.*", "optim/exp_avg/*": "optim/momentum/*"}
    begun(tmp_path / "new", state, other, rename=rename, only=("model/layers.*", "optim/momentum/blocks.*"))
    assert states.wrong(state, ALONE, 0, 7) == ["model/norm"]


def test_all_that_does_not_fit_is_told_at_once(other: Path, tmp_path: Path):
    layouts = {"model/blocks.0.weight": Layout((40, 31), "float32"), "model/head": Layout((3,), "float32")}
    with pytest.raises(CheckpointError) as caught:
        begun(tmp_path / "new", states.blank(layouts, ALONE, 0), other)
    assert str(caught.value) == (
        f"{other}/step-00000007.h5 does not fit this run: 3 tensors to take from it differ\n"
        "  model/blocks.0.weight: float32 [40, 30] in the file, this run wants float32 [40, 31]\n"
        "  model/head: not in the file, this run wants float32 [3]\n"
        "  model/norm: in the file alone\n"
        "  take fewer (checkpoint.only), give their names there (checkpoint.rename), or choose the model's shape"
    )
    whole_numbers = {"model/norm": Layout((11,), "int64")}
    with pytest.raises(CheckpointError, match=r"model/norm: float32 \[11\] in the file, this run wants int64 \[11\]"):
        begun(tmp_path / "new", states.blank(whole_numbers, ALONE, 0), other)


@pytest.mark.parametrize(
    ("layouts", "told"),
    [
        ({"model/norm": Layout((12,), "float32")}, "model/norm: float32 [11] in the file, this run wants float32 [12]"),
        ({"model/c": Layout((1,), "float32")}, "model/c: not in the file, this run wants float32 [1]"),
        ({"model/norm": WEIGHTS["model/norm"]}, "model/blocks.0.weight: in the file alone"),
    ],
)
def test_weights_of_another_model_are_refused_on_all_ranks(layouts: dict, told: str, other: Path, tmp_path: Path):
    mesh = Mesh((("dp", 3),))

    def act(point: Checkpoint, rank: int) -> list[str]:
        with pytest.raises(CheckpointError, match=f"{other}/step-00000007.h5 does not fit this run") as caught:
            point.resume(states.blank(layouts, mesh, rank))
        return caught.value.why.split("\n  ")

    assert all(told in faults for faults in each(tmp_path / "new", mesh, act, {"start_from": str(other)}))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"only": ("modle/*",)}, r"checkpoint.only: 'modle/\*' names no tensor of this run"),
        ({"rename": {"*/blocks.*": "model/y*"}}, r"checkpoint.rename: '\*/blocks.\*' names no tensor of .*/step"),
        ({"rename": {"model/x": "model/y"}}, "checkpoint.rename: 'model/x' names no tensor of .*step-00000007.h5\n"),
        (
            {"rename": {"model/blocks.0.weight": "model/norm"}},
            "checkpoint.rename makes two tensors model/norm\n  model/",
        ),
    ],
)
def test_patterns_that_fit_nothing_or_too_much_are_refused(other: Path, tmp_path: Path, knobs: dict, message: str):
    with pytest.raises(UsageError, match=message):
        begun(tmp_path / "new", states.blank(WEIGHTS, ALONE, 0), other, **knobs)


def test_a_damaged_or_missing_start_ends_the_run_rather_than_begin_without(other: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match="nowhere is not there"):
        begun(tmp_path / "new", states.blank(WEIGHTS, ALONE, 0), tmp_path / "nowhere")
    path = other / "step-00000007.h5"
    slot = next(slot for slot in read_index(path).slots if slot.name == "model/norm")
    with path.open("r+b") as file:
        file.seek(slot.offset)
        file.write(b"\xff")
    with pytest.raises(DamagedError, match="model/norm is damaged in its bytes 0 to 43"):
        begun(tmp_path / "new", states.blank(WEIGHTS, ALONE, 0), path)


def test_a_star_in_a_new_name_takes_the_text_of_the_old_ones():
    rename = {"model/a.*.weight": "model/b.*.w", "model/one": "model/other", "model/*": "model/x.*"}
    found = [renamed(name, rename) for name in ("model/a.0.1.weight", "model/one", "model/two", "optim/two")]
    assert found == ["model/b.0.1.w", "model/other", "model/x.two", "optim/two"]
