"""Weights to and from model folders of Hugging Face: bit for bit, by any number of ranks, a tensor at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hpctrain.checkpoint import carry, disk
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.hub import bring, export
from hpctrain.checkpoint.verify import verify
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import load
from hpctrain.errors import DamagedError
from hpctrain.plan.weights import ModelShape
from tests.support import threads
from tests.support.peak import peak
from tests.support.weights import VOCABULARY, model_of, read, saved

MODELS = {
    "gpt2": model_of(),
    "gpt2, untied": model_of(tied=False, dropout=0.1),
    "llama": model_of(family="llama", kv_heads=2, rope_base=5e5, norm_epsilon=1e-6),
    "llama, stretched": model_of(family="llama", rope_scaling=(8, 1, 4, 8192), tied=True),
    "qwen2": model_of(family="qwen2", kv_heads=1, init_std=0.01),
    "qwen3": model_of(family="qwen3", head_dim=10, kv_heads=2, vocabulary=VOCABULARY),
    "mixtral": model_of(family="mixtral", kv_heads=2, experts=3, experts_per_token=1, balance_loss=0.1),
}
SOLO = SoloGroup()
every_model = pytest.mark.parametrize("name", MODELS)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def flip(path: Path, at: int) -> None:
    """Turn a bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_model
def test_what_is_exported_comes_back_bit_for_bit_with_its_model(name: str, dtype: str, tmp_path: Path):
    source = saved(tmp_path / "run", MODELS[name], dtype)
    export(source, tmp_path / "hf", SOLO, shard_bytes=20_000)
    bring(tmp_path / "hf", tmp_path / "back.h5", SOLO)
    expected, found = read(source), read(tmp_path / "back.h5")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) and found[key].dtype == expected[key].dtype for key in expected)
    assert read_index(tmp_path / "back.h5").step == 0
    shape, back = (ModelShape.of(one, VOCABULARY) for one in (MODELS[name], load(tmp_path / "back.toml").model))
    assert back == shape


def test_each_expert_has_tensors_of_its_own(tmp_path: Path):
    source = saved(tmp_path / "run", MODELS["mixtral"])
    export(source, tmp_path / "hf", SOLO)
    theirs, ours = load_file(tmp_path / "hf/model.safetensors"), read(source)
    name, mlp = "model.layers.1.block_sparse_moe", "model/blocks.1.mlp"
    assert torch.equal(theirs[f"{name}.gate.weight"], ours[f"{mlp}.router.weight"])
    for expert in range(3):
        for part, own in (("w1", ours[f"{mlp}.gate.weight"]), ("w3", ours[f"{mlp}.up.weight"])):
            assert torch.equal(theirs[f"{name}.experts.{expert}.{part}.weight"], own[expert])
        assert torch.equal(theirs[f"{name}.experts.{expert}.w2.weight"], ours[f"{mlp}.down.weight"][expert].t())
    assert len(theirs) == 3 + 2 * (7 + 3 * 3)


def test_the_library_of_the_format_reads_what_is_exported(tmp_path: Path):
    source = saved(tmp_path / "run", MODELS["gpt2"])
    export(source, tmp_path / "hf", SOLO)
    theirs, ours = load_file(tmp_path / "hf/model.safetensors"), read(source)
    parts = [ours[f"model/blocks.1.attention.{part}.weight"] for part in ("query", "key", "value")]
    assert torch.equal(theirs["transformer.h.1.attn.c_attn.weight"], torch.cat(parts).t())
    parts = [ours[f"model/blocks.1.attention.{part}.bias"] for part in ("query", "key", "value")]
    assert torch.equal(theirs["transformer.h.1.attn.c_attn.bias"], torch.cat(parts))
    assert torch.equal(theirs["transformer.h.0.mlp.c_fc.weight"], ours["model/blocks.0.mlp.up.weight"].t())
    assert torch.equal(theirs["transformer.h.0.mlp.c_proj.weight"], ours["model/blocks.0.mlp.down.weight"])
    assert "lm_head.weight" not in theirs
    assert len(theirs) == 2 + 2 * 12 + 2


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral"])
def test_any_number_of_ranks_makes_the_same_files(name: str, tmp_path: Path):
    source = saved(tmp_path / "run", MODELS[name])

    def there_and_back(ranks: int) -> tuple[dict[str, bytes], bytes]:
        hf, back = tmp_path / f"hf{ranks}", tmp_path / f"{ranks}.h5"
        threads.run(ranks, lambda group: export(source, hf, group, shard_bytes=20_000))
        threads.run(ranks, lambda group: bring(hf, back, group))
        return bytes_of(hf), back.read_bytes()

    alone = there_and_back(1)
    assert len(alone[0]) > 3
    assert there_and_back(3) == alone
    assert there_and_back(30) == alone  # more than there are tensors


def test_files_end_before_the_size_asked_for_and_the_index_names_every_tensor(tmp_path: Path):
    export(saved(tmp_path / "run", MODELS["llama"]), tmp_path / "hf", SOLO, shard_bytes=10_000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "hf").glob("*.safetensors")}
    assert index["weight_map"] == {name: file for file, tensors in files.items() for name in tensors}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in files.values()]
    assert max(sizes) <= 10_000 and index["metadata"]["total_size"] == sum(sizes)
    assert all(file.endswith(f"-of-{len(files):05d}.safetensors") for file in files)


