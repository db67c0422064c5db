"""The checkpoint file, as other programs and later releases find it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import xxhash

from hpctrain.checkpoint import format
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import Held
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, IncompleteError
from hpctrain.plan.layout import ITEMSIZE, Layout
from hpctrain.plan.mesh import Mesh
from tests.support.states import bits

ALONE = Mesh((("dp", 1),))
REFERENCE = Path(__file__).parents[2] / "docs/reference/checkpoint-format.md"


def saved(folder: Path, tensors: dict[str, torch.Tensor], attributes: dict | None = None) -> Path:
    """A checkpoint of whole tensors, made by one rank."""
    state = {name: Held(_layout(tensor), tensor) for name, tensor in tensors.items()}
    return _checkpoint(folder).save(5, state, attributes or {})


def loaded(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same tensors, read into fresh memory."""
    state = {name: Held(_layout(tensor), torch.zeros_like(tensor)) for name, tensor in like.items()}
    assert _checkpoint(folder).resume(state) == 5
    return {name: held.tensor for name, held in state.items()}


def _checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(CheckpointConfig(sync=False), folder, ALONE, SoloGroup())


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _random_bits(dtype: str, *shape: int) -> torch.Tensor:
    """Every bit pattern may come, NaNs and infinities too; of a bool only the two that exist."""
    generator = torch.Generator().manual_seed(len(dtype) + sum(shape))
    count = int(np.prod(shape)) * ITEMSIZE[dtype]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", format.TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (257, 129)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, dtype: str, shape: tuple[int, ...]):
    tensor = _random_bits(dtype, *shape)
    path = saved(tmp_path, {"model/it": tensor})
    assert bits(loaded(tmp_path, {"model/it": tensor})["model/it"]) == bits(tensor)
    (slot,) = format.read_index(path).slots
    assert (slot.name, slot.shape, slot.dtype) == ("model/it", shape, dtype)


def test_every_dtype_that_a_layout_may_have_has_a_type_in_the_file():
    assert set(format.TYPES) == set(ITEMSIZE)
    assert all(kind.get_size() == ITEMSIZE[dtype] for dtype, kind in format.TYPES.items())


@pytest.mark.parametrize(
    ("dtype", "seen"),
    [("bfloat16", "float32"), ("float8_e5m2", "float16"), ("bool", "bool"), ("complex64", "complex64")],
)
def test_plain_h5py_reads_the_same_numbers(tmp_path: Path, dtype: str, seen: str):
    tensor = torch.arange(-60, 68).to(getattr(torch, dtype))
    with h5py.File(saved(tmp_path, {"model/it": tensor})) as file:
        dataset = file["model/it"]
        assert dataset.dtype == seen
        assert dataset.attrs["dtype"] == dtype
        assert np.array_equal(dataset[...], tensor.to(getattr(torch, seen)).numpy())


def test_plain_h5py_reads_e4m3_as_its_bytes_and_is_told_what_they_are(tmp_path: Path):
    tensor = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    with h5py.File(saved(tmp_path, {"model/it": tensor})) as file:
        assert np.array_equal(file["model/it"][...], np.arange(256))
        assert file["model/it"].attrs["dtype"] == "float8_e4m3fn"


def test_h5dump_reads_names_and_numbers(tmp_path: Path):
    if not shutil.which("h5dump"):
        pytest.skip("h5dump (hdf5-tools) is not installed")
    tensors = {"model/blocks.0.weight": torch.arange(6.0).reshape(2, 3), "optim/exp_avg/a": torch.ones(3).bfloat16()}
    path = saved(tmp_path, tensors)
    dumped = subprocess.run(["h5dump", path], capture_output=True, text=True, check=True).stdout
    assert 'DATASET "blocks.0.weight"' in dumped
    assert re.search(r"\(1,0\): 3, 4, 5", dumped)
    assert '"bfloat16"' in dumped


def test_a_file_made_at_another_time_has_the_same_bytes(tmp_path: Path):
    tensors = {"model/a": torch.rand(300, 300), "model/b": torch.rand(3), "optim/exp_avg/a": torch.rand(300, 300)}
    first = saved(tmp_path / "first", tensors, {"b": 1, "a": 2}).read_bytes()
    time.sleep(1.1)  # HDF5 would record whole seconds
    assert saved(tmp_path / "second", tensors, {"a": 2, "b": 1}).read_bytes() == first


