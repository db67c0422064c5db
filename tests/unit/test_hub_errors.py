"""What cannot be exported or imported is told with its mend, by all ranks, and nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.hub import bring, export
from hpctrain.comm.group import SoloGroup
from hpctrain.errors import CheckpointError, ConfigError, HpctrainError, IncompleteError
from tests.support import threads
from tests.support.weights import model_of, read, save, saved

SOLO = SoloGroup()
LLAMA = model_of(family="llama", kv_heads=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder of several files."""
    export(saved(tmp_path / "run", LLAMA), tmp_path / "hf", SOLO, shard_bytes=20_000)
    return tmp_path / "hf"


def shard(folder: Path, tensor: str) -> Path:
    """The file that has a tensor."""
    return folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][tensor]


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Write a file of tensors anew."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def refused(folder: Path, kind: type[HpctrainError] = CheckpointError) -> list[str]:
    """What an import is refused with, which leaves nothing."""
    out = folder.parent / "made" / "back.h5"
    with pytest.raises(kind) as told:
        bring(folder, out, SOLO)
    assert not out.parent.exists() or not any(out.parent.iterdir())
    return str(told.value).split("\n  ")


# ---- what comes in


def test_tensors_that_are_missing_too_many_or_of_another_shape_are_all_named(folder: Path):
    single = folder.parent / "one"
    export(folder.parent / "run", single, SOLO)
    names = {one: f"model.layers.1.{one}" for one in ("mlp.up_proj.weight", "self_attn.k_proj.weight", "extra.weight")}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[names["mlp.up_proj.weight"]]
        tensors[names["self_attn.k_proj.weight"]] = torch.zeros(6, 24)
        tensors[names["extra.weight"]] = torch.zeros(1)

    changed(single / "model.safetensors", change)
    assert refused(single) == [
        f"{single}: 3 tensors are not those of its model",
        "model.layers.1.self_attn.k_proj.weight: [6, 24], where config.json makes it [12, 24]",
        "model.layers.1.mlp.up_proj.weight: missing, it would be [40, 24]",
        "model.layers.1.extra.weight: no part of this model",
        "take the weights and the config.json of one model",
    ]


