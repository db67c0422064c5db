"""``hpctrain ckpt inspect`` shows what is inside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hpctrain.checkpoint import inspect
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.format import Slot, read_index
from hpctrain.checkpoint.state import Held
from hpctrain.cli.ckpt import app
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, DamagedError
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh

NAME = "model/blocks.0.attention.a_name_that_no_terminal_shows_in_one_line_beside_all_the_other_columns.weight"
TENSORS = {
    NAME: torch.tensor([[1.0, 2.0], [3.0, float("nan")], [0.0, 0.0]]),
    "model/norm": torch.full((300_000,), 0.5, dtype=torch.bfloat16),
    "optim/exp_avg/none": torch.zeros(0, 3),
    "optim/exp_avg/phase": torch.tensor([3 + 4j, 0j], dtype=torch.complex64),
    "optim/flag": torch.tensor(True),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    state = {name: Held(Layout(tuple(t.shape), str(t.dtype)[6:]), t) for name, t in TENSORS.items()}
    point = Checkpoint(CheckpointConfig(sync=False), tmp_path, Mesh(()), SoloGroup())
    return point.save(12, state, {"run": "[tiny]", "plan": {"long": "x" * 500}})


def told(*words: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_it_lists_every_tensor_with_its_whole_name_and_the_total(file: Path):
    lines = told(file).splitlines()
    assert lines[0] == f"{file}: step 12, 5 tensors, 586.0 KiB"
    assert lines[1].startswith('  plan: {"long": "xxx') and len(lines[1]) < 120
    assert lines[2] == '  run: "[tiny]"'
    rows = {line.split()[0]: line.split()[1:] for line in lines[3:] if line.strip()}
    assert rows[NAME] == ["float32", "3", "x", "2", "24", "B"]
    assert rows["model/norm"] == ["bfloat16", "300000", "585.9", "KiB"]
    assert rows["optim/flag"] == ["bool", "scalar", "1", "B"]


def test_of_a_folder_it_takes_the_newest(file: Path):
    assert told(file.parent) == told(file)


def test_of_a_run_it_takes_the_newest_of_its_checkpoints(file: Path, tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    moved = file.rename(tmp_path / "checkpoints" / file.name)
    assert told(tmp_path) == told(moved)


def test_json_has_everything(file: Path):
    report = json.loads(told(file, "--json", "--tensor", "model/*", "--stats"))
    assert report["step"] == 12
    assert report["attributes"]["plan"] == {"long": "x" * 500}
    first, second = report["tensors"]
    assert first["name"] == NAME
    assert (first["least"], first["greatest"], first["mean"]) == (0.0, 3.0, 1.2)
    assert (first["zeros"], first["not_finite"], first["bytes"], first["shape"]) == (2, 1, 24, [3, 2])
    assert (second["mean"], second["std"], second["dtype"]) == (0.5, 0.0, "bfloat16")


def test_stats_are_those_of_torch_however_many_parts_are_read(file: Path, monkeypatch):
    monkeypatch.setattr(inspect, "READ_BYTES", 1000)
    slots = {slot.name: slot for slot in read_index(file).slots}
    assert inspect.stats(file, slots["model/norm"]) == inspect.Stats(0.5, 0.5, 0.5, 0.0, 0, 0)
    assert inspect.stats(file, slots["optim/exp_avg/none"]) == inspect.Stats(None, None, None, None, 0, 0)
    assert inspect.stats(file, slots["optim/exp_avg/phase"]) == inspect.Stats(0.0, 5.0, 2.5, 2.5, 1, 0)
    assert inspect.stats(file, slots["optim/flag"]) == inspect.Stats(1.0, 1.0, 1.0, 0.0, 0, 0)


def test_numbers_spread_as_torch_says(tmp_path: Path):
    numbers = torch.randn(10_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    path = tmp_path / "raw"
    path.write_bytes(numbers.numpy().tobytes())
    found = inspect.stats(path, Slot("raw", (10_000,), "float64", 0))
    assert found.mean == pytest.approx(float(numbers.mean()), abs=1e-12)
    assert found.std == pytest.approx(float(numbers.std(correction=0)), abs=1e-12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.h5"], "nowhere.h5 is not there\n  give a checkpoint file, or the folder that has them"),
        (["."], r"\. has no checkpoint\n  its files would be named step-00000100.h5"),
    ],
)
def test_what_is_not_there_is_told(tmp_path: Path, monkeypatch, words: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        told(*words)


def test_a_tensor_that_is_not_there_is_told(file: Path):
    with pytest.raises(CheckpointError, match="has no tensor model/norn\n  run it without --tensor to see the names"):
        told(file, "--tensor", "model/norn")


def test_the_stats_of_a_damaged_tensor_are_not_told(file: Path):
    slot = next(slot for slot in read_index(file).slots if slot.name == "model/norm")
    with file.open("r+b") as raw:
        raw.seek(slot.offset + 500_000)
        raw.write(b"\xff")
    with pytest.raises(DamagedError, match=f"{file}: model/norm is damaged in its bytes 262144 to 524287"):
        told(file, "--stats")
    assert "model/norm" in told(file)
    assert json.loads(told(file, "--stats", "--tensor", "optim/*", "--json"))["tensors"][0]["zeros"] == 0