def test_large_tensors_begin_on_a_page_and_small_ones_lie_side_by_side(tmp_path: Path):
    tensors = {f"model/small.{number}": torch.rand(1000 + number) for number in range(50)}
    tensors |= {f"model/large.{number}": torch.rand(20001 + number) for number in range(5)}
    slots = format.read_index(saved(tmp_path, tensors)).slots
    large = [slot for slot in slots if "large" in slot.name]
    small = sorted((slot for slot in slots if "small" in slot.name), key=lambda slot: slot.offset)
    assert all(slot.offset % 4096 == 0 for slot in large)
    assert all(one.offset + one.nbytes == other.offset for one, other in zip(small, small[1:], strict=False))


def test_attributes_come_back_however_long(tmp_path: Path):
    told = {"config": {"train.steps": 10, "text": "é" * 200_000}, "list": [1, 2.5, None]}
    path = saved(tmp_path, {"model/a": torch.zeros(1)}, told)
    assert format.read_attributes(path) == told
    assert format.read_index(path).attributes == told
    with h5py.File(path) as file:
        assert json.loads(file.attrs["attributes"]) == told
        assert (file.attrs["step"], file.attrs["complete"], file.attrs["version"]) == (5, 1, 2)


def test_ten_thousand_tensors_are_one_file_like_any_other(tmp_path: Path):
    tensors = {f"model/blocks.{number}.bias": torch.full((4,), float(number)) for number in range(10_000)}
    path = saved(tmp_path, tensors)
    assert path.stat().st_size < 20 << 20
    found = loaded(tmp_path, tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_file_locked_by_somebody_else_is_read(tmp_path: Path):
    path = saved(tmp_path, {"model/a": torch.ones(3)})
    with path.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert format.read_index(path).step == 5


OPENED = 'import h5py; h5py.File("x", "w", driver="core", backing_store=False)'
WITH_A_LOCK = """
import fcntl, sys
from pathlib import Path
{first}
from hpctrain.checkpoint import keep
with open(sys.argv[1]) as other:
    fcntl.flock(other, fcntl.LOCK_EX)
    path = Path(sys.argv[1])
    print(keep.newest(path.parent, [path.name])[1].step)
"""


@pytest.mark.parametrize(("said", "first"), [("TRUE", ""), ("BEST_EFFORT", OPENED)])
def test_a_variable_that_asks_for_locks_does_no_harm(tmp_path: Path, said: str, first: str):
    """HDF5 has its word from it where it opened a file before us: the error says so, and no older file is taken."""
    path = saved(tmp_path, {"model/a": torch.ones(3)})
    command = [sys.executable, "-c", WITH_A_LOCK.format(first=first), path]
    env = os.environ | {"HDF5_USE_FILE_LOCKING": said, "PYTHONPATH": str(REFERENCE.parents[2])}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if first == OPENED:
        assert "Resource temporarily unavailable, and HDF5_USE_FILE_LOCKING has it locked: set it to" in done.stderr
    else:
        assert done.stdout == "5\n", done.stderr


@pytest.mark.parametrize("locking", [None, True, False, "best-effort"])
def test_a_file_that_the_same_program_has_open_is_read_however_it_opened_it(tmp_path: Path, locking: bool | str | None):
    """HDF5 refuses what is open with another locking flag, and a whole checkpoint would be taken for a torn one."""
    tensors = {"model/a": torch.ones(3)}
    with h5py.File(saved(tmp_path, tensors), locking=locking) as file:
        assert torch.equal(loaded(tmp_path, tensors)["model/a"], tensors["model/a"])
        assert file["model/a"].shape == (3,)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_off_file_is_called_incomplete(tmp_path: Path, part: float):
    path = saved(tmp_path, {"model/a": torch.rand(30_000)})
    os.truncate(path, int(path.stat().st_size * part))
    with pytest.raises(IncompleteError, match=re.escape(str(path))):
        format.read_index(path)


def test_a_file_whose_writing_did_not_end_is_called_incomplete(tmp_path: Path):
    path = tmp_path / "begun.h5"
    slots = format.lay_out(path, [format.Slot("model/a", (10,), "float32", 0)], 3, {})
    with pytest.raises(IncompleteError) as caught:
        format.read_index(path)
    assert str(caught.value) == (
        f"{path} is incomplete\n  its writing did not come to the end\n"
        "  go on from an older checkpoint, or copy it again from where it is whole"
    )
    format.mark_complete(path, slots, np.zeros(1, np.uint64))
    assert format.read_index(path).step == 3


def test_a_strange_hdf5_file_is_no_checkpoint(tmp_path: Path):
    path = tmp_path / "strange.h5"
    with h5py.File(path, "w") as file:
        file["model/a"] = np.ones(3)
    with pytest.raises(CheckpointError, match="is not a checkpoint that this release reads\n  its format is None"):
        format.read_index(path)


def test_a_file_of_a_later_format_says_so(tmp_path: Path):
    path = saved(tmp_path, {"model/a": torch.rand(3)})
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 3
    with pytest.raises(CheckpointError, match="version 3, where .* version 2 or less, was expected\n  read it"):
        format.read_index(path)


def test_a_dataset_that_hides_its_dtype_is_refused(tmp_path: Path):
    path = saved(tmp_path, {"model/a": torch.rand(3)})
    with h5py.File(path, "r+") as file:
        del file["model/a"].attrs["dtype"]
    with pytest.raises(CheckpointError, match=f"{path}: model/a does not say its dtype\n  a tensor's dtype is"):
        format.read_index(path)


def test_a_chunked_dataset_is_refused(tmp_path: Path):
    path = saved(tmp_path, {"model/a": torch.rand(3)})
    with h5py.File(path, "r+") as file:
        file.create_dataset("model/b", data=np.ones(100, "f4"), chunks=(10,)).attrs["dtype"] = "float32"
    with pytest.raises(CheckpointError, match=f"{path}: model/b is not contiguous float32"):
        format.read_index(path)


def test_a_name_that_is_the_beginning_of_another_is_refused(tmp_path: Path):
    slots = [format.Slot("model/a", (3,), "float32", 0), format.Slot("model/a/b", (3,), "float32", 0)]
    with pytest.raises(CheckpointError, match="model/a/b cannot be a dataset"):
        format.lay_out(tmp_path / "x.h5", slots, 0, {})


def test_the_room_that_is_asked_for_is_enough(tmp_path: Path):
    for count, size in ((1, 1), (1, 100_000), (3000, 2), (40, 20_000)):
        slots = [format.Slot(f"model/{number}", (size,), "float32", 0) for number in range(count)]
        path = tmp_path / f"{count}-{size}.h5"
        format.lay_out(path, slots, 0, {"config": "x" * 1000})
        data = sum(slot.nbytes for slot in slots)
        assert data < path.stat().st_size <= format.needed_bytes(slots) < 1.2 * data + (8 << 20)


def test_the_reader_in_the_reference_page_reads_a_checkpoint(tmp_path: Path):
    (code,) = re.findall(r"```python\n(.*?)```", REFERENCE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict = {}
    exec(compile(code, str(REFERENCE), "exec"), names)
    tensors = {"model/blocks.0.weight": torch.rand(20, 3).bfloat16(), "optim/exp_avg/a": torch.rand(3)}
    step, attributes, found = names["read"](saved(tmp_path, tensors, {"run": "tiny"}))
    assert (step, attributes, sorted(found)) == (5, {"run": "tiny"}, sorted(tensors))
    assert all(np.array_equal(found[name], tensor.float().numpy()) for name, tensor in tensors.items())
    with pytest.raises(ValueError, match="model/blocks.0.weight is damaged"):
        names["read"](_damaged(tmp_path, "model/blocks.0.weight"))


def test_a_file_that_somebody_else_made_as_the_reference_page_says_loads(tmp_path: Path):
    tensors = {"model/a": torch.rand(300, 301), "model/b": torch.rand(7), "optim/exp_avg/none": torch.rand(0, 3)}
    with h5py.File(tmp_path / "step-00000005.h5", "w") as file:
        sums, lines = [], ["5", '{"who": "somebody"}']
        for name, tensor in sorted(tensors.items()):
            file[name] = tensor.numpy()
            file[name].attrs.update({"dtype": "float32", "first_checksum": len(sums)})
            lines.append(f"{name} float32 {list(tensor.shape)} {len(sums)}")
            raw = tensor.numpy().tobytes()
            sums += [xxhash.xxh3_64_intdigest(raw[at : at + 262144]) for at in range(0, len(raw), 262144)]
        table = file["checksums"] = np.array(sums, "<u8")
        file["checksums"].attrs.update({"algorithm": "xxh3_64", "block_bytes": 262144})
        file.attrs.update({"format": "hpctrain checkpoint", "version": 2, "step": 5, "complete": 1})
        file.attrs["attributes"] = lines[1]
        file.attrs["seal"] = np.uint64(xxhash.xxh3_64_intdigest("\n".join(lines).encode() + table.tobytes()))
    found = loaded(tmp_path, tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert format.read_attributes(tmp_path / "step-00000005.h5") == {"who": "somebody"}


def _damaged(folder: Path, name: str) -> Path:
    """The checkpoint in the folder, with one byte of a tensor changed."""
    path = folder / "step-00000005.h5"
    (slot,) = (slot for slot in format.read_index(path).slots if slot.name == name)
    with path.open("r+b") as file:
        file.seek(slot.offset + 3)
        file.write(b"\x55")
    return path
