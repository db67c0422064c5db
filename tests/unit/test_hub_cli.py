"""``hpctrain ckpt export`` and ``import`` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hpctrain.cli.ckpt import app
from hpctrain.cli.hub import _size
from hpctrain.config import load
from hpctrain.errors import UsageError
from tests.support.weights import model_of, saved


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return saved(tmp_path / "run", model_of(family="qwen3", head_dim=10), step=5)


def told(*words: object) -> Result:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_a_checkpoint_goes_out_and_comes_in_and_each_time_it_is_said_what_was_made(source: Path, tmp_path: Path):
    out = told("export", source, tmp_path / "hf", "--shard-size", "20KB")
    count = len(list((tmp_path / "hf").glob("*.safetensors")))
    assert out.stdout.startswith(f"{tmp_path}/hf: {count} files of Qwen3ForCausalLM; 25 tensors, ")
    assert out.stderr.splitlines()[-1].startswith("export 100% of 0.1 MiB")
    back = told("import", tmp_path / "hf", tmp_path / "back.h5", "--sequence", "8", "--dtype", "bfloat16")
    assert f"{tmp_path}/back.h5: a model of the family qwen3, as {tmp_path}/back.toml tells; 25 tensors" in back.stdout
    assert back.stderr.splitlines()[-1].startswith("import 100%")
    assert load(tmp_path / "back.toml").model.sequence == 8


def test_for_programs_it_is_json(source: Path, tmp_path: Path):
    made = json.loads(told("export", source.parent, tmp_path / "hf", "--json").stdout)
    assert made["from"] == str(source) and made["step"] == 5 and made["files"] == ["model.safetensors"]
    back = json.loads(told("import", tmp_path / "hf", tmp_path / "back.h5", "--json").stdout)
    assert (back["family"], back["tensors"], back["bytes"]) == ("qwen3", made["tensors"], made["bytes"])


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("2 GiB", 2 << 30), ("1.5GB", 1_500_000_000), ("500mb", 500_000_000), ("7B", 7)]
)
def test_a_size_is_bytes_or_has_a_unit(text: str, size: int):
    assert _size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "5 XB", "GB"])
def test_what_is_no_size_is_wrong_use(text: str, source: Path, tmp_path: Path):
    with pytest.raises(UsageError) as error:
        told("export", source, tmp_path / "hf", f"--shard-size={text}")
    assert str(error.value) == f"--shard-size {text} is no size\n  give bytes, or a unit as in 500MB or 2GiB"
    assert not (tmp_path / "hf").exists()


def test_a_checkpoint_goes_out_as_torch_dcp_and_its_folder_is_known_when_it_comes_in(source: Path, tmp_path: Path):
    out = told("export", source, tmp_path / "dcp", "--to", "dcp", "--dtype", "bfloat16")
    assert out.stdout.startswith(f"{tmp_path}/dcp: 25 files of torch DCP; 25 tensors, ")
    assert out.stderr.splitlines()[-1].startswith("export 100%")
    some = ("--only", "blocks.*", "--rename", "blocks.*=layers.*")
    back = told("import", tmp_path / "dcp", tmp_path / "back.h5", *some)
    assert back.stdout.startswith(f"{tmp_path}/back.h5: taken as they are; 22 tensors, ")
    assert back.stderr.splitlines()[-1].startswith("import 100%")
    inside = json.loads(told("inspect", tmp_path / "back.h5", "--json").stdout)
    assert {row["dtype"] for row in inside["tensors"]} == {"bfloat16"}
    assert all(row["name"].startswith("model/layers.") for row in inside["tensors"])
    assert not (tmp_path / "back.toml").exists()


@pytest.mark.parametrize("text", ["a", "=b", "a="])
def test_what_is_no_pair_of_names_is_wrong_use(text: str, tmp_path: Path):
    with pytest.raises(UsageError) as error:
        told("import", tmp_path, tmp_path / "back.h5", "--rename", text)
    what = f"--rename {text} is no pair of names\n  give the name there and the name here: app.*=*"
    assert str(error.value) == what


def test_tensors_that_are_taken_as_they_are_have_no_length_of_a_sample(source: Path, tmp_path: Path):
    told("export", source, tmp_path / "dcp", "--to", "dcp")
    with pytest.raises(UsageError) as error:
        told("import", tmp_path / "dcp", tmp_path / "back.h5", "--sequence", "8")
    assert str(error.value) == (
        f"--sequence 8, and {tmp_path}/dcp has no config.json\n"
        "  tensors that are taken as they are make no [model]\n  leave it out"
    )
