"""Saving and going on, with ranks that are threads: under any mesh, and with every error met by all ranks."""

from __future__ import annotations

import errno
import os
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint import disk, format, keep
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.save import writer
from hpctrain.checkpoint.state import Held
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, IncompleteError
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states, threads

AXES = ("pp", "dp", "tp")
DTYPES = ("float32", "bfloat16", "float64", "int64", "bool", "float8_e4m3fn")
UNEVEN = {  # nothing divides; some have fewer elements than there are ranks, or none
    f"optim/exp_avg/{'x'.join(map(str, shape)) or 'scalar'}": Layout(shape, "float32")
    for shape in ((), (0,), (1,), (3,), (5,), (7,), (129,), (1000,), (7, 1, 129), (3, 0, 5))
}


def save(folder: Path, layouts: dict[str, Layout], mesh: Mesh, step: int = 1, **config: Any) -> Path:
    """Save elements that count up from ``step``, by as many ranks as the mesh has."""

    def act(point: Checkpoint, rank: int) -> Path:
        return point.save(step, states.filled(layouts, mesh, rank, step), {})

    return _each(folder, mesh, act, config)[0]


def resume(folder: Path, layouts: dict[str, Layout], mesh: Mesh) -> int:
    """The step that was gone on from, once every element on every rank was found to be right."""

    def act(point: Checkpoint, rank: int) -> int:
        state = states.blank(layouts, mesh, rank)
        step = point.resume(state)
        assert step == 0 or states.wrong(state, mesh, rank, step) == []
        return step

    (step,) = set(_each(folder, mesh, act))
    return step


def _each(folder: Path, mesh: Mesh, act: Callable[[Checkpoint, int], Any], config: dict | None = None) -> list[Any]:
    knobs = CheckpointConfig(**{"sync": False} | (config or {}))

    def one(group: Group) -> Any:
        return act(Checkpoint(knobs, folder, mesh, group), group.rank)

    return threads.run(mesh.ranks_total, one)


