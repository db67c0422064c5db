"""Our families beside Hugging Face's models of the same weights: equal logits, loss and gradients; weights that come
and go.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.checkpoint.disk import Piece, read
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.hub import bring, export
from hpctrain.checkpoint.ranges import flat_bytes
from hpctrain.comm.group import SoloGroup
from hpctrain.config import load
from hpctrain.model.transformer import Transformer
from hpctrain.plan import hub, hub_config
from hpctrain.plan.weights import ModelShape

transformers = pytest.importorskip("transformers", reason="pip install transformers to compare")

VOCABULARY, LENGTH = 61, 24
LLAMA = dict(
    num_hidden_layers=3, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
    vocab_size=VOCABULARY, max_position_embeddings=LENGTH, initializer_range=0.1, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
STRETCHED = dict(
    rope_type="llama3", rope_theta=100.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=12,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": (
        "GPT2",
        dict(
            n_layer=3, n_embd=48, n_head=4, n_positions=LENGTH, vocab_size=VOCABULARY, initializer_range=0.1,
            attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=0, eos_token_id=0,
        ),
    ),
    "Llama 2": ("Llama", LLAMA | dict(num_key_value_heads=4, rms_norm_eps=1e-5)),
    "Llama 3": ("Llama", LLAMA | dict(rope_parameters=dict(rope_type="default", rope_theta=5e5))),
    "Llama 3.1": ("Llama", LLAMA | dict(rope_parameters=STRETCHED)),
    "Llama 3.2": ("Llama", LLAMA | dict(rope_parameters=STRETCHED, tie_word_embeddings=True, head_dim=16)),
    "Qwen 2": ("Qwen2", LLAMA),
    "Qwen 2, tied": ("Qwen2", LLAMA | dict(tie_word_embeddings=True)),
    "Qwen 3": ("Qwen3", LLAMA | dict(head_dim=20)),
    "Qwen 3, tied": ("Qwen3", LLAMA | dict(head_dim=12, tie_word_embeddings=True)),
    "Mistral": ("Mistral", LLAMA | dict(sliding_window=None, head_dim=16)),
    "Mistral, a window that is long enough": ("Mistral", LLAMA | dict(sliding_window=LENGTH)),
    "Mixtral": ("Mixtral", LLAMA | dict(num_local_experts=4)),
    "Mixtral, tied, three of five": (
        "Mixtral",
        LLAMA | dict(num_local_experts=5, num_experts_per_tok=3, tie_word_embeddings=True, head_dim=16),
    ),
}  # fmt: skip
IN_FP64 = dict(experts_implementation="eager")  # their grouped products are of shorter formats alone
every_model = pytest.mark.parametrize("name", MODELS)


def peer(name: str) -> nn.Module:
    """A model of transformers with weights that are all at random, those of norms and biases too."""
    kind, knobs = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**knobs)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, **IN_FP64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.eval()


def ours(path: Path) -> Transformer:
    """The model of an imported checkpoint, made from the configuration beside it."""
    shape = ModelShape.of(load(path.with_suffix(".toml")).model, VOCABULARY)
    model = Transformer(shape)
    slots = {slot.name: slot for slot in read_index(path).slots}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            read(path, [Piece(slots[f"model/{name}"].offset, flat_bytes(parameter))])
    return model


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def as_saved(theirs: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The gradients by the names of saved weights; in memory transformers stacks experts, gate and up in one."""
    for name, parameter in theirs.named_parameters():
        where, experts, kind = name.replace(".mlp.gate", ".block_sparse_moe.gate").partition(".mlp.experts.")
        if not experts or type(theirs).__name__ != "MixtralForCausalLM":
            yield name if type(theirs).__name__ != "MixtralForCausalLM" else where, parameter.grad
            continue
        for number, grad in enumerate(parameter.grad):
            parts = dict(zip(("w1", "w3"), grad.chunk(2), strict=True)) if kind == "gate_up_proj" else {"w2": grad}
            for part, own in parts.items():
                yield f"{where}.block_sparse_moe.experts.{number}.{part}.weight", own


def of_part(part: hub.Part, grad: Tensor) -> Tensor:
    """Our gradient of a weight as their side has it."""
    grad = grad if part.number is None else grad[part.number]
    return grad.t() if part.turned else grad


