"""Folders that torch's DCP wrote come in bit for bit, and what goes out is what torch's own reader reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as theirs
from torch import Tensor

from hpctrain.checkpoint import dcp, dcp_write, disk, hub, parts
from hpctrain.checkpoint.adopt import adopt
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.verify import verify
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.errors import CheckpointError, DamagedError
from hpctrain.plan.layout import ITEMSIZE
from tests.support import threads
from tests.support.dcp import as_shards, load, save
from tests.support.peak import peak
from tests.support.weights import model_of, read, saved

SOLO = SoloGroup()
DTYPES = tuple(ITEMSIZE)


def numbers(*shape: int, dtype: str = "float32") -> Tensor:
    """Bytes at random as numbers: also those that are none."""
    kind = getattr(torch, dtype)
    make = torch.Generator().manual_seed(sum(shape))
    return (
        torch.randint(0, 2 if dtype == "bool" else 256, (*shape, kind.itemsize), generator=make, dtype=torch.uint8)
        .view(kind)
        .squeeze(-1)
    )


STATE = {
    "layers": {"0.weight": numbers(37, 11), "turned": numbers(8, 5).t(), "every other": numbers(20, 6)[::2, 1::2]},
    "cube": numbers(3, 4, 5).permute(2, 0, 1),
    "half": numbers(33, 7, dtype="bfloat16"),
    "scalar": torch.tensor(2.5),
    "nothing": torch.empty(0, 4),
    "repeated": torch.arange(4.0).expand(3, 4),
    "step": 5,
    "words": "not a tensor",
}
FLAT = {**{f"layers.{name}": one for name, one in STATE["layers"].items()}, **STATE}


def same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, in dtype and shape too."""
    laid = [x.contiguous().reshape(-1).view(torch.uint8) for x in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*laid)


def check(folder: Path, expected: dict[str, Any], out: Path, group: Group = SOLO, **how: Any) -> dict[str, Any]:
    """Import a folder, and find every tensor of ``expected`` there and no other."""
    made = adopt(folder, out, group, **how)
    wanted = {f"model/{name}": one for name, one in expected.items() if isinstance(one, Tensor)}
    found = read(out)
    assert found.keys() == wanted.keys()
    assert [name for name, one in wanted.items() if not same(one, found[name])] == []
    return made


def test_tensors_of_every_layout_come_in_and_what_is_no_tensor_is_told(tmp_path: Path):
    save(tmp_path / "dcp", STATE)
    made = check(tmp_path / "dcp", {name: one for name, one in FLAT.items() if name != "layers"}, tmp_path / "back.h5")
    assert sorted(made["left_out"]) == ["step", "words"]
    index = read_index(tmp_path / "back.h5")
    assert (index.step, made["tensors"]) == (0, 8)
    assert verify(tmp_path / "back.h5", index, SOLO) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_in_bit_for_bit(dtype: str, tmp_path: Path):
    state = {"x": numbers(9, 4, dtype=dtype), "turned": numbers(6, 4, dtype=dtype).t()}
    save(tmp_path / "dcp", state)
    check(tmp_path / "dcp", state, tmp_path / "back.h5")


@pytest.mark.parametrize("cut", [(0,), (1,), (0, 1), (2,), (0, 2)])
def test_a_tensor_in_many_chunks_is_one_again(cut: tuple[int, ...], tmp_path: Path):
    state = {"x": numbers(7, 12, 5), "y": numbers(40, 6, 3, dtype="bfloat16")}
    as_shards(tmp_path / "dcp", state, cut, pieces=3)
    check(tmp_path / "dcp", state, tmp_path / "back.h5")


@pytest.mark.parametrize("step", [1, 7, 60, 100])
def test_any_elements_of_a_tensor_can_be_read_alone(step: int, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dcp, "STEP_ELEMENTS", step)
    state = {"x": numbers(7, 12, 5), "y": numbers(10, 6, dtype="bfloat16").t(), "z": torch.tensor(3)}
    as_shards(tmp_path / "dcp", state, (0, 1), pieces=3)
    found, _ = dcp.read_folder(tmp_path / "dcp")
    assert [name for name, one in state.items() if not same(found[name].read().view(one.shape), one)] == []


def test_files_of_safetensors_are_read_too(tmp_path: Path):
    state = {"x": numbers(7, 12), "y": numbers(4, 6, dtype="bfloat16"), "scalar": torch.tensor(2.5)}
    writer = theirs.FileSystemWriter(
        tmp_path / "dcp", serialization_format=theirs.filesystem.SerializationFormat.SAFETENSORS
    )
    save(tmp_path / "dcp", state, writer)
    check(tmp_path / "dcp", state, tmp_path / "back.h5")


@pytest.mark.parametrize("options", [{"single_file_per_rank": False}, {"thread_count": 3}])
def test_other_numbers_of_files_are_no_matter(options: dict[str, Any], tmp_path: Path):
    state = {f"x{number}": numbers(number + 1, 5) for number in range(9)}
    save(tmp_path / "dcp", state, theirs.FileSystemWriter(tmp_path / "dcp", **options))
    check(tmp_path / "dcp", state, tmp_path / "back.h5")


