"""Damage: a byte that is not what was written is found, by whoever reads it, and the tensor is named."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint import checksums, disk, format
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.format import Slot, read_index
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.state import Entry
from hpctrain.checkpoint.verify import Damage, verify
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, DamagedError, IncompleteError
from hpctrain.plan.layout import ITEMSIZE, Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states, threads
from tests.support.saving import each, resume, save

MESH = Mesh((("dp", 3),))
LAYOUTS = {  # blocks that one rank has whole, that neighbours share, and of which every rank has many short runs
    "model/columns": Layout((300, 701), "float32", (Cut(1, ("dp",)),)),
    "model/copied": Layout((400_000,), "bfloat16"),
    "model/rows": Layout((301, 700), "float32", (Cut(0, ("dp",)),)),
    "model/small": Layout((7,), "float32"),
    "optim/exp_avg/flat": Layout((500, 301), "float64", (), Flat(("dp",), 3, 500 * 301 + 10)),
    "optim/none": Layout((0, 3), "float32"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("whole"), LAYOUTS, MESH)


def flipped(path: Path, at: int, bit: int = 0) -> None:
    """Change one bit of one byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def place(path: Path, name: str, byte: int) -> int:
    """Where a tensor's byte lies in the file."""
    return next(slot.offset for slot in read_index(path).slots if slot.name == name) + byte


def checked(path: Path, ranks: int = 1) -> list[Damage]:
    """What is found damaged, by so many ranks: each gets the same answer."""
    index = read_index(path)
    found = threads.run(ranks, lambda group: verify(path, index, group))
    assert all(one == found[0] for one in found)
    return found[0]


def test_every_block_has_the_checksum_of_its_bytes_however_it_was_written(whole: Path):
    raw, index = whole.read_bytes(), read_index(whole)
    with h5py.File(whole, locking=False) as file:
        table, kind = file["checksums"][...].tolist(), dict(file["checksums"].attrs)
    assert kind == {"algorithm": "xxh3_64", "block_bytes": BLOCK_BYTES}
    wanted = {
        slot.first + number: xxhash.xxh3_64_intdigest(raw[slot.offset :][: slot.nbytes][start:][:BLOCK_BYTES])
        for slot in index.slots
        for number, start in enumerate(range(0, slot.nbytes, BLOCK_BYTES))
    }
    assert table == [wanted[number] for number in range(len(wanted))]
    assert checked(whole) == checked(whole, 3) == []


@settings(max_examples=40)
@given(st.data())
def test_any_byte_that_changes_is_found_by_verify_and_by_load_and_its_tensor_is_named(whole: Path, data: st.DataObject):
    slots = [slot for slot in read_index(whole).slots if slot.nbytes]
    slot = data.draw(st.sampled_from(slots))
    byte = data.draw(st.integers(0, slot.nbytes - 1))
    flipped(whole, slot.offset + byte, bit := data.draw(st.integers(0, 7)))
    try:
        (damage,) = checked(whole, data.draw(st.integers(1, 3)))
        assert damage.tensor == slot.name and damage.first_byte <= byte < damage.end_byte
        assert damage.offset == slot.offset + damage.first_byte
        assert damage.end_byte - damage.first_byte <= BLOCK_BYTES
        ranks = data.draw(st.integers(1, 4))
        with pytest.raises(IncompleteError, match="has 1 checkpoints and none of them is whole"):
            resume(whole.parent, LAYOUTS, Mesh((("dp", ranks),)))
    finally:
        flipped(whole, slot.offset + byte, bit)
    assert resume(whole.parent, LAYOUTS, MESH) == 1


def test_the_load_names_the_tensor_and_its_bytes(whole: Path, tmp_path: Path, caplog):
    path = Path(shutil.copy(whole, tmp_path))
    at = place(path, "model/rows", BLOCK_BYTES + 5)
    flipped(path, at)
    with pytest.raises(IncompleteError):
        resume(tmp_path, LAYOUTS, Mesh((("dp", 1),)))
    assert (
        f"skipped: {path}: model/rows is damaged in its bytes {BLOCK_BYTES} to {2 * BLOCK_BYTES - 1}; "
        f"they are bytes {at - 5} to {at - 6 + BLOCK_BYTES} of the file, and do not have their checksum; "
        "go on from an older checkpoint, or copy it again from where it is whole"
    ) in caplog.text


