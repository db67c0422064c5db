"""Folders of Megatron-Core and of Llama's own names come in as the same model as from Hugging Face, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hpctrain.checkpoint import hub
from hpctrain.comm.group import SoloGroup
from hpctrain.errors import CheckpointError
from tests.support import threads
from tests.support.dcp import as_shards
from tests.support.weights import VOCABULARY, model_of, read, saved

SOLO = SoloGroup()
LLAMA = model_of(family="llama", kv_heads=2)
MODELS = {
    "llama": LLAMA,
    "qwen2": model_of(family="qwen2", kv_heads=1),
    "qwen3": model_of(family="qwen3", head_dim=10, kv_heads=4),
}


def theirs(folder: Path, name: str) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of ours, and its tensors as Hugging Face has them, with config.json in ``folder/dcp``."""
    source = saved(folder / "run", MODELS[name])
    hub.export(source, folder / "hf", SOLO)
    (folder / "dcp").mkdir()
    (folder / "dcp/config.json").write_bytes((folder / "hf/config.json").read_bytes())
    return source, load_file(folder / "hf/model.safetensors")


def megatron(tensors: dict[str, Tensor], name: str, stacked: bool, fused_norms: bool) -> dict[str, Tensor]:
    """The tensors by Megatron-Core's names, put together head by head."""
    model = MODELS[name]
    heads, groups = model.heads, model.kv_heads
    size = model.head_dim or model.width // heads
    made = {
        "embedding.word_embeddings.weight": torch.cat(
            [tensors["model.embed_tokens.weight"], torch.ones(67, model.width)]
        ),
        "output_layer.weight": torch.cat([tensors["lm_head.weight"], torch.zeros(67, model.width)]),
        "decoder.final_layernorm.weight": tensors["model.norm.weight"],
    }
    layers: dict[str, list[Tensor]] = {}
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        have = {key.removeprefix(at): one for key, one in tensors.items() if key.startswith(at)}
        for kind in ("weight", "bias"):
            if f"self_attn.q_proj.{kind}" not in have:
                continue
            q, k, v = (have[f"self_attn.{part}_proj.{kind}"].split(size) for part in "qkv")
            each = heads // groups
            rows = [one for g in range(groups) for one in (*q[g * each : (g + 1) * each], k[g], v[g])]
            layers.setdefault(f"self_attention.linear_qkv.{kind}", []).append(torch.cat(rows))
        gated = torch.cat([have["mlp.gate_proj.weight"], have["mlp.up_proj.weight"]])
        layers.setdefault("mlp.linear_fc1.weight", []).append(gated)
        norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        norms = norms if fused_norms else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        plain = {
            "input_layernorm.weight": norms[0],
            "post_attention_layernorm.weight": norms[1],
            "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
            "mlp.down_proj.weight": "mlp.linear_fc2.weight",
            "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
            "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
        }
        for key, there in plain.items():
            if key in have:
                layers.setdefault(there, []).append(have[key])
    if stacked:
        return made | {f"decoder.layers.{key}": torch.stack(each) for key, each in layers.items()}
    return made | {f"decoder.layers.{n}.{key}": one for key, each in layers.items() for n, one in enumerate(each)}


def meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the names of Llama's own code, with rotary pairs side by side."""
    parts = {
        "input_layernorm": "attention_norm",
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }
    rest = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
    names = rest | {f"model.layers.{n}.{key}": f"layers.{n}.{one}" for n in range(2) for key, one in parts.items()}
    size = LLAMA.width // LLAMA.heads
    made = {}
    for key, there in names.items():
        one = tensors[f"{key}.weight"]
        if there.endswith(("wq", "wk")):
            order = [
                head + place
                for head in range(0, len(one), size)
                for i in range(size // 2)
                for place in (i, i + size // 2)
            ]
            one = one[order]
        made[f"{there}.weight"] = one
    return made


def same(source: Path, back: Path) -> None:
    expected, found = read(source), read(back)
    assert found.keys() == expected.keys()
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []


@pytest.mark.parametrize("fused_norms", [True, False])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_megatron_core_is_the_model_of_its_config(
    name: str, stacked: bool, fused_norms: bool, tmp_path: Path
):
    source, tensors = theirs(tmp_path, name)
    made = megatron(tensors, name, stacked, fused_norms)
    as_shards(tmp_path / "dcp", made, (0, 1) if stacked else (0,))
    threads.run(3, lambda group: hub.bring(tmp_path / "dcp", tmp_path / "back.h5", group))
    same(source, tmp_path / "back.h5")


def test_a_folder_of_llamas_own_names_is_the_model_of_its_config(tmp_path: Path):
    source, tensors = theirs(tmp_path, "llama")
    as_shards(tmp_path / "dcp", {f"model.{name}": one for name, one in meta(tensors).items()}, (0,))
    hub.bring(tmp_path / "dcp", tmp_path / "back.h5", SOLO, rename={"model.*": "*"})
    same(source, tmp_path / "back.h5")


def test_pairs_that_lie_side_by_side_turn_as_complex_numbers_do(tmp_path: Path):
    """What Llama's own code computes with its rows is what our attention computes with ours."""
    from hpctrain.checkpoint import dcp
    from hpctrain.checkpoint.translate import translated
    from hpctrain.plan.weights import ModelShape
    from tests.support.dcp import save

    size, heads, width, position = 6, 4, 24, 5
    weight, x = torch.randn(size * heads, width, dtype=torch.float64), torch.randn(width, dtype=torch.float64)
    angles = position * 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    turned = torch.view_as_complex((weight @ x).view(heads, size // 2, 2)) * torch.polar(torch.ones(3).double(), angles)
    save(tmp_path, {"layers.0.attention.wq.weight": weight, "tok_embeddings.weight": torch.ones(1)})
    found, _ = dcp.read_folder(tmp_path)
    shape = ModelShape.of(LLAMA, VOCABULARY)
    ours = translated(found, ["model.layers.0.self_attn.q_proj.weight"], shape)[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    first, second = (ours.read().view(-1, width) @ x).view(heads, 2, size // 2).unbind(1)
    assert torch.allclose(first * angles.cos() - second * angles.sin(), turned.real)
    assert torch.allclose(first * angles.sin() + second * angles.cos(), turned.imag)


def test_what_has_no_place_in_the_model_is_named_as_it_is_there(tmp_path: Path):
    _, tensors = theirs(tmp_path, "llama")
    made = megatron(tensors, "llama", True, True)
    made["decoder.layers.mlp.linear_fc2.bias"] = torch.ones(2, 24)
    made["decoder.layers.mlp.linear_fc1.weight"] = made["decoder.layers.mlp.linear_fc1.weight"][:, :60]
    as_shards(tmp_path / "dcp", made, (0,))
    with pytest.raises(CheckpointError) as told:
        hub.bring(tmp_path / "dcp", tmp_path / "back.h5", SOLO)
    assert str(told.value).split("\n  ") == [
        f"{tmp_path}/dcp: 3 tensors are not those of its model",
        "model.layers.0.mlp.up_proj.weight: [20, 24], where config.json makes it [40, 24]",
        "model.layers.1.mlp.up_proj.weight: [20, 24], where config.json makes it [40, 24]",
        "decoder.layers.mlp.linear_fc2.bias: no part of this model",
        "take the weights and the config.json of one model",
    ]