def test_of_many_faults_the_first_ten_are_told(folder: Path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    told = refused(folder)
    assert told[0] == f"{folder}: 36 tensors are not those of its model"
    assert len(told) == 1 + 10 + 1 + 1 and told[11] == "and 26 more"


def test_a_file_that_the_index_names_must_be_there(folder: Path):
    path = shard(folder, "model.norm.weight")
    count = len(load_file(path))
    path.unlink()
    assert refused(folder) == [
        f"{path} is not there",
        f"model.safetensors.index.json names it for {count} tensors",
        "copy it again from where it is whole",
    ]


def test_a_file_must_have_what_the_index_says(folder: Path):
    path = shard(folder, "model.norm.weight")
    changed(path, lambda tensors: tensors.pop("model.norm.weight"))
    assert refused(folder)[:2] == [
        f"{path} has no model.norm.weight", "model.safetensors.index.json says that it is there"
    ]  # fmt: skip


@pytest.mark.parametrize("length", [0, 5, 100, -10])
def test_a_file_that_was_cut_off_is_incomplete(folder: Path, length: int):
    path = shard(folder, "model.norm.weight")
    os.truncate(path, length % path.stat().st_size)
    what, why, mend = refused(folder, IncompleteError if length else CheckpointError)
    assert str(path) in what and mend == "copy it again from where it is whole"


def test_a_file_of_something_else_is_no_safetensors_file(folder: Path):
    path = shard(folder, "model.norm.weight")
    path.write_bytes((9).to_bytes(8, "little") + b"{not json" + bytes(100))
    assert refused(folder)[0] == f"{path} is no safetensors file"
    path.write_bytes((14).to_bytes(8, "little") + b'{"x": [1,2,3]}' + bytes(100))
    assert refused(folder)[0] == f"{path} is no safetensors file"


def test_an_index_that_is_none_is_refused(folder: Path):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert refused(folder)[0] == f"{folder}/model.safetensors.index.json is no index of tensors"


def test_quantised_numbers_are_refused(folder: Path):
    changed(
        shard(folder, "model.norm.weight"), lambda found: found.update({"model.norm.weight": torch.zeros(24).int()})
    )
    what, why, mend = refused(folder)
    assert what.endswith("model.norm.weight is of dtype I32") and why and "not quantised" in mend


def test_pickled_weights_are_not_read(folder: Path):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    assert refused(folder) == [
        f"{folder} has neither model.safetensors nor model.safetensors.index.json",
        "nothing to import",
    ]
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert refused(folder)[1:] == [
        "its *.bin files are pickles, which may run any code when they are read",
        "load it with transformers and save_pretrained it, which writes safetensors",
    ]


def test_a_folder_without_a_config_or_with_one_that_is_no_json_is_refused(folder: Path):
    (folder / "config.json").write_text("{")
    assert refused(folder)[0] == f"{folder}/config.json is not JSON"
    (folder / "config.json").unlink()
    assert refused(folder)[0] == f"{folder} has no config.json"


def test_an_unknown_architecture_is_refused_before_its_weights_are_looked_at(tmp_path: Path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    assert "experts" in refused(tmp_path / "hf", ConfigError)[1]


@pytest.mark.parametrize("there", ["back.h5", "back.toml"])
def test_nothing_is_written_over(folder: Path, there: str):
    (folder.parent / there).write_text("mine")
    with pytest.raises(CheckpointError, match=f"{there} is there already"):
        bring(folder, folder.parent / "back.h5", SOLO)
    assert (folder.parent / there).read_text() == "mine"


def test_a_checkpoint_has_the_name_of_one(folder: Path):
    with pytest.raises(CheckpointError, match="back does not end in .h5"):
        bring(folder, folder.parent / "back", SOLO)


# ---- what goes out


def test_a_folder_with_files_is_not_filled(folder: Path):
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(CheckpointError) as told:
        export(folder.parent / "run", folder, SOLO)
    assert str(told.value).split("\n  ") == [
        f"{folder} is there already, and is not an empty folder",
        "files of two models in one folder would be taken for one",
        "give another folder, or empty this one",
    ]
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_checkpoint_that_does_not_tell_its_model_is_refused(tmp_path: Path):
    source = save(tmp_path / "run", {"model/embed.tokens": torch.zeros(3, 4)}, {"note": "mine"})
    with pytest.raises(CheckpointError, match="does not say what its model is"):
        export(source, tmp_path / "hf", SOLO)


def test_a_checkpoint_of_another_model_than_it_says_is_refused(tmp_path: Path):
    tensors = read(saved(tmp_path / "run", LLAMA))
    tensors["model/blocks.0.attention.query.bias"] = torch.zeros(24)
    del tensors["model/head.norm.weight"]
    told = read_index(tmp_path / "run/step-00000007.h5").attributes
    with pytest.raises(CheckpointError) as caught:
        export(save(tmp_path / "other", tensors, told), tmp_path / "hf", SOLO)
    assert caught.value.why.split("\n  ") == [
        "model/head.norm.weight: missing, its model makes it [24]",
        "model/blocks.0.attention.query.bias: no part of its model",
    ]
    with pytest.raises(CheckpointError, match="has no model/embed.tokens"):
        export(save(tmp_path / "none", {"model/x": torch.zeros(1)}, told), tmp_path / "hf", SOLO)


def test_a_checkpoint_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(CheckpointError, match="step-1.h5 is not there"):
        export(tmp_path / "step-1.h5", tmp_path / "hf", SOLO)


# ---- what fails on the way


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_folder_that_may_not_be_written_to_is_told(way: str, folder: Path, monkeypatch):
    def refuse(path, *rest, **more):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    act = {
        "out": lambda: export(folder.parent / "run", folder.parent / "made/hf", SOLO),
        "in": lambda: bring(folder, folder.parent / "made/back.h5", SOLO),
    }[way]
    with pytest.raises(CheckpointError) as told:
        act()
    assert str(told.value).split("\n  ")[1:] == [
        f"{folder.parent}/made: Permission denied",
        "look at the folder's name and rights, and whether all ranks see it",
    ]


def test_what_a_killed_run_left_is_removed_and_what_another_is_writing_stays(folder: Path):
    host, top, nobody = socket.gethostname(), folder.parent, 2**22 + 1  # above any process's number
    left, living = top / f".out.{host}.{nobody}.00ab.part", top / f".out.{host}.{os.getpid()}.00ab.part"
    for one in (left, living):
        one.mkdir()
        (one / "model.safetensors").write_bytes(b"")
    half = top / f".back.h5.{host}.{nobody}.00ab.part"
    half.write_bytes(b"")
    export(top / "run", top / "out", SOLO)
    bring(top / "out", top / "back.h5", SOLO)
    assert (left.exists(), living.exists(), half.exists()) == (False, True, False)


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("way", ["out", "in"])
def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    way: str, failing: int, folder: Path, monkeypatch
):
    act = {
        "out": lambda group: export(folder.parent / "run", folder.parent / "made/hf", group),
        "in": lambda group: bring(folder, folder.parent / "made/back.h5", group),
    }[way]
    real, writes = disk.write, []

    def write(path: Path, pieces: list, sync: bool) -> None:
        writes.append(path)
        if len(writes) == 3 + failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, pieces, sync)

    def attempt(group) -> str:
        with pytest.raises(CheckpointError) as told:
            act(group)
        return str(told.value)

    monkeypatch.setattr(disk, "write", write)
    (told,) = set(threads.run(3, attempt))
    assert "No space left on device" in told and told.startswith("rank ")
    assert not any((folder.parent / "made").iterdir())
