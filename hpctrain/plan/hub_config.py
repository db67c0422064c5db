"""Hub config: Hugging Face's ``config.json`` as the section ``[model]`` of ours, and back.

What our models cannot do is refused with its reason: a model that computes something else than its file says would
load without a word.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.config import ModelConfig, parse
from hpctrain.errors import ConfigError
from hpctrain.plan import hub
from hpctrain.plan.weights import FAMILIES, ModelShape

GPT2_KEYS = {  # ours -> theirs
    "layers": "n_layer",
    "width": "n_embd",
    "heads": "n_head",
    "mlp_width": "n_inner",
    "sequence": "n_positions",
    "vocabulary": "vocab_size",
    "dropout": "resid_pdrop",
    "tied": "tie_word_embeddings",
    "norm_epsilon": "layer_norm_epsilon",
    "init_std": "initializer_range",
}
LLAMA_KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_width": "intermediate_size",
    "sequence": "max_position_embeddings",
    "vocabulary": "vocab_size",
    "tied": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "init_std": "initializer_range",
}
MIXTRAL_KEYS = LLAMA_KEYS | {
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "balance_loss": "router_aux_loss_coef",
}
# What transformers takes where a file says nothing; a key that is not here must be there.
GPT2_ABSENT = {"mlp_width": None, "dropout": 0.1, "tied": True, "norm_epsilon": 1e-5, "init_std": 0.02}
LLAMA_ABSENT = {"kv_heads": None, "head_dim": None, "tied": False, "norm_epsilon": 1e-6, "init_std": 0.02}
MIXTRAL_ABSENT = LLAMA_ABSENT | {
    "kv_heads": 8,
    "norm_epsilon": 1e-5,
    "experts": 8,
    "experts_per_token": 2,
    "balance_loss": 0.001,
    "rope_base": 1e6,
    "window": None,
}

NO_BIAS = "our models of this family have no such biases"
NEEDS = {  # their key -> the values that our models can do, and why no other; a key that is absent is one of them
    "activation_function": (("gelu_new", "gelu_pytorch_tanh"), "ours is the tanh form of GELU, as in GPT-2"),
    "scale_attn_weights": ((True,), "our attention always divides by the root of the head's dimensions"),
    "scale_attn_by_inverse_layer_idx": ((False,), "our attention is the same in all layers"),
    "add_cross_attention": ((False,), "our models are decoders alone"),
    "hidden_act": (("silu", "swish"), "our gated feed-forward part has SiLU"),
    "attention_bias": ((False,), NO_BIAS),
    "mlp_bias": ((False,), NO_BIAS),
    "partial_rotary_factor": ((None, 1, 1.0), "our rotary positions turn all dimensions of a head"),
    "router_jitter_noise": ((0, 0.0), "our router chooses without noise"),
    "quantization_config": ((None,), "its numbers are quantised, and ours are plain"),
}


@dataclass(frozen=True)
class Architecture:
    """A class of transformers that one of our families computes; a row of ``ARCHITECTURES``."""

    family: str
    model_type: str
    naming: hub.Naming
    keys: Mapping[str, str]
    absent: Mapping[str, Any]
    window: bool = False  # whether its sliding window needs no use_sliding_window to be used


ARCHITECTURES = {  # of those of one family, the first is what we export
    "GPT2LMHeadModel": Architecture("gpt2", "gpt2", hub.GPT2, GPT2_KEYS, GPT2_ABSENT),
    "LlamaForCausalLM": Architecture("llama", "llama", hub.LLAMA, LLAMA_KEYS, LLAMA_ABSENT),
    "MistralForCausalLM": Architecture("llama", "mistral", hub.LLAMA, LLAMA_KEYS, LLAMA_ABSENT, window=True),
    "Qwen2ForCausalLM": Architecture("qwen2", "qwen2", hub.LLAMA, LLAMA_KEYS, LLAMA_ABSENT),
    "Qwen3ForCausalLM": Architecture("qwen3", "qwen3", hub.LLAMA, LLAMA_KEYS, LLAMA_ABSENT | {"head_dim": 128}),
    "MixtralForCausalLM": Architecture("mixtral", "mixtral", hub.MIXTRAL, MIXTRAL_KEYS, MIXTRAL_ABSENT, window=True),
}
EXPERTS = "its experts are not Mixtral's, which are the only ones that our models have"
REFUSED = dict.fromkeys(("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"), EXPERTS)
WINDOW, ROPE_BASE = 4096, 10000.0  # where a file, and ABSENT of its kind, say nothing


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The row for a ``config.json``. Raises ConfigError for what our models cannot be."""
    types = {one.model_type: name for name, one in ARCHITECTURES.items()}
    told = (config.get("architectures") or [types.get(config.get("model_type"))])[0]
    if told in ARCHITECTURES:
        return ARCHITECTURES[told]
    raise ConfigError(
        f"config.json: the architecture {told or config.get('model_type')} cannot be imported",
        REFUSED.get(told, "no family of ours computes it"),
        f"choose one of {', '.join(ARCHITECTURES)}",
    )


