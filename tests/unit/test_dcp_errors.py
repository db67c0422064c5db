"""Folders of DCP that cannot be read, or that would run something, are refused, and nothing is run or left behind."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint.adopt import adopt
from hpctrain.comm.group import SoloGroup
from hpctrain.errors import CheckpointError, IncompleteError, UsageError
from tests.support.dcp import save
from tests.support.weights import read

SOLO = SoloGroup()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "dcp", {"a": torch.randn(5, 4), "b": torch.randn(3)})
    return tmp_path / "dcp"


def refused(folder: Path, kind: type[CheckpointError] = CheckpointError) -> list[str]:
    """What an import is refused with, which leaves nothing."""
    with pytest.raises(kind) as told:
        adopt(folder, folder.parent / "made" / "back.h5", SOLO)
    assert not list(folder.parent.glob("made/*"))
    return str(told.value).split("\n  ")


class Told:
    def __init__(self, *wanted: Any) -> None:
        self.wanted = wanted

    def __reduce__(self) -> Any:
        return self.wanted


def test_metadata_that_would_run_something_is_refused_and_runs_nothing(folder: Path, tmp_path: Path):
    mark = tmp_path / "mark"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Told(os.system, (f"touch {mark}",))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert refused(folder)[0] == f"{folder}/.metadata names {os.system.__module__}.system"
    assert not mark.exists()


def test_an_item_that_would_run_something_is_refused_and_runs_nothing(folder: Path, tmp_path: Path):
    mark = tmp_path / "mark"
    evil = pickle.dumps(Told(os.system, (f"touch {mark}",)), 2)
    replaced(folder, "a", lambda members: members | {"archive/data.pkl": evil})
    assert refused(folder)[0].endswith(f"a at byte 0 names {os.system.__module__}.system")
    assert not mark.exists()


def replaced(folder: Path, name: str, change: Any, how: int = zipfile.ZIP_STORED) -> None:
    """Put another zip in the place of an item, at the end of its file."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = (index for index in metadata.storage_data if index.fqn == name)
    place = metadata.storage_data[index]
    data = (folder / place.relative_path).read_bytes()
    (folder / "item.zip").write_bytes(data[place.offset : place.offset + place.length])
    with zipfile.ZipFile(folder / "item.zip") as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    with zipfile.ZipFile(folder / "item.zip", "w", how) as archive:
        for member, text in change(members).items():
            archive.writestr(member, text)
    place.relative_path, place.offset, place.length = "item.zip", 0, (folder / "item.zip").stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("change", "how", "why"),
    [
        (lambda m: m, zipfile.ZIP_DEFLATED, "is compressed"),
        (lambda m: m | {"archive/byteorder": b"big"}, zipfile.ZIP_STORED, "its numbers are big-endian"),
        (lambda m: m | {"archive/data/0": m["archive/data/0"][:-1]}, zipfile.ZIP_STORED, "goes beyond the 79 bytes"),
        (lambda m: {n: t for n, t in m.items() if "data/0" not in n}, zipfile.ZIP_STORED, "data/0"),
        (
            lambda m: m | {"archive/data.pkl": pickle.dumps([1])},
            zipfile.ZIP_STORED,
            "something else than a plain tensor",
        ),
        (lambda m: m | {"archive/data.pkl": b" " * (1 << 21)}, zipfile.ZIP_STORED, "data.pkl is too long"),
    ],
)
def test_an_item_that_is_not_what_torch_saves_is_refused_with_its_reason(change: Any, how: int, why: str, folder: Path):
    replaced(folder, "a", change, how)
    told = refused(folder)
    assert told[0] == f"{folder}/item.zip, a at byte 0 cannot be read" and why in told[1]


def changed(folder: Path, change: Any) -> None:
    """Write the metadata anew."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_a_file_that_was_cut_off_or_is_lacking_is_told_before_anything_is_written(folder: Path):
    file = folder / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert refused(folder, IncompleteError)[:2] == [
        f"{file} is incomplete",
        f".metadata wants {len(data)} bytes, not {len(data) - 1}",
    ]
    file.unlink()
    assert refused(folder, IncompleteError)[:2] == [f"{file} is not there", ".metadata names it"]


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_metadata_that_was_cut_off_is_refused(length: int, folder: Path):
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data[:length])
    assert refused(folder)[0] == f"{folder}/.metadata cannot be read"


def test_a_pickle_of_something_else_is_no_metadata(folder: Path):
    (folder / ".metadata").write_bytes(pickle.dumps({"a": [1]}))
    assert refused(folder)[0] == f"{folder}/.metadata is no metadata of a checkpoint"


def test_a_tensor_with_holes_is_refused(folder: Path):
    def cut(metadata: Any) -> None:
        metadata.state_dict_metadata["a"].size = torch.Size((6, 4))

    changed(folder, cut)
    assert refused(folder) == [
        f"a is not whole in {folder}",
        "its chunks do not have each of its elements once",
        "save it anew, by all ranks that hold parts of it",
    ]


def test_an_item_of_another_shape_than_the_metadata_says_is_refused(folder: Path):
    def turn(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["a"]
        entry.size = entry.chunks[0].sizes = torch.Size((4, 5))

    changed(folder, turn)
    told = refused(folder)
    assert told[0].endswith("__0_0.distcp: a is float32 [5, 4] at byte 0")
    assert told[1] == ".metadata says float32 [4, 5]"


def test_items_that_went_through_an_extension_are_refused(folder: Path):
    def press(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["zstd"]

    changed(folder, press)
    assert refused(folder)[0] == "a was written through zstd"


def test_a_dtype_that_no_checkpoint_has_is_refused_and_can_be_left_out(tmp_path: Path):
    save(tmp_path / "dcp", {"a": torch.ones(2, dtype=torch.int16), "b": torch.ones(2)})
    told = refused(tmp_path / "dcp")
    assert told[0] == "a is of dtype int16" and told[2] == "leave it out with --only, which names what is to be taken"
    adopt(tmp_path / "dcp", tmp_path / "back.h5", SOLO, only=("b",))
    assert list(read(tmp_path / "back.h5")) == ["model/b"]


def test_only_the_folder_itself_is_read(folder: Path):
    (folder.parent / "__0_0.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    (folder / "__0_0.distcp").unlink()

    def lead_out(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = "../__0_0.distcp"

    changed(folder, lead_out)
    assert refused(folder, IncompleteError)[0] == f"{folder}/__0_0.distcp is not there"


def test_patterns_that_fit_nothing_and_names_for_two_are_wrong_use(tmp_path: Path):
    save(tmp_path / "dcp", {"a": torch.ones(1), "b": torch.ones(1)})

    def told(**how: Any) -> list[str]:
        with pytest.raises(UsageError) as error:
            adopt(tmp_path / "dcp", tmp_path / "back.h5", SOLO, **how)
        return str(error.value).split("\n  ")

    there = ["there are a, b", "give a name there, or a shell pattern of names"]
    assert told(only=("c*",)) == [f"--only 'c*' fits no tensor of {tmp_path}/dcp", *there]
    assert told(rename={"c": "d"}) == [f"--rename 'c' fits no tensor of {tmp_path}/dcp", *there]
    assert told(rename={"a": "b"}) == ["--rename makes a and b one tensor", "give each a name of its own"]
    assert [path.name for path in tmp_path.iterdir()] == ["dcp"]
