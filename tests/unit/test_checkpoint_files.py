"""``hpctrain ckpt verify``, ``diff`` and ``convert``: whole files, by one rank or several."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from hpctrain.checkpoint import format, parts
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.convert import convert
from hpctrain.checkpoint.diff import Difference, diff
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.state import Held, dtype_name
from hpctrain.checkpoint.verify import verify
from hpctrain.cli.ckpt import app
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, DamagedError
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from tests.support import threads

GENERATOR = torch.Generator().manual_seed(3)
TENSORS = {
    "model/large": torch.randn(1000, 701, generator=GENERATOR),
    "model/mask": torch.tensor([True, False, True]),
    "model/norm": torch.randn(33, generator=GENERATOR).bfloat16(),
    "model/scalar": torch.tensor(2.5),
    "optim/exp_avg/large": torch.randn(1000, 701, generator=GENERATOR),
    "optim/exp_avg/none": torch.zeros(0, 3),
}


def saved(folder: Path, tensors: dict[str, torch.Tensor] = TENSORS, step: int = 4) -> Path:
    """A checkpoint of whole tensors, made by one rank."""
    state = {name: Held(Layout(tuple(t.shape), dtype_name(t)), t) for name, t in tensors.items()}
    point = Checkpoint(CheckpointConfig(sync=False), folder, Mesh(()), SoloGroup())
    return point.save(step, state, {"run": "tiny"})


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file, checked."""
    index = read_index(path)
    assert verify(path, index, SoloGroup()) == []
    found = {slot.name: torch.empty(slot.shape, dtype=getattr(torch, slot.dtype)) for slot in index.slots}
    for batch in parts.mine(index.slots, SoloGroup()):
        for part, memory in zip(batch, parts.read(path, batch, index.table), strict=True):
            found[part.slot.name].view(-1)[part.start : part.stop] = memory
    return found


def damaged(path: Path, name: str, byte: int) -> Path:
    """The file, with a byte of a tensor changed."""
    at = next(slot.offset for slot in read_index(path).slots if slot.name == name) + byte
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    return path


def told(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)


