"""The section ``[model]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hpctrain.config.section import Auto, Section
from hpctrain.errors import ConfigError


class ModelConfig(Section):
    """A decoder-only transformer."""

    family: Literal["gpt2", "llama", "qwen2", "qwen3", "mixtral"] = "gpt2"
    """``gpt2``: learned positions, LayerNorm, GELU, biases, tied embeddings. ``llama``: rotary positions, RMSNorm,
    SwiGLU, no biases. ``qwen2``: the same with biases of queries, keys and values. ``qwen3``: with norms of each head
    of queries and keys instead. ``mixtral``: as ``llama``, its feed-forward part a choice of experts for each token."""
    layers: int = Field(4, ge=1)
    """Transformer blocks."""
    width: int = Field(256, ge=1)
    """Size of a token's hidden state."""
    heads: int = Field(4, ge=1)
    """Attention heads."""
    head_dim: int | None = Field(None, ge=1)
    """Dimensions of each head; width / heads when not given."""
    kv_heads: int | None = Field(None, ge=1)
    """Heads of keys and values, shared by heads / kv_heads query heads each; as many as ``heads`` when not given."""
    mlp_width: int | None = Field(None, ge=1)
    """Hidden size of the feed-forward part, or of each expert; 4 x width for gpt2, 8/3 x width rounded up to 64 for
    others."""
    experts: int | None = Field(None, ge=1)
    """Experts of each block of a ``mixtral``; 8 when not given."""
    experts_per_token: int | None = Field(None, ge=1)
    """Experts that each token goes to; 2 when not given."""
    balance_loss: float = Field(0.02, ge=0.0)
    """What the balance loss of experts counts in the loss that is trained, not in validation: this times the mean
    over blocks. It is ``experts_per_token`` where all are used alike, and more where some are preferred."""
    sequence: int = Field(256, ge=1)
    """Tokens in a sample."""
    vocabulary: int | Auto = "auto"
    """Tokens known to the embedding; ``auto`` takes the tokenizer's own number."""
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    """Part of the activations set to zero after embedding, attention and feed-forward."""
    tied: bool | None = None
    """Whether the output shares the embedding's weight; the family's habit when not given."""
    rope_base: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: tuple[float, ...] | None = Field(None, strict=False, min_length=4, max_length=4)
    """How slow rotary frequencies are stretched, as in Llama 3.1, for samples longer than those trained on before:
    factor, low and high frequency factor, and that former length, e.g. ``[8, 1, 4, 8192]``."""
    norm_epsilon: float = Field(1e-5, gt=0)
    """Added under the root of a norm."""
    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights; outputs of residual branches get it divided by sqrt(2 x layers)."""

    @model_validator(mode="after")
    def _heads_divide(self) -> ModelConfig:
        if self.head_dim is None:
            _check_divides(self, "heads", "width", "each head gets width / heads dimensions")
        _check_divides(self, "kv_heads", "heads", "each key-value head serves equally many heads")
        return self


def _check_divides(model: Section, part_key: str, whole_key: str, why: str) -> None:
    whole, part = getattr(model, whole_key), getattr(model, part_key)
    if part is not None and whole % part:
        fitting = [n for n in range(1, whole + 1) if whole % n == 0]
        near = [max(n for n in fitting if n < part), *[n for n in fitting if n > part][:1]]
        what = f"model.{part_key} = {part} does not divide model.{whole_key} = {whole}"
        mend = f"set model.{part_key} to {' or '.join(map(str, near))}, or change model.{whole_key}"
        raise ConfigError(what, why, mend)