@every_model
def test_logits_loss_and_gradients_are_those_of_transformers(name: str, tmp_path: Path):
    theirs = peer(name)
    theirs.save_pretrained(tmp_path / "theirs")
    bring(tmp_path / "theirs", tmp_path / "ours.h5", SoloGroup())
    model, theirs = ours(tmp_path / "ours.h5").double(), theirs.double()

    logits = theirs(input_ids=tokens()).logits
    torch.testing.assert_close(model(tokens()), logits, rtol=1e-5, atol=1e-5)
    loss, count = model.loss(tokens(), tokens().roll(-1, 1))
    expected = F.cross_entropy(logits.flatten(0, 1), tokens().roll(-1, 1).flatten())
    torch.testing.assert_close(loss / count, expected, rtol=1e-6, atol=0)
    (loss / count).backward()
    expected.backward()
    naming = hub_config.ARCHITECTURES[type(theirs).__name__].naming
    gradients = dict(as_saved(theirs))
    for one in hub.tensors(naming, model.shape):
        found = [of_part(part, model.get_parameter(part.weight.name).grad) for part in one.parts]
        torch.testing.assert_close(torch.cat(found, -1), gradients[one.name], rtol=1e-4, atol=1e-6, msg=one.name)


@every_model
def test_what_is_brought_and_exported_is_the_same_model_to_transformers(name: str, tmp_path: Path):
    theirs = peer(name)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    bring(tmp_path / "theirs", tmp_path / "ours.h5", SoloGroup())
    made = export(tmp_path / "ours.h5", tmp_path / "again", SoloGroup(), shard_bytes=30_000)
    assert len(made["files"]) > 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert type(again).__name__ == made["architecture"]
    found, expected = again.state_dict(), theirs.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    torch.testing.assert_close(again(tokens()).logits, theirs(tokens()).logits, rtol=1e-6, atol=1e-6)


def test_a_layers_balance_loss_is_that_of_transformers(tmp_path: Path):
    """Of one layer: transformers adds the layers' shares and probabilities up before it multiplies them."""
    knobs = LLAMA | dict(num_hidden_layers=1, num_local_experts=4, router_aux_loss_coef=0.7, output_router_logits=True)
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**knobs), **IN_FP64)
    theirs.save_pretrained(tmp_path / "theirs")
    bring(tmp_path / "theirs", tmp_path / "ours.h5", SoloGroup())
    model, theirs = ours(tmp_path / "ours.h5").double(), theirs.double()
    loss, count = model.loss(tokens()[:, :-1], tokens()[:, 1:], balanced=True)
    plain, _ = model.loss(tokens()[:, :-1], tokens()[:, 1:])
    # Theirs moves the targets itself, and the last token, which has none, counts in the balance.
    expected = theirs(input_ids=tokens()[:, :-1], labels=tokens()[:, :-1]).aux_loss
    torch.testing.assert_close((loss - plain) / count, 0.7 * expected, rtol=1e-6, atol=0, check_dtype=False)
    ((loss - plain) / count).backward()
    (0.7 * expected).backward()
    ours_grad, theirs_grad = (
        one.get_parameter(name).grad
        for one, name in (
            (model, "blocks.0.mlp.router.weight"),
            (theirs, "model.layers.0.mlp.gate.weight"),
        )
    )
    torch.testing.assert_close(ours_grad, theirs_grad, rtol=1e-4, atol=1e-7)


def test_a_model_of_bf16_stays_one(tmp_path: Path):
    theirs = peer("Qwen 3").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "theirs")
    bring(tmp_path / "theirs", tmp_path / "ours.h5", SoloGroup())
    export(tmp_path / "ours.h5", tmp_path / "again", SoloGroup())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in again.state_dict().items())


def test_a_gpt2_saved_without_its_head_comes_in_as_well(tmp_path: Path):
    theirs = peer("GPT-2")
    theirs.transformer.save_pretrained(tmp_path / "theirs")
    config = theirs.config.to_json_string()
    (tmp_path / "theirs/config.json").write_text(config.replace("GPT2Model", "GPT2LMHeadModel"))
    bring(tmp_path / "theirs", tmp_path / "ours.h5", SoloGroup())
    torch.testing.assert_close(ours(tmp_path / "ours.h5")(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-5)