@pytest.fixture(params=[parts.STEP_ELEMENTS, BLOCK_BYTES], ids=["whole", "in steps"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much of a file is worked on at once."""
    monkeypatch.setattr(parts, "STEP_ELEMENTS", request.param)


# ---- verify ----------------------------------------------------------------------------------------------------------


def test_verify_says_that_a_whole_file_is_whole(tmp_path: Path):
    path = saved(tmp_path)
    result = told("verify", tmp_path)
    assert result.exit_code == 0
    size = f"{2 * 701_000 * 4 + 3 + 33 * 2 + 4:,}"
    assert result.stdout == f"{path}: step 4, 6 tensors, {size} bytes: every byte is as it was written\n"


def test_verify_names_the_tensor_and_its_damaged_bytes_and_exits_with_1(tmp_path: Path):
    path = damaged(saved(tmp_path), "model/large", 2 * BLOCK_BYTES + 9)
    offset = next(slot.offset for slot in read_index(path).slots if slot.name == "model/large")
    result = told("verify", path)
    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert first == (
        f"model/large: damaged in bytes {2 * BLOCK_BYTES} to {3 * BLOCK_BYTES - 1}, elements {BLOCK_BYTES // 2} to"
        f" {BLOCK_BYTES * 3 // 4 - 1}, at byte {offset + 2 * BLOCK_BYTES} of the file"
    )
    assert second.endswith("1 damaged ranges")
    report = json.loads(told("verify", path, "--json").stdout)
    assert (report["whole"], report["damages"][0]["tensor"]) == (False, "model/large")


# ---- diff ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
def test_diff_finds_what_is_missing_what_has_another_kind_and_what_has_other_values(
    tmp_path: Path, steps: None, ranks: int
):
    changed = TENSORS["model/large"].clone()
    changed[999, 700] += 2
    changed[0, 0] -= 1
    changed[1, 1] = float("nan")
    others = {
        "model/large": changed,
        "model/mask": TENSORS["model/mask"],
        "model/norm": TENSORS["model/norm"].float(),
        "model/scalar": torch.tensor([2.5]),
        "optim/exp_avg/other": torch.zeros(3),
        "optim/exp_avg/none": TENSORS["optim/exp_avg/none"],
    }
    one, other = saved(tmp_path / "one"), saved(tmp_path / "other", others)
    sides = (one, read_index(one)), (other, read_index(other))
    large, again, *more = threads.run(ranks, lambda group: diff(*sides, group)) * 2
    assert large == again
    assert [difference.name for difference in large] == [
        "model/large", "model/norm", "model/scalar", "optim/exp_avg/large", "optim/exp_avg/other",
    ]  # fmt: skip
    assert large[0] == Difference("model/large", *["float32 [1000, 701]"] * 2, 3, 701_000, pytest.approx(2, abs=1e-6))
    assert large[1] == Difference("model/norm", "bfloat16 [33]", "float32 [33]", 0, 33, None)
    assert large[2] == Difference("model/scalar", "float32 []", "float32 [1]")
    assert large[3:] == [
        Difference("optim/exp_avg/large", "float32 [1000, 701]", None),
        Difference("optim/exp_avg/other", None, "float32 [3]"),
    ]


def test_diff_tells_it_in_lines_and_exits_with_1_and_with_0_where_nothing_differs(tmp_path: Path):
    one = saved(tmp_path / "one")
    other = saved(tmp_path / "other", TENSORS | {"model/scalar": torch.tensor(2.0), "model/mask": torch.ones(3)}, 5)
    result = told("diff", one, other)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "model/mask: bool [3] and float32 [3]; 1 of 3 elements differ, by at most 1",
        "model/scalar: 1 of 1 elements differ, by at most 0.5",
        f"{one} (step 4), {other} (step 5): 2 tensors differ",
    ]
    assert told("diff", one, other, "--tensor", "optim/*").exit_code == 0
    report = json.loads(told("diff", one, other.parent, "--json", "--tensor", "model/s*").stdout)
    assert [difference["largest"] for difference in report["differences"]] == [0.5]
    with pytest.raises(CheckpointError, match="neither file has a tensor model/x"):
        told("diff", one, other, "--tensor", "model/x")


def test_equal_numbers_that_are_not_numbers_are_equal(tmp_path: Path):
    tensors = {"model/a": torch.tensor([float("nan"), float("inf"), 0.0])}
    one, other = saved(tmp_path / "one", tensors), saved(tmp_path / "other", tensors)
    assert told("diff", one, other).exit_code == 0


# ---- convert ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
def test_convert_gives_the_weights_in_another_dtype_on_any_number_of_ranks(
    tmp_path: Path, steps: None, ranks: int, dtype: str
):
    path, out = saved(tmp_path), tmp_path / "out" / "weights.h5"
    index, kind = read_index(path), {"bf16": torch.bfloat16, "fp64": torch.float64}[dtype]
    made = threads.run(ranks, lambda group: convert(path, index, out, group, dtype, True))
    found = tensors_of(out)
    assert made[-1].tensors == len(found) == 4 and made[-1].overflowed == 0
    assert torch.equal(found["model/large"], TENSORS["model/large"].to(kind))
    assert torch.equal(found["model/norm"], TENSORS["model/norm"].to(kind))
    assert torch.equal(found["model/mask"], TENSORS["model/mask"])
    assert (read_index(out).step, read_index(out).attributes) == (4, {"run": "tiny"})
    assert os.listdir(out.parent) == ["weights.h5"]


def test_convert_without_a_choice_copies_bit_for_bit_and_moments_keep_their_dtype(tmp_path: Path):
    path = saved(tmp_path)
    assert told("convert", path, tmp_path / "same.h5").stdout.startswith(f"made {tmp_path}/same.h5: step 4, 6 tensors")
    assert (tmp_path / "same.h5").read_bytes() == path.read_bytes()
    report = json.loads(told("convert", path, tmp_path / "half.h5", "--dtype", "bf16", "--json").stdout)
    assert report["tensors"] == 6
    assert tensors_of(tmp_path / "half.h5")["optim/exp_avg/large"].dtype == torch.float32


def test_numbers_that_the_new_dtype_cannot_hold_are_counted(tmp_path: Path):
    path = saved(tmp_path, {"model/a": torch.tensor([1e6, -1e30, 3.0, float("inf")])})
    result = told("convert", path, tmp_path / "x.h5", "--dtype", "fp16")
    assert "\n2 numbers were too large for fp16 and are infinite" in result.stdout


def test_convert_writes_over_nothing_and_leaves_nothing_of_a_damaged_file(tmp_path: Path):
    path = saved(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        told("convert", path, path)
    assert str(caught.value) == f"{path} is there already\n  a file is never written over\n  give another name"
    damaged(path, "model/norm", 3)
    index, out = read_index(path), tmp_path / "out" / "x.h5"

    def act(group: Group) -> str:
        with pytest.raises(DamagedError) as caught:
            convert(path, index, out, group, "bf16", True)
        return str(caught.value)

    assert f"{path}: model/norm is damaged in its bytes 0 to 65" in threads.run(3, act)[0]
    assert os.listdir(out.parent) == []


def test_a_file_without_checksums_can_be_given_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saved(tmp_path)
    index = format.Index(4, {"run": "tiny"}, read_index(path).slots, None)
    convert(path, index, tmp_path / "new.h5", SoloGroup(), None, False)
    assert (tmp_path / "new.h5").read_bytes() == path.read_bytes()