def flat_over(layouts: dict[str, Layout], axis: str) -> dict[str, Layout]:
    """The same tensors, one after another in a flat buffer that is cut over ``axis``."""
    total, made = sum(layout.size for layout in layouts.values()), {}
    offset = 0
    for name, layout in layouts.items():
        made[name] = Layout(layout.shape, layout.dtype, (), Flat((axis,), offset, total))
        offset += layout.size
    return made


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to 6 ranks on up to 3 axes, in any order."""
    sizes: list[int] = []
    for _ in AXES:
        most = 6 // max(1, int(torch.tensor(sizes).prod())) if sizes else 6
        sizes.append(draw(st.integers(1, min(3, most))))
    ranks = torch.tensor(sizes).prod().item()
    return Mesh(tuple(zip(AXES, sizes, strict=True)), tuple(draw(st.permutations(range(ranks)))))


@st.composite
def layouts_for(draw: st.DrawFn, shape: tuple[int, ...], dtype: str) -> Layout:
    """Each axis cuts a dim, or a flat buffer, or makes replicas."""
    uses = {axis: draw(st.sampled_from(["replica", "flat", *range(len(shape))])) for axis in AXES}
    cuts = tuple(
        Cut(dim, axes) for dim in range(len(shape)) if (axes := tuple(axis for axis in AXES if uses[axis] == dim))
    )
    flat_axes = tuple(axis for axis in AXES if uses[axis] == "flat")
    size = int(torch.tensor(shape).prod()) if shape else 1
    offset = draw(st.integers(0, 20))
    flat = Flat(flat_axes, offset, offset + size + draw(st.integers(0, 20))) if flat_axes else None
    return Layout(shape, dtype, cuts, flat)


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 12]), max_size=3).map(tuple)


@settings(max_examples=200)
@given(st.data(), meshes(), meshes(), st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4))
def test_what_any_mesh_saved_loads_under_any_other(data: st.DataObject, one: Mesh, other: Mesh, tensors: list):
    def draw(mesh: Mesh) -> dict[str, Layout]:
        return {f"model/{number}": data.draw(layouts_for(*tensor)) for number, tensor in enumerate(tensors)}

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), draw(one), one)
        assert resume(Path(folder), draw(other), other) == 1


def test_uneven_moments_keep_their_places_from_four_ranks_to_three_to_five_to_four(tmp_path: Path):
    for step, ranks in enumerate((4, 3, 5, 4), 1):
        mesh, layouts = Mesh((("dp", ranks),)), flat_over(UNEVEN, "dp")
        assert resume(tmp_path, layouts, mesh) == step - 1
        save(tmp_path, layouts, mesh, step)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 7])
def test_a_checkpoint_of_four_ranks_loads_on_any_number(tmp_path: Path, ranks: int):
    save(tmp_path, flat_over(UNEVEN, "dp"), Mesh((("dp", 4),)))
    assert resume(tmp_path, flat_over(UNEVEN, "dp"), Mesh((("dp", ranks),))) == 1
    assert resume(tmp_path, UNEVEN, Mesh((("dp", ranks),))) == 1


def test_replicas_share_the_writing_and_the_file_is_the_one_of_a_rank_alone(tmp_path: Path):
    layouts = {"model/large": Layout((1000, 1500), "float32"), "model/small": Layout((10,), "float32"), **UNEVEN}
    alone = save(tmp_path / "alone", layouts, Mesh((("dp", 1),)))
    four = save(tmp_path / "four", layouts, Mesh((("dp", 4),)))
    assert four.read_bytes() == alone.read_bytes()


@pytest.mark.parametrize("coordinates", [(0,), (2,), (0, 3), (1, 2, 3)])
def test_a_tensor_may_be_held_by_some_stages_alone(tmp_path: Path, coordinates: tuple[int, ...]):
    mesh = Mesh((("pp", 4), ("dp", 2)), (7, 6, 5, 4, 3, 2, 1, 0))
    layouts = {"model/some": Layout((700, 3000), "float32", (Cut(0, ("dp",)),)), "model/all": Layout((7,), "float32")}

    def held(rank: int) -> dict[str, Layout]:
        return layouts if mesh.index(rank, "pp") in coordinates else {"model/all": layouts["model/all"]}

    _each(tmp_path, mesh, lambda point, rank: point.save(1, states.filled(held(rank), mesh, rank, 1), {}))
    assert resume(tmp_path, layouts, Mesh((("dp", 3),))) == 1

    def back(point: Checkpoint, rank: int) -> None:
        state = states.blank(held(rank), mesh, rank)
        assert point.resume(state) == 1
        assert states.wrong(state, mesh, rank, 1) == []

    _each(tmp_path, mesh, back)


def test_stages_with_other_names_and_one_with_none_make_one_file(tmp_path: Path):
    mesh = Mesh((("pp", 3),))
    names = (["model/blocks.0.weight", "model/blocks.1.weight"], ["model/blocks.2.weight"], [])

    def act(point: Checkpoint, rank: int) -> Path:
        layouts = {name: Layout((rank + 3, 5), "float32") for name in names[rank]}
        return point.save(4, states.filled(layouts, mesh, rank), {})

    with h5py.File(_each(tmp_path, mesh, act)[0]) as file:
        assert list(file["model"]) == [f"blocks.{number}.weight" for number in range(3)]
        assert [dataset.shape for dataset in file["model"].values()] == [(3, 5), (3, 5), (4, 5)]
        assert all((dataset[...].ravel() == range(dataset.size)).all() for dataset in file["model"].values())


def test_the_order_in_which_ranks_name_their_tensors_is_no_matter(tmp_path: Path):
    mesh = Mesh((("dp", 4),))
    layouts = flat_over(UNEVEN, "dp") | {f"model/{number}": Layout((number, 3), "float32") for number in range(30)}

    def act(point: Checkpoint, rank: int) -> Path:
        names = random.Random(rank).sample(sorted(layouts), len(layouts))
        return point.save(1, states.filled({name: layouts[name] for name in names}, mesh, rank, 1), {})

    shuffled = _each(tmp_path / "shuffled", mesh, act)[0]
    assert shuffled.read_bytes() == save(tmp_path / "sorted", dict(sorted(layouts.items())), mesh).read_bytes()
    assert resume(tmp_path / "shuffled", layouts, Mesh((("dp", 2),))) == 1


def test_tensors_that_are_not_contiguous_come_back(tmp_path: Path):
    layout = Layout((30, 20), "float32")
    strided = torch.arange(600.0).reshape(20, 30).t()
    point = Checkpoint(CheckpointConfig(sync=False), tmp_path, Mesh((("dp", 1),)), SoloGroup())
    point.save(1, {"model/a": Held(layout, strided)}, {})
    into = torch.zeros(20, 30).t()
    assert point.resume({"model/a": Held(layout, into)}) == 1
    assert torch.equal(into, strided)


def test_two_layouts_of_one_name_are_an_error_on_all_ranks(tmp_path: Path):
    mesh = Mesh((("dp", 3),))

    def act(point: Checkpoint, rank: int) -> str:
        layouts = {"model/same": Layout((4,), "float32"), "model/odd": Layout((4 + (rank == 2),), "float32")}
        with pytest.raises(CheckpointError) as caught:
            point.save(1, states.filled(layouts, mesh, rank), {})
        return str(caught.value)

    (told,) = set(_each(tmp_path, mesh, act))
    assert told.startswith("model/odd: ranks 0 and 2 have different layouts for it\n  rank 0: {")
    assert told.endswith("give one name one global shape, dtype and cut on all ranks")
    assert not tmp_path.joinpath("latest").exists()


def test_a_tensor_that_is_cut_over_ranks_that_do_not_hold_it_is_an_error(tmp_path: Path):
    mesh = Mesh((("dp", 4),))
    layout = Layout((8,), "float32", (Cut(0, ("dp",)),))

    def act(point: Checkpoint, rank: int) -> None:
        held = {"model/a": layout} if rank else {}
        with pytest.raises(CheckpointError, match="model/a: 3 of 4 ranks along dp hold it\n  its layout cuts it over"):
            point.save(1, states.filled(held, mesh, rank), {})

    _each(tmp_path, mesh, act)


def test_holders_that_are_no_grid_are_an_error(tmp_path: Path):
    mesh = Mesh((("pp", 2), ("dp", 2)))

    def act(point: Checkpoint, rank: int) -> None:
        layouts = {"model/a": Layout((8,), "float32")} if rank < 3 else {}
        with pytest.raises(CheckpointError, match=r"model/a: ranks \[0, 1, 2\] hold it, which is no sub-grid"):
            point.save(1, states.filled(layouts, mesh, rank), {})

    _each(tmp_path, mesh, act)


def test_a_tensor_of_another_size_than_its_layout_is_an_error_on_all_ranks(tmp_path: Path):
    mesh = Mesh((("dp", 2),))

    def act(point: Checkpoint, rank: int) -> None:
        held = Held(Layout((8,), "float32"), torch.zeros(8 - rank))
        with pytest.raises(CheckpointError) as caught:
            point.save(1, {"model/a": held}, {})
        assert caught.value.what == (
            "rank 1: model/a: a tensor of 7 float32, where the layout has 8 float32"
        )

    _each(tmp_path, mesh, act)


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path):
    alone = Mesh((("dp", 1),))
    same = {"model/a": Layout((3,), "float32")}
    save(tmp_path, same | {"model/b": Layout((4,), "float32"), "optim/c": Layout((2,), "float32")}, alone)
    wanted = same | {"model/b": Layout((4,), "bfloat16"), "model/d": Layout((9, 2), "int64")}
    with pytest.raises(CheckpointError) as caught:
        resume(tmp_path, wanted, alone)
    assert str(caught.value) == (
        f"{tmp_path}/step-00000001.h5 does not fit this run: 3 tensors differ\n"
        "  model/b: float32 [4] in the file, this run wants bfloat16 [4]\n"
        "  model/d: not in the file, this run wants int64 [9, 2]\n"
        "  optim/c: in the file alone\n"
        "  start with the configuration it was saved with (hpctrain ckpt inspect shows it), or in another folder"
    )


def test_a_disk_too_small_is_told_before_anything_is_written(tmp_path: Path, monkeypatch, caplog):
    mesh = Mesh((("dp", 2),))
    layouts = {"model/a": Layout((100_000,), "float32")}
    save(tmp_path, layouts, mesh, 1, keep=1)
    real = os.statvfs(tmp_path)
    scarce = os.statvfs_result((real.f_bsize, 1024, 300, 300, 300, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: scarce)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, layouts, mesh, 2, keep=1)
    needed = format.needed_bytes([format.Slot("model/a", (100_000,), "float32", 0)])
    assert caught.value.what == f"{tmp_path}: a checkpoint needs {needed} bytes and {300 * 1024} are free"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001.h5"]
    assert resume(tmp_path, layouts, mesh) == 1
    assert f"a checkpoint needs {needed} bytes" in caplog.text  # said at the start of a run, before the first step


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_one(tmp_path: Path, monkeypatch, failing: int):
    mesh = Mesh((("dp", 4),))
    layouts = {"model/a": Layout((4, 1000, 1000), "float32", (Cut(0, ("dp",)),))}
    save(tmp_path, layouts, mesh, 1)
    real = disk.write

    def write(path: Path, pieces, sync: bool) -> None:
        found = list(pieces)
        if found[0].memory.view(torch.float32)[0] == (failing * 1_000_000 + 2) % states.MODULUS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, found, sync)

    monkeypatch.setattr(disk, "write", write)

    def act(point: Checkpoint, rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            point.save(2, states.filled(layouts, mesh, rank, 2), {})
        return str(caught.value)

    (told,) = set(_each(tmp_path, mesh, act))
    part = rf"{tmp_path}/\.step-00000002\.h5\..+\.part"
    assert re.fullmatch(
        rf"rank {failing}: writing {part} failed\n"
        rf"  {part}: No space left on device\n"
        r"  free space there, or give another folder \(run.dir\)",
        told,
    )
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001.h5"]
    assert resume(tmp_path, layouts, mesh) == 1


def test_attributes_that_are_no_json_are_an_error_and_leave_nothing(tmp_path: Path):
    def act(point: Checkpoint, rank: int) -> None:
        with pytest.raises(CheckpointError, match="laying out step 1 failed\n  TypeError: .* not JSON serializable"):
            point.save(1, {}, {"a": object()})

    _each(tmp_path, Mesh((("dp", 2),)), act)
    assert os.listdir(tmp_path) == []


def test_a_broken_newest_file_is_passed_over_with_one_line(tmp_path: Path, caplog):
    mesh, layouts = Mesh((("dp", 2),)), {"model/a": Layout((100_000,), "float32")}
    for step in (1, 2, 3):
        path = save(tmp_path, layouts, mesh, step, keep=3)
    os.truncate(path, 300_000)
    tmp_path.joinpath("step-00000009.h5").write_text("not HDF5")
    assert resume(tmp_path, layouts, mesh) == 2
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("skipped")]
    assert len(lines) == 2
    assert "step-00000009.h5 is not an HDF5 file" in lines[0]
    assert "step-00000003.h5 is incomplete" in lines[1]
    save(tmp_path, layouts, mesh, 3)
    assert resume(tmp_path, layouts, mesh) == 3


def test_a_folder_with_nothing_whole_is_an_error_and_an_empty_one_is_a_beginning(tmp_path: Path):
    mesh, layouts = Mesh((("dp", 2),)), {"model/a": Layout((10,), "float32")}
    assert resume(tmp_path / "new", {}, mesh) == 0
    os.truncate(save(tmp_path, layouts, mesh), 100)
    with pytest.raises(IncompleteError, match="has 1 checkpoints and none of them is whole"):
        resume(tmp_path, layouts, mesh)


def test_one_rank_lists_the_folder_once(tmp_path: Path, monkeypatch):
    mesh, layouts = Mesh((("dp", 4),)), {"model/a": Layout((10,), "float32")}
    save(tmp_path, layouts, mesh)
    listed, real = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or real(path))
    assert resume(tmp_path, layouts, mesh) == 1
    assert listed == [tmp_path]


def test_a_folder_that_cannot_be_listed_is_an_error_on_all_ranks_and_no_new_beginning(tmp_path: Path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(keep.os, "listdir", fail)

    def act(point: Checkpoint, rank: int) -> None:
        with pytest.raises(CheckpointError) as caught:
            point.resume({})
        assert str(caught.value) == f"looking for checkpoints in {tmp_path} failed\n  {tmp_path}: Input/output error"
        with pytest.raises(CheckpointError, match="Input/output error"):
            point.newest()

    _each(tmp_path, Mesh((("dp", 3),)), act)


def test_a_file_that_may_not_be_read_is_an_error_and_no_older_one_is_taken(tmp_path: Path, monkeypatch):
    mesh, layouts = Mesh((("dp", 2),)), {"model/a": Layout((10,), "float32")}
    save(tmp_path, layouts, mesh, 1)
    save(tmp_path, layouts, mesh, 2)
    real = os.open

    def refuse(path, *rest, **more):
        if str(path).endswith("step-00000002.h5"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="looking for .* failed\n  .*step-00000002.h5: Permission denied"):
        resume(tmp_path, layouts, mesh)


def test_due_is_every_so_many_steps_and_never_at_the_start():
    point = Checkpoint(CheckpointConfig(every=5), Path("x"), Mesh((("dp", 1),)), SoloGroup())
    assert [step for step in range(21) if point.due(step)] == [5, 10, 15, 20]
    assert not any(Checkpoint(CheckpointConfig(), Path("x"), Mesh(()), SoloGroup()).due(step) for step in range(9))


def test_mpio_without_parallel_hdf5_says_what_to_do(monkeypatch):
    for parallel, why in ((False, "this h5py is a serial build"), (True, "these ranks talk by SoloGroup")):
        monkeypatch.setattr(format, "parallel", lambda parallel=parallel: parallel)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(CheckpointConfig(writer="mpio"), Path("x"), Mesh((("dp", 1),)), SoloGroup())
        assert str(caught.value) == (
            'checkpoint.writer = "mpio" cannot be used here\n'
            f"  {why}; mpio needs h5py built with HDF5_MPI=ON, and ranks that talk by MPI\n"
            '  leave checkpoint.writer "auto", or set it to "direct": the file is the same'
        )
    assert writer("auto", SoloGroup()) is writer("direct", SoloGroup())


def test_the_newest_is_a_path_or_none(tmp_path: Path):
    point = Checkpoint(CheckpointConfig(sync=False), tmp_path, Mesh(()), SoloGroup())
    assert point.newest() is None
    path = point.save(7, {}, {"a": 1})
    assert point.newest() == path == tmp_path / "step-00000007.h5"
    assert format.read_attributes(path) == {"a": 1}
