"""``hpctrain ckpt verify``, ``diff`` and ``convert``: whole files, by one rank or several."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner, Result

from hpctrain.checkpoint import format, parts
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.convert import Change, convert
from hpctrain.checkpoint.diff import Difference, diff
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.state import Held, dtype_name
from hpctrain.checkpoint.verify import verify
from hpctrain.cli import ckpt, ckpt_files
from hpctrain.cli.bar import Tell
from hpctrain.cli.ckpt import app
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, DamagedError, UsageError
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


def weights(dtype: str) -> Change:
    """The weights alone, in a dtype."""
    return Change(dtype, only=("model/*",))


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
    made = threads.run(ranks, lambda group: convert(path, index, out, group, weights(dtype)))
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
            convert(path, index, out, group, weights("bf16"))
        return str(caught.value)

    assert f"{path}: model/norm is damaged in its bytes 0 to 65" in threads.run(3, act)[0]
    assert os.listdir(out.parent) == []


def test_what_a_killed_convert_left_aside_goes_with_the_next_of_that_name(tmp_path: Path):
    dead = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True).stdout.strip()
    host, (mine, other) = socket.gethostname(), ("x.h5", "y.h5")
    for name, process in ((mine, dead), (mine, os.getpid()), (other, dead)):
        (tmp_path / f".{name}.{host}.{process}.0af3.part").write_bytes(bytes(1000))
    told("convert", saved(tmp_path / "in"), tmp_path / mine)
    left = [f".{mine}.{host}.{os.getpid()}.0af3.part", f".{other}.{host}.{dead}.0af3.part"]
    assert sorted(os.listdir(tmp_path)) == sorted([*left, "in", mine])


def test_a_file_without_checksums_can_be_given_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saved(tmp_path)
    index = format.Index(4, {"run": "tiny"}, read_index(path).slots, None)
    convert(path, index, tmp_path / "new.h5", SoloGroup(), Change())
    assert (tmp_path / "new.h5").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("ranks", [1, 3])
def test_convert_takes_some_tensors_under_other_names(tmp_path: Path, steps: None, ranks: int):
    path, out = saved(tmp_path), tmp_path / "out.h5"
    index = read_index(path)
    # What was small and what was large lie otherwise in the new file: by name, model/zlarge comes last.
    change = Change("bf16", ("model/z*", "optim/*"), {"model/*": "model/z.*", "optim/exp_avg/*": "optim/m/*"})
    threads.run(ranks, lambda group: convert(path, index, out, group, change))
    found = tensors_of(out)
    new = {"large": "model/z.large", "mask": "model/z.mask", "norm": "model/z.norm", "scalar": "model/z.scalar"}
    assert sorted(found) == [*sorted(new.values()), "optim/m/large", "optim/m/none"]
    assert torch.equal(found["model/z.large"], TENSORS["model/large"].bfloat16())
    assert torch.equal(found["model/z.mask"], TENSORS["model/mask"])
    assert torch.equal(found["optim/m/large"], TENSORS["optim/exp_avg/large"])


def test_names_that_change_places_take_their_own_bytes_along(tmp_path: Path):
    path = saved(tmp_path, {"model/a": torch.ones(3), "model/b": torch.zeros(100_000), "optim/m/a": torch.ones(4)})
    words = ["--rename", "model/a=model/b", "--rename", "model/b=model/a", "--rename", "optim/m/a=model/c"]
    assert told("reshard", path, tmp_path / "x.h5", *words, "--dtype", "fp64").exit_code == 0
    found = tensors_of(tmp_path / "x.h5")
    assert torch.equal(found["model/b"], torch.ones(3, dtype=torch.float64))
    assert torch.equal(found["model/a"], torch.zeros(100_000, dtype=torch.float64))
    assert torch.equal(found["model/c"], torch.ones(4, dtype=torch.float64))


def test_reshard_and_convert_are_one_command_and_it_says_that_nothing_needs_resharding(tmp_path: Path):
    path = saved(tmp_path)
    words = ["--only", "model/n*", "--only", "optim/*", "--json"]
    reports = [json.loads(told(name, path, tmp_path / name, *words).stdout) for name in ("reshard", "convert")]
    assert [report.pop("file") for report in reports] == [str(tmp_path / "reshard"), str(tmp_path / "convert")]
    assert reports[0] == reports[1] and reports[0]["tensors"] == 3
    assert (tmp_path / "reshard").read_bytes() == (tmp_path / "convert").read_bytes()
    assert "it needs no resharding: any number of ranks loads it" in " ".join(told("reshard", "--help").stdout.split())
    options = [param.name for param in get_command(app).commands["convert"].params]
    assert [param.name for param in get_command(app).commands["reshard"].params] == options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "modle/*"], "--only: 'modle/\\*' names no tensor of .*step-00000004.h5 under its new name\n"),
        (["--rename", "model/x=model/y"], "--rename: 'model/x' names no tensor of .*step-00000004.h5\n  a misspelt"),
        (["--rename", "model/norm=model/mask"], "--rename makes two tensors model/mask\n  model/mask and model/norm"),
        (["--rename", "model/norm"], "--rename model/norm is not two names\n  give it as OLD=NEW"),
        (["--rename", "=x"], "--rename =x is not two names"),
    ],
)
def test_names_that_fit_nothing_or_too_much_are_refused_and_leave_nothing(tmp_path: Path, words: list, message: str):
    path = saved(tmp_path / "in")
    with pytest.raises(UsageError, match=message):
        told("convert", path, tmp_path / "out.h5", *words)
    assert os.listdir(tmp_path) == ["in"]


def test_a_new_name_that_no_dataset_can_have_is_told(tmp_path: Path):
    with pytest.raises(CheckpointError, match="model/mask/b cannot be a dataset\n  HDF5: "):
        told("convert", saved(tmp_path / "in"), tmp_path / "out.h5", "--rename", "model/norm=model/mask/b")
    assert os.listdir(tmp_path) == ["in"]


# ---- what a user may give instead of a checkpoint -----------------------------------------------------------------

COMMANDS = [["inspect"], ["inspect", "--stats"], ["verify"], ["diff", "GOOD"], ["convert"], ["export"]]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "FILE is not there\n  give a checkpoint file, or the folder that has them"),
        ("empty folder", "FILE has no checkpoint\n  its files would be named step-00000100.h5"),
        ("no bytes", "FILE is not an HDF5 file\n  it was cut off, or is something else"),
        ("text", "FILE is not an HDF5 file\n  it was cut off, or is something else"),
        ("cut off", "FILE is incomplete\n  HDF5 cannot open it: "),
        ("strange", "FILE is not a checkpoint that this release reads\n  its format is None"),
        ("forbidden", "FILE failed\n  FILE: Permission denied\n  look at the folder's name and rights"),
    ],
)
def test_what_is_no_checkpoint_is_told_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], kind: str, message: str
):
    path, good = tmp_path / "file.h5", saved(tmp_path / "good")
    if kind == "empty folder":
        path.mkdir()
    elif kind == "strange":
        with h5py.File(path, "w") as file:
            file["model/a"] = [1, 2]
    elif kind != "missing":
        raw = good.read_bytes()
        path.write_bytes({"no bytes": b"", "text": b"tokens\n" * 999, "cut off": raw[:9000], "forbidden": raw}[kind])
    real = os.open

    def refuse(name, *rest, **more):
        if kind == "forbidden" and str(name) == str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(name, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)  # root may read what it likes
    words = [good if word == "GOOD" else word for word in command] + [path]
    words += [tmp_path / "out"] if command[0] in ("convert", "export") else []
    with pytest.raises(CheckpointError) as caught:
        told(*words)
    assert message.replace("FILE", str(path)) in str(caught.value)


def test_a_disk_that_cannot_be_read_is_told_by_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = saved(tmp_path)

    def fail(opened, into, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=f"reading {path} failed\n  {path}: Input/output error"):
        told("inspect", path, "--stats")


@pytest.mark.parametrize("command", [["inspect", "--stats"], ["verify"], ["diff", "GOOD"], ["convert"], ["reshard"]])
def test_a_command_that_reads_a_file_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: None, command: list[str]
):
    path, shown = saved(tmp_path), []

    @contextmanager
    def bar(title: str, *rest: object) -> Iterator[Tell]:
        yield lambda done, total: shown.append((done, total))

    for module in (ckpt, ckpt_files):
        monkeypatch.setattr(module, "bar", bar)
    words = [path if word == "GOOD" else word for word in command] + [path]
    assert told(*words, *([tmp_path / "out.h5"] if command[0] in ("convert", "reshard") else [])).exit_code == 0
    total = sum(slot.nbytes for slot in read_index(path).slots)
    assert shown[-1] == (total, total) and shown == sorted(shown)