def test_neighbouring_damage_is_one_range_told_in_bytes_and_elements(whole: Path, tmp_path: Path):
    path = Path(shutil.copy(whole, tmp_path))
    name, start = "optim/exp_avg/flat", place(path, "optim/exp_avg/flat", 0)
    for block in (1, 2, 4):
        flipped(path, start + block * BLOCK_BYTES + 1)
    size = 500 * 301 * 8
    assert checked(path) == [
        Damage(name, BLOCK_BYTES, 3 * BLOCK_BYTES, BLOCK_BYTES // 8, 3 * BLOCK_BYTES // 8, start + BLOCK_BYTES),
        Damage(name, 4 * BLOCK_BYTES, size, BLOCK_BYTES // 2, size // 8, start + 4 * BLOCK_BYTES),
    ]


def test_a_damaged_newest_checkpoint_is_passed_over_for_an_older_one(tmp_path: Path):
    for step in (1, 2, 3):
        path = save(tmp_path, LAYOUTS, MESH, step, keep=3)
    flipped(path, place(path, "model/copied", 700_000))
    flipped(tmp_path / "step-00000002.h5", place(path, "model/columns", 0))
    assert resume(tmp_path, LAYOUTS, MESH) == 1
    save(tmp_path, LAYOUTS, MESH, 2)
    assert resume(tmp_path, LAYOUTS, Mesh((("dp", 2),))) == 2


def test_without_verify_what_is_there_is_loaded(whole: Path, tmp_path: Path):
    path = Path(shutil.copy(whole, tmp_path))
    flipped(path, place(path, "model/small", 2))

    def act(point: Checkpoint, rank: int) -> list[str]:
        state = states.blank(LAYOUTS, MESH, rank)
        assert point.resume(state) == 1
        return states.wrong(state, MESH, rank, 1)

    assert each(tmp_path, MESH, act, {"verify": False}) == [["model/small"]] * 3


def test_the_seal_is_made_as_the_reference_page_says(tmp_path: Path):
    layouts = LAYOUTS | {"optim/scale": Layout((), "float32")}
    with h5py.File(save(tmp_path, layouts, MESH), locking=False) as file:
        lines = [f"{file.attrs['step']}", file.attrs["attributes"]]
        for name in sorted(layouts):
            dims = ", ".join(map(str, file[name].shape))
            lines.append(f"{name} {file[name].attrs['dtype']} [{dims}] {file[name].attrs['first_checksum']}")
        told = "\n".join(lines).encode() + file["checksums"][...].astype("<u8").tobytes()
        assert file.attrs["seal"] == xxhash.xxh3_64_intdigest(told)


def test_a_read_that_fails_is_no_damage(whole: Path, monkeypatch):
    def fail(*rest):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(format, "_seal", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_index(whole)


@pytest.mark.parametrize("name", ["step", "attributes", "seal"])
def test_what_the_file_says_about_itself_is_sealed(whole: Path, tmp_path: Path, name: str):
    path = Path(shutil.copy(whole, tmp_path))
    with h5py.File(path, "r+") as file:
        file.attrs[name] = "{}  " if name == "attributes" else file.attrs[name] + 1
    with pytest.raises(DamagedError) as caught:
        read_index(path)
    assert str(caught.value) == (
        f"{path} is damaged\n  what it says about itself does not fit its seal\n"
        "  go on from an older checkpoint, or copy it again from where it is whole"
    )


@pytest.mark.parametrize("change", ["name", "dtype", "table"])
def test_names_dtypes_and_checksums_are_sealed(whole: Path, tmp_path: Path, change: str):
    path = Path(shutil.copy(whole, tmp_path))
    with h5py.File(path, "r+") as file:
        if change == "name":
            file.move("model/small", "model/smelt")
        elif change == "dtype":
            del file["model/rows"].attrs["dtype"]
            file["model/rows"].attrs["dtype"] = "int32"
        else:
            file["checksums"][3] += 1
    with pytest.raises(DamagedError, match="does not fit its seal"):
        read_index(path)


@pytest.mark.parametrize("mark", [b"TREE", b"HEAP", b"SNOD"])
def test_damage_to_the_structures_of_hdf5_is_told_as_damage(whole: Path, tmp_path: Path, mark: bytes):
    path = Path(shutil.copy(whole, tmp_path))
    flipped(path, path.read_bytes().index(mark))
    with pytest.raises(DamagedError, match=rf"{path} is damaged\n  HDF5: "):
        read_index(path)


def test_a_file_of_the_first_version_loads_and_has_nothing_to_verify(tmp_path: Path):
    path = save(tmp_path, LAYOUTS, MESH)
    with h5py.File(path, "r+") as file:
        del file["checksums"]
        del file.attrs["seal"]
        file.attrs["version"] = 1
        for slot in read_slots(file):
            del slot.attrs["first_checksum"]
    assert resume(tmp_path, LAYOUTS, Mesh((("dp", 2),))) == 1
    with pytest.raises(CheckpointError, match="has no checksums\n  the release that wrote it made none"):
        verify(path, read_index(path), SoloGroup())


def read_slots(file: h5py.File) -> list[h5py.Dataset]:
    found: list[h5py.Dataset] = []
    file.visititems(lambda _, item: found.append(item) if isinstance(item, h5py.Dataset) else None)
    return found


@pytest.mark.parametrize("name", ["model/rows", "optim/exp_avg/flat"])
def test_bytes_of_a_shared_block_that_never_came_into_the_file_end_the_save(tmp_path: Path, monkeypatch, name: str):
    """Of a block that ranks share, each reads the others' part: a rank whose write was lost sees another digest."""
    real = disk.write

    def forgets(path: Path, pieces, *rest) -> None:
        found = [piece for piece in pieces if not piece.memory.numel() or piece.at != lost[path]]
        real(path, found, *rest)

    lost: dict[Path, int] = {}
    began = format.lay_out

    def remember(path: Path, *rest):
        placed = began(path, *rest)
        slot = next(slot for slot in placed if slot.name == name)
        lost[path] = slot.offset
        return placed

    monkeypatch.setattr(format, "lay_out", remember)
    monkeypatch.setattr(disk, "write", forgets)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, {name: LAYOUTS[name]} | {"model/small": LAYOUTS["model/small"]}, MESH)
    told = rf"{name} does not have the bytes that were written\n  ranks that wrote parts of block \d+ read each other's"
    assert re.search(told, str(caught.value))
    assert os.listdir(tmp_path) == []


@given(st.integers(0, 3 * BLOCK_BYTES), st.lists(st.integers(1, BLOCK_BYTES), max_size=8), st.integers(0, 2))
def test_a_split_into_whole_and_torn_blocks_has_every_byte_once(start: int, lengths: list[int], gap: int):
    slot = Slot("model/a", (4 * BLOCK_BYTES + 1000,), "uint8", 4096)
    pieces, at = [], start
    for length in lengths:
        stop = min(at + length, slot.nbytes)
        if at < stop:
            pieces.append(disk.Piece(slot.offset + at, torch.empty(stop - at, dtype=torch.uint8)))
        at = stop + gap
    seen = np.zeros(slot.nbytes, int)
    spans, torn = checksums.split(slot, pieces)
    for span in spans:
        begin = span.first * BLOCK_BYTES
        seen[begin : begin + span.memory.numel()] += 1
    for block in torn:
        assert block.at == slot.offset + block.number * BLOCK_BYTES
        for piece in block.pieces:
            assert block.at <= piece.at and piece.end <= block.at + block.length
            seen[piece.at - slot.offset : piece.end - slot.offset] += 1
    wanted = np.zeros(slot.nbytes, int)
    for piece in pieces:
        wanted[piece.at - slot.offset : piece.end - slot.offset] = 1
    assert np.array_equal(seen, wanted)


def test_ranks_that_hold_nothing_take_part(tmp_path: Path):
    def act(group: Group) -> str:
        point = Checkpoint(CheckpointConfig(sync=False), tmp_path, Mesh((("dp", 3),)), group)
        state = states.filled({"model/a": Layout((700_000,), "float32")}, MESH, group.rank) if group.rank == 1 else {}
        return point.save(1, state, {}).name

    assert threads.run(3, act) == ["step-00000001.h5"] * 3
    assert checked(tmp_path / "step-00000001.h5") == []


# ---- every byte of a small file --------------------------------------------------------------------------------------

SMALL = {
    "model/a": Layout((20, 3), "float32", (Cut(0, ("dp",)),)),
    "model/b": Layout((7,), "bfloat16"),
    "optim/step": Layout((), "int64"),
}
ALONE = Mesh((("dp", 1),))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("small"), SMALL, MESH)


def content(path: Path) -> tuple:
    """All that a file tells, read with its checksums."""
    index, state = read_index(path), states.blank(SMALL, ALONE, 0)
    load(path, index, [Entry(name, layout, ALONE, 0, (0,)) for name, layout in SMALL.items()], state, SoloGroup())
    return index.step, index.attributes, [states.bits(held.tensor) for held in state.values()]


def test_each_single_byte_of_the_tensors_that_changes_is_found(small: Path, tmp_path: Path):
    raw, index = small.read_bytes(), read_index(small)
    for slot in index.slots:
        for byte in range(slot.nbytes):
            path = tmp_path / f"{slot.offset + byte}.h5"  # HDF5 may remember a name
            path.write_bytes(raw)
            flipped(path, slot.offset + byte, byte % 8)
            assert verify(path, read_index(path), SoloGroup()) == [
                Damage(slot.name, 0, slot.nbytes, 0, slot.nbytes // ITEMSIZE[slot.dtype], slot.offset)
            ]
            with pytest.raises(DamagedError, match=f"{slot.name} is damaged"):
                content(path)
            path.unlink()


@settings(max_examples=200)
@given(st.data())
def test_a_byte_that_changes_anywhere_else_is_found_or_changes_nothing(small: Path, data: st.DataObject):
    raw, name = small.read_bytes(), f"{data.draw(st.uuids())}.h5"
    at, bit = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(0, 7))
    path = small.with_name(name)
    path.write_bytes(raw)
    flipped(path, at, bit)
    try:
        assert content(path) == content(small)
    except CheckpointError as error:
        assert str(path) in str(error)
    finally:
        path.unlink()