def ours(config: Mapping[str, Any], sequence: int | None = None) -> ModelConfig:
    """The model of a ``config.json``; ``sequence`` takes the place of the length that it tells.

    Raises ConfigError for what our models cannot compute, or where a key is missing or has a value that cannot be.
    """
    row = architecture(config)
    for key, (values, why) in NEEDS.items():
        if key in config and config[key] not in values:
            raise _refused(key, config[key], why)
    found = {key: _value(config, row, key, name) for key, name in row.keys.items()} | {"family": row.family}
    found |= {"sequence": sequence or found["sequence"]} | (
        _rope(config, row) if FAMILIES[row.family].positions == "rotary" else {}
    )
    model = parse({"model": {key: value for key, value in found.items() if value is not None}}).model
    _check_window(config, row, model.sequence)
    usual = model.head_dim is not None and model.head_dim * model.heads == model.width
    return model.model_copy(update={"head_dim": None}) if usual else model


def theirs(model: ModelConfig, vocabulary: int, dtype: str) -> dict[str, Any]:
    """The ``config.json`` of a model with so many tokens. Raises ConfigError for what theirs cannot be."""
    name, row = next((name, row) for name, row in ARCHITECTURES.items() if row.family == model.family)
    shape = ModelShape.of(model, vocabulary)
    _check_heads(shape, row)
    told = {key: getattr(shape, ours) for ours, key in row.keys.items()}
    told |= {"architectures": [name], "model_type": row.model_type, "torch_dtype": dtype}
    told |= dict.fromkeys(("bos_token_id", "eos_token_id"))  # the tokenizer's matter, and not known here
    if shape.positions == "learned":
        return told | {"activation_function": "gelu_new", "embd_pdrop": shape.dropout, "attn_pdrop": 0.0}
    return told | {"hidden_act": "silu", "rope_theta": shape.rope_base, "rope_scaling": _scaling(shape)}


def toml(model: ModelConfig) -> str:
    """The section ``[model]`` of a configuration."""
    told = model.model_dump(exclude_none=True)
    return "[model]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in told.items())


def _value(config: Mapping[str, Any], row: Architecture, key: str, name: str) -> Any:
    if name not in config and key not in row.absent:
        raise ConfigError(
            f"config.json has no {name}", f"model.{key} is not known without it", "take a complete config.json"
        )
    return config.get(name, row.absent.get(key))


def _check_window(config: Mapping[str, Any], row: Architecture, sequence: int) -> None:
    used = row.window or config.get("use_sliding_window", False)
    window = config.get("sliding_window", row.absent.get("window", WINDOW)) if used else None
    if window is not None and window < sequence:
        raise ConfigError(
            f"config.json: sliding_window = {window} is shorter than the sequence of {sequence} tokens",
            "our attention sees every token before it in the sample",
            f"import it with --sequence {window} or less, where both are the same",
        )


def _rope(config: Mapping[str, Any], row: Architecture) -> dict[str, Any]:
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = told.get("rope_type", told.get("type", "default"))
    base = told.get("rope_theta", config.get("rope_theta", row.absent.get("rope_base", ROPE_BASE)))
    values, why = NEEDS["partial_rotary_factor"]
    if told.get("partial_rotary_factor") not in values:
        raise _refused("partial_rotary_factor", told["partial_rotary_factor"], why)
    if kind == "default" and not any(isinstance(value, dict) for value in told.values()):
        return {"rope_base": base}
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if kind != "llama3" or not all(key in told for key in keys):
        raise _refused("rope_scaling", told, 'our rotary positions are as they are, or stretched as "llama3" is')
    return {"rope_base": base, "rope_scaling": [told[key] for key in keys]}


def _scaling(shape: ModelShape) -> dict[str, Any] | None:
    if shape.rope_scaling is None:
        return None
    factor, low, high, length = shape.rope_scaling
    return {
        "rope_type": "llama3",
        "factor": float(factor),
        "low_freq_factor": float(low),
        "high_freq_factor": float(high),
        "original_max_position_embeddings": int(length),
    }


def _check_heads(shape: ModelShape, row: Architecture) -> None:
    if "kv_heads" not in row.keys and (shape.kv_heads, shape.head_dim * shape.heads) != (shape.heads, shape.width):
        raise ConfigError(
            f"a {row.family} of {shape.heads} heads of {shape.head_dim} dimensions, {shape.kv_heads} of keys and"
            f" values, and the width {shape.width} cannot be exported",
            "in GPT-2 as Hugging Face has it, each head has its own keys and values, and width / heads dimensions",
            "export it from your own code, with the weights that hpctrain ckpt inspect lists",
        )


def _refused(key: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"config.json: {key} = {json.dumps(value)} cannot be imported", why, "choose another model")