@pytest.mark.parametrize("ranks", [2, 5])
def test_any_number_of_ranks_makes_the_same_file(ranks: int, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(parts, "STEP_ELEMENTS", 1 << 16)
    state = {"x": numbers(700, 300), "y": numbers(60, 33, dtype="bfloat16").t(), "z": torch.tensor(1)}
    as_shards(tmp_path / "dcp", state, (0,), pieces=4)
    check(tmp_path / "dcp", state, tmp_path / "alone.h5")
    threads.run(ranks, lambda group: adopt(tmp_path / "dcp", tmp_path / "back.h5", group))
    assert (tmp_path / "back.h5").read_bytes() == (tmp_path / "alone.h5").read_bytes()


def test_some_come_in_under_other_names_and_in_another_format(tmp_path: Path):
    state = {"app": {"a.weight": numbers(3, 4), "b.weight": torch.arange(5)}, "optim": {"a": torch.ones(9)}}
    save(tmp_path / "dcp", state)
    how = {"only": ("app.*",), "rename": {"app.*": "blocks.*"}, "dtype": "bfloat16"}
    expected = {"blocks.a.weight": state["app"]["a.weight"].bfloat16(), "blocks.b.weight": torch.arange(5)}
    check(tmp_path / "dcp", expected, tmp_path / "back.h5", **how)
    names = read_index(tmp_path / "back.h5").attributes["imported"]["names"]
    assert names == {"model/blocks.a.weight": "app.a.weight", "model/blocks.b.weight": "app.b.weight"}


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_weights_of_a_transformers_model_come_in_as_that_model(ranks: int, tmp_path: Path):
    source = saved(tmp_path / "run", model_of(family="qwen3", head_dim=10))
    hub.export(source, tmp_path / "hf", SOLO)
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "hf/model.safetensors")
    as_shards(
        tmp_path / "dcp", {f"app.{name}": one for name, one in tensors.items()} | {"optim": torch.ones(3, 3)}, (0,)
    )
    (tmp_path / "dcp/config.json").write_bytes((tmp_path / "hf/config.json").read_bytes())
    how = {"only": ("app.*",), "rename": {"app.*": "*"}}
    threads.run(ranks, lambda group: hub.bring(tmp_path / "dcp", tmp_path / "back.h5", group, **how))
    expected, found = read(source), read(tmp_path / "back.h5")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def test_the_chunks_of_a_tensor_travel_as_plain_values(tmp_path: Path):
    as_shards(tmp_path / "dcp", {"x": numbers(7, 12)}, (0, 1))
    found, others = dcp.read_folder(tmp_path / "dcp")
    assert others == []
    assert {name: dcp.Stored.from_json(tmp_path / "dcp", one.to_json()) for name, one in found.items()} == found


# ---- what goes out


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("chunk", [1000, dcp_write.CHUNK_BYTES])
def test_torch_reads_what_goes_out_and_it_comes_back(chunk: int, ranks: int, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dcp_write, "CHUNK_BYTES", chunk)
    source = saved(tmp_path / "run", model_of(), "bfloat16")
    made = threads.run(ranks, lambda group: dcp_write.export(source, tmp_path / "dcp", group))
    expected = {name.removeprefix("model/"): one for name, one in read(source).items()}
    assert all(one == made[0] for one in made)
    assert (made[0]["tensors"], made[0]["bytes"]) == (len(expected), sum(one.nbytes for one in expected.values()))
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == made[0]["files"] >= len(expected)
    found = load(tmp_path / "dcp", {name: torch.empty_like(one) for name, one in expected.items()})
    assert all(same(found[name], one) for name, one in expected.items())
    check(tmp_path / "dcp", expected, tmp_path / "back.h5")


def test_a_chunk_that_begins_within_a_checksum_block_is_checked_and_right(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(dcp_write, "CHUNK_BYTES", 300_000)
    source = saved(tmp_path / "run", model_of(width=300, mlp_width=500))
    dcp_write.export(source, tmp_path / "dcp", SOLO, "float16")
    expected = {name.removeprefix("model/"): one.half() for name, one in read(source).items()}
    check(tmp_path / "dcp", expected, tmp_path / "back.h5")
    slot = next(slot for slot in read_index(source).slots if slot.name == "model/blocks.1.mlp.up.weight")
    with source.open("r+b") as file:
        file.seek(slot.offset + slot.nbytes - 1)
        file.write(b"\x55")
    with pytest.raises(DamagedError, match=f"{slot.name} is damaged"):
        dcp_write.export(source, tmp_path / "again", SOLO)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back.h5", "dcp", "run"]


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path: Path):
    source = saved(tmp_path / "run", model_of())
    with pytest.raises(CheckpointError, match="is there already, and is not an empty folder"):
        dcp_write.export(source, tmp_path / "run", SOLO)


BEFORE = """
from hpctrain.checkpoint.adopt import adopt
from hpctrain.checkpoint import dcp_write
from hpctrain.comm.group import SoloGroup
group = SoloGroup()
dcp_write.CHUNK_BYTES = 8 << 20
dcp_write.export(folder / "small", folder / "warm", group)
"""
BOTH_WAYS = """
dcp_write.export(folder / "run", folder / "dcp", group)
adopt(folder / "dcp", folder / "back.h5", group)
"""


def test_a_tensor_goes_out_and_comes_in_by_parts_of_it(tmp_path: Path):
    saved(tmp_path / "small", model_of())
    source = saved(tmp_path / "run", model_of(layers=1, width=512, mlp_width=1 << 16))  # two matrices of 128 MiB
    buffers = max(disk.READERS, disk.WRITERS) * disk.CHUNK
    bound = 2 * (parts.STEP_ELEMENTS * 4) + (16 << 20) + buffers  # one part going, one coming
    assert peak(BEFORE, BOTH_WAYS, tmp_path) < bound < source.stat().st_size / 2
