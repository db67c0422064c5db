"""Our families beside Hugging Face's models of the same weights: equal logits, loss and gradients."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config import ModelConfig
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import ModelShape

transformers = pytest.importorskip("transformers", reason="pip install transformers to compare")

VOCABULARY, LENGTH = 61, 24
NAMES = {  # ours -> theirs; {} is the layer
    "gpt2": {
        "embed.tokens": "transformer.wte.weight",
        "embed.positions": "transformer.wpe.weight",
        "attention.norm": "transformer.h.{}.ln_1",
        "attention.out": "transformer.h.{}.attn.c_proj",
        "mlp.norm": "transformer.h.{}.ln_2",
        "mlp.up": "transformer.h.{}.mlp.c_fc",
        "mlp.down": "transformer.h.{}.mlp.c_proj",
        "head.norm": "transformer.ln_f",
    },
    "llama": {
        "embed.tokens": "model.embed_tokens.weight",
        "attention.norm": "model.layers.{}.input_layernorm",
        "attention.query": "model.layers.{}.self_attn.q_proj",
        "attention.key": "model.layers.{}.self_attn.k_proj",
        "attention.value": "model.layers.{}.self_attn.v_proj",
        "attention.out": "model.layers.{}.self_attn.o_proj",
        "mlp.norm": "model.layers.{}.post_attention_layernorm",
        "mlp.gate": "model.layers.{}.mlp.gate_proj",
        "mlp.up": "model.layers.{}.mlp.up_proj",
        "mlp.down": "model.layers.{}.mlp.down_proj",
        "head.norm": "model.norm",
        "head.logits": "lm_head",
    },
}
TURNED = {  # matrices that they keep the other way round
    "gpt2": ("attention.query.weight", "attention.key.weight", "attention.value.weight", "mlp.up.weight"),
    "llama": ("attention.out.weight", "mlp.down.weight"),
}


def gpt2(shape: ModelShape) -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=shape.layers, n_embd=shape.width, n_head=shape.heads, n_positions=shape.sequence,
        vocab_size=shape.vocabulary, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(shape: ModelShape) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.mlp_width, vocab_size=shape.vocabulary,
        rms_norm_eps=shape.norm_epsilon, max_position_embeddings=shape.sequence, tie_word_embeddings=shape.tied,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base}, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


PEERS = {"gpt2": gpt2, "llama": llama}


def theirs(family: str, name: str, tensors: dict[str, Tensor]) -> Tensor:
    """Their tensor for our parameter ``name``, turned our way."""
    layer, rest = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.*)", name).groups()
    fused = re.fullmatch(r"attention\.(query|key|value)\.(weight|bias)", rest)
    if family == "gpt2" and fused:
        part = ("query", "key", "value").index(fused[1])
        tensor = tensors[f"transformer.h.{layer}.attn.c_attn.{fused[2]}"].chunk(3, -1)[part]
    else:
        ours = next(known for known in NAMES[family] if rest == known or rest.startswith(known + "."))
        tensor = tensors[NAMES[family][ours].format(layer) + rest.removeprefix(ours)]
    return tensor.t() if rest in TURNED[family] else tensor


@pytest.mark.parametrize("knobs", [dict(family="gpt2"), dict(family="llama"), dict(family="llama", kv_heads=2)])
def test_logits_loss_and_gradients_are_those_of_transformers(knobs):
    config = ModelConfig(layers=3, width=48, heads=4, sequence=LENGTH, init_std=0.1, **knobs)
    shape = ModelShape.of(config, VOCABULARY)
    ours, peer = Transformer(shape).double(), PEERS[config.family](shape).double()
    initialise(ours, shape, seed=1)
    values = dict(peer.named_parameters())
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if not name.endswith("norm.weight"):
                theirs(config.family, name, values).copy_(parameter)
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)

    logits = peer(input_ids=tokens).logits
    torch.testing.assert_close(ours(tokens), logits, rtol=1e-5, atol=1e-5)
    loss, count = ours.loss(tokens, targets)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss / count, expected, rtol=1e-6, atol=0)
    (loss / count).backward()
    expected.backward()
    gradients = {name: value.grad for name, value in values.items()}
    for name, parameter in ours.named_parameters():
        expected = theirs(config.family, name, gradients)
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6, msg=name)
