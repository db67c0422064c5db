"""Saving and going on under any mesh, by ranks that are threads."""

from __future__ import annotations

import os
import random
from pathlib import Path

import h5py
import pytest
import torch

from hpctrain.checkpoint import shares
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import Held
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.saving import each, resume, save
from tests.support.threads import ThreadGroup

UNEVEN = {  # nothing divides; some have fewer elements than there are ranks, or none
    f"optim/exp_avg/{'x'.join(map(str, shape)) or 'scalar'}": Layout(shape, "float32")
    for shape in ((), (0,), (1,), (3,), (5,), (7,), (129,), (1000,), (7, 1, 129), (3, 0, 5))
}


def flat_over(layouts: dict[str, Layout], axis: str) -> dict[str, Layout]:
    """The same tensors, one after another in a flat buffer that is cut over ``axis``."""
    total, made = sum(layout.size for layout in layouts.values()), {}
    offset = 0
    for name, layout in layouts.items():
        made[name] = Layout(layout.shape, layout.dtype, (), Flat((axis,), offset, total))
        offset += layout.size
    return made


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

    each(tmp_path, mesh, lambda point, rank: point.save(1, states.filled(held(rank), mesh, rank, 1), {}))
    assert resume(tmp_path, layouts, Mesh((("dp", 3),))) == 1

    def back(point: Checkpoint, rank: int) -> None:
        state = states.blank(held(rank), mesh, rank)
        assert point.resume(state) == 1
        assert states.wrong(state, mesh, rank, 1) == []

    each(tmp_path, mesh, back)


def test_stages_with_other_names_and_one_with_none_make_one_file(tmp_path: Path):
    mesh = Mesh((("pp", 3),))
    names = (["model/blocks.0.weight", "model/blocks.1.weight"], ["model/blocks.2.weight"], [])

    def act(point: Checkpoint, rank: int) -> Path:
        layouts = {name: Layout((rank + 3, 5), "float32") for name in names[rank]}
        return point.save(4, states.filled(layouts, mesh, rank), {})

    with h5py.File(each(tmp_path, mesh, act)[0]) as file:
        assert list(file["model"]) == [f"blocks.{number}.weight" for number in range(3)]
        assert [dataset.shape for dataset in file["model"].values()] == [(3, 5), (3, 5), (4, 5)]
        assert all((dataset[...].ravel() == range(dataset.size)).all() for dataset in file["model"].values())


def test_the_order_in_which_ranks_name_their_tensors_is_no_matter(tmp_path: Path):
    mesh = Mesh((("dp", 4),))
    layouts = flat_over(UNEVEN, "dp") | {f"model/{number}": Layout((number, 3), "float32") for number in range(30)}

    def act(point: Checkpoint, rank: int) -> Path:
        names = random.Random(rank).sample(sorted(layouts), len(layouts))
        return point.save(1, states.filled({name: layouts[name] for name in names}, mesh, rank, 1), {})

    shuffled = each(tmp_path / "shuffled", mesh, act)[0]
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


@pytest.fixture(params=[False, True], ids=["messages", "common memory"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether ranks share memory."""
    if request.param:
        monkeypatch.setattr(
            ThreadGroup, "common", lambda group, numel, dtype: group._all(torch.zeros(numel, dtype=dtype))[0]
        )


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("blocks", [1, 2, 100])
@pytest.mark.parametrize("mesh", [Mesh((("dp", 2), ("tp", 3))), Mesh((("tp", 4),)), Mesh((("pp", 2), ("tp", 2)))])
def test_tensors_of_alternating_columns_are_exchanged_in_rounds_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: Mesh, blocks: int
):
    layouts = {
        "model/flat": Layout((700, 301), "float32", (Cut(1, ("tp",)),), Flat(("dp",), 5, 700 * 301)),
        "model/narrow": Layout((3001, 3, 40), "bfloat16", (Cut(2, ("tp",)),)),
        "model/rows": Layout((1000, 299), "float32", (Cut(0, ("tp",)),)),
        "model/wide": Layout((301, 1401), "float32", (Cut(1, ("tp",)),)),
    }
    if len(mesh.axes) < 2 or mesh.size("dp") < 2:
        layouts["model/flat"] = Layout((700, 301), "float32", (Cut(1, ("tp",)),))
    monkeypatch.setattr(shares, "ROUND_BYTES", (blocks * BLOCK_BYTES, blocks * BLOCK_BYTES))
    monkeypatch.setattr(shares, "SECTION_BYTES", 3 * BLOCK_BYTES)
    path = save(tmp_path / "many", layouts, mesh)
    plain = {name: Layout(layout.shape, layout.dtype) for name, layout in layouts.items()}
    assert path.read_bytes() == save(tmp_path / "one", plain, Mesh((("dp", 1),))).read_bytes()
    assert resume(tmp_path / "many", layouts, mesh) == 1


@pytest.mark.usefixtures("way")
def test_a_save_in_the_background_has_the_same_bytes_of_alternating_columns(tmp_path: Path):
    mesh = Mesh((("dp", 2), ("tp", 2)))
    layouts = {
        "model/columns": Layout((3000, 301), "float32", (Cut(1, ("tp",)),)),
        "model/later": Layout((301, 1401), "bfloat16", (Cut(1, ("tp",)),)),
        "model/rows": Layout((1000, 299), "float32", (Cut(0, ("tp",)),)),
    }

    def act(point: Checkpoint, rank: int) -> tuple[Path, list[int]]:
        point.begin(1, states.filled(layouts, mesh, rank, 1), {})
        written = point._background._snapshot.written(point._background._slots)
        return point.wait(), [len(pieces) for _, pieces in written]

    found = each(tmp_path / "later", mesh, act)
    assert found[0][0].read_bytes() == save(tmp_path / "once", layouts, mesh).read_bytes()
    assert all(set(lengths) == {1} for _, lengths in found)
    assert resume(tmp_path / "later", layouts, Mesh((("tp", 3),))) == 1


def test_short_runs_of_many_ranks_are_written_in_long_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    layouts = {"model/columns": Layout((20_000, 64), "float32", (Cut(1, ("tp",)),))}
    lengths, real = [], os.pwrite

    def pwrite(opened: int, data: memoryview, at: int) -> int:
        lengths.append(len(data))
        return real(opened, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    save(tmp_path, layouts, Mesh((("tp", 4),)))
    long = [length for length in lengths if length >= BLOCK_BYTES]
    assert sum(long) > 20_000 * 64 * 4 - 4 * BLOCK_BYTES
    assert len(lengths) < 20