@every_model
def test_blocks_of_rows_make_the_same_files(name: str, tmp_path: Path, monkeypatch):
    source = saved(tmp_path / "run", MODELS[name])
    for folder, rows in (("whole", carry.BUFFER_BYTES), ("rows", 600)):
        monkeypatch.setattr(carry, "BUFFER_BYTES", rows)
        export(source, tmp_path / folder, SOLO)
        bring(tmp_path / folder, tmp_path / f"{folder}.h5", SOLO)
    assert bytes_of(tmp_path / "rows") == bytes_of(tmp_path / "whole")
    assert (tmp_path / "rows.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()


@pytest.mark.parametrize(("ranks", "experts"), [(1, False), (3, False), (3, True)])
def test_what_is_imported_has_the_checksums_of_its_bytes(ranks: int, experts: bool, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(carry, "BUFFER_BYTES", 100_000)  # no multiple of a block
    mixtral = dict(family="mixtral", heads=2, experts=2, experts_per_token=1) if experts else {}
    source = saved(tmp_path / "run", model_of(**dict(width=300, mlp_width=500, heads=4) | mixtral))
    back = tmp_path / "back.h5"
    export(source, tmp_path / "hf", SOLO)
    threads.run(ranks, lambda group: bring(tmp_path / "hf", back, group))
    index = read_index(back)
    assert verify(back, index, SOLO) == []
    assert max(slot.blocks for slot in index.slots) == (5 if experts else 3)
    for slot in index.slots:
        flip(back, slot.offset + slot.nbytes - 1)
    assert [damage.tensor for damage in verify(back, index, SOLO)] == sorted(slot.name for slot in index.slots)


@pytest.mark.parametrize(
    ("ranks", "model", "weight"), [(1, "gpt2", "attention.key"), (3, "gpt2", "attention.key"), (1, "mixtral", "mlp.up")]
)
def test_a_damaged_checkpoint_is_not_exported(ranks: int, model: str, weight: str, tmp_path: Path):
    source = saved(tmp_path / "run", MODELS[model])
    slot = next(slot for slot in read_index(source).slots if slot.name == f"model/blocks.1.{weight}.weight")
    flip(source, slot.offset + 8)

    def attempt(group: Group) -> str:
        with pytest.raises(DamagedError) as told:
            export(source, tmp_path / "hf", group)
        return str(told.value)

    (told,) = set(threads.run(ranks, attempt))
    assert f"{source}: {slot.name} is damaged in its bytes 0 to {slot.nbytes - 1}" in told
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


BEFORE = """
from hpctrain.checkpoint.hub import bring, export
from hpctrain.comm.group import SoloGroup
group = SoloGroup()
export(folder / "small", folder / "warm", group)
"""
BOTH_WAYS = """
export(folder / "run", folder / "hf", group)
bring(folder / "hf", folder / "back.h5", group)
"""


LARGE = {"gpt2": dict(layers=12), "mixtral": dict(family="mixtral", layers=1, experts=12)}


@pytest.mark.parametrize("name", LARGE)
def test_a_tensor_or_an_expert_and_a_buffer_are_in_memory_at_a_time(name: str, tmp_path: Path):
    saved(tmp_path / "small", MODELS[name])
    source = saved(tmp_path / "run", model_of(**dict(width=512, mlp_width=2048) | LARGE[name]))
    largest, buffers = 2048 * 512 * 4, 2 * carry.BUFFER_BYTES + 4 * disk.CHUNK
    assert source.stat().st_size > 2 * (largest + buffers)
    assert peak(BEFORE, BOTH_WAYS, tmp_path) < largest + buffers


def test_numbers_change_their_format_where_it_is_asked_for(tmp_path: Path):
    source = saved(tmp_path / "run", MODELS["gpt2"])
    made = export(source, tmp_path / "hf", SOLO, dtype="bfloat16")
    assert json.loads((tmp_path / "hf/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert made["bytes"] == sum(t.nbytes for t in read(source).values()) / 2
    bring(tmp_path / "hf", tmp_path / "back.h5", SOLO, dtype="float32")
    back = read(tmp_path / "back.h5")
    assert all(torch.equal(back[key], value.bfloat16().float()) for key, value in read(source).items())


def test_the_newest_checkpoint_of_a_folder_is_exported_and_progress_is_told(tmp_path: Path):
    saved(tmp_path / "run", MODELS["llama"], step=3)
    newest = saved(tmp_path / "run", MODELS["llama"], step=5)
    told: list[tuple[int, int]] = []
    made = export(tmp_path / "run", tmp_path / "hf", SOLO, tell=lambda *numbers: told.append(numbers))
    assert (made["step"], made["from"], made["architecture"]) == (5, str(newest), "LlamaForCausalLM")
    assert told[-1] == (made["bytes"], made["bytes"]) and len(told) >= made["tensors"]


def test_an_empty_folder_that_is_there_is_filled(tmp_path: Path):
    (tmp_path / "hf").mkdir()
    export(saved(tmp_path / "run", MODELS["gpt2"]), tmp_path / "hf", SOLO)
    assert sorted(bytes_of(tmp_path / "hf")) == ["config.json", "model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


def test_what_older_releases_saved_beside_the_weights_is_left_out(tmp_path: Path):
    from safetensors.torch import save_file

    source = saved(tmp_path / "run", MODELS["gpt2"])
    export(source, tmp_path / "hf", SOLO)
    tensors = load_file(tmp_path / "hf/model.safetensors")
    more = {"lm_head.weight": tensors["transformer.wte.weight"].clone(), "transformer.h.0.attn.bias": torch.ones(1, 1)}
    save_file(tensors | more, tmp_path / "hf/model.safetensors")
    bring(tmp_path / "hf", tmp_path / "back.h5", SOLO)
    assert read(tmp_path / "back.h5").keys() == read(source).keys()
