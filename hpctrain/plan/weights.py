"""Weights: every parameter of a model as a value, before any tensor exists.

``ModelShape`` is ``ModelConfig`` with every default filled in; ``weights(shape)`` lists the model's parameters in
model order. Their names are the ones in checkpoints: ``embed...``, ``blocks.N...`` and ``head...``, the three parts
that a pipeline may place apart.

Matrices are kept so that cutting dim 0 is what tensor parallelism wants, and each shard is one contiguous run:

* a matrix whose outputs are cut (query, key, value, gate, up, head) is ``[out, in]`` and used as ``x @ w.T``;
* a matrix whose inputs are cut (attention's out, down) is ``[in, out]`` and used as ``x @ w``;
* the matrices of experts are stacks of such, ``[expert, ...]``, that are cut between experts.

The dims have names, so that a rule can say "heads are cut over tp" once for all weights: ``vocabulary``, ``width``,
``sequence``, ``mlp``, ``head_dim``, ``heads`` and ``kv_heads``, which count heads x head_dim rows, ``expert``,
``inner`` (of an expert), and ``choice``, of which the router has a row for each expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpctrain.config import ModelConfig
from hpctrain.errors import ConfigError


@dataclass(frozen=True)
class Family:
    """The habits of a family of models; a row of ``FAMILIES``."""

    norm: str  # a key of NORMS
    positions: str  # "learned": a table added to the embedding; "rotary": queries and keys are turned
    mlp: str  # a key of MLPS
    bias: tuple[str, ...]  # the linear maps that have a bias
    head_norm: bool  # whether each head of queries and of keys is normed
    tied: bool  # whether the head uses the embedding's weight
    mlp_ratio: tuple[int, int, int]  # mlp_width = numerator/denominator x width, rounded up to a multiple
    experts: tuple[int, int] = (0, 0)  # how many, and how many of them a token goes to; none where a block has one mlp


QKV = ("query", "key", "value")
GPT2 = Family("layer", "learned", "gelu", (*QKV, "out", "up", "down"), head_norm=False, tied=True, mlp_ratio=(4, 1, 1))
LLAMA = Family("rms", "rotary", "swiglu", (), head_norm=False, tied=False, mlp_ratio=(8, 3, 64))
FAMILIES = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen2": replace(LLAMA, bias=QKV),
    "qwen3": replace(LLAMA, head_norm=True),
    "mixtral": replace(LLAMA, mlp="experts", experts=(8, 2)),
}
NORMS = {"layer": ("weight", "bias"), "rms": ("weight",)}  # kind -> its vectors
MLPS = {"gelu": ("up",), "swiglu": ("gate", "up"), "experts": ("gate", "up")}  # kind -> matrices before its activation


@dataclass(frozen=True)
class ModelShape:
    """A transformer with every number and every habit decided."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    sequence: int
    vocabulary: int
    norm: str
    positions: str
    mlp: str
    bias: tuple[str, ...]
    head_norm: bool
    tied: bool
    dropout: float
    rope_base: float
    rope_scaling: tuple[float, ...] | None
    norm_epsilon: float
    init_std: float
    experts: int
    """0 where a block has one feed-forward part for all tokens."""
    experts_per_token: int
    balance_loss: float

    @classmethod
    def of(cls, config: ModelConfig, vocabulary: int) -> ModelShape:
        """Fill in what ``config`` leaves open; ``vocabulary`` is the tokenizer's number of tokens."""
        habits = FAMILIES[config.family]
        experts, per_token = _experts_of(config, *habits.experts)
        shape = cls(
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads or config.heads,
            head_dim=config.head_dim or config.width // config.heads,
            mlp_width=config.mlp_width or _mlp_width(config.width, *habits.mlp_ratio),
            sequence=config.sequence,
            vocabulary=vocabulary if config.vocabulary == "auto" else config.vocabulary,
            norm=habits.norm,
            positions=habits.positions,
            mlp=habits.mlp,
            bias=habits.bias,
            head_norm=habits.head_norm,
            tied=habits.tied if config.tied is None else config.tied,
            dropout=config.dropout,
            rope_base=config.rope_base,
            rope_scaling=config.rope_scaling,
            norm_epsilon=config.norm_epsilon,
            init_std=config.init_std,
            experts=experts,
            experts_per_token=per_token,
            balance_loss=config.balance_loss if experts else 0.0,
        )
        _check(shape, vocabulary)
        return shape


@dataclass(frozen=True)
class Weight:
    """One parameter: its global name and shape, and what it starts from: ``mean + std x normal``."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]  # a logical name for each dim
    mean: float = 0.0
    std: float = 0.0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: to matrices and stacks of them, not to vectors (biases and norms)."""
        return len(self.shape) > 1


def weights(shape: ModelShape) -> tuple[Weight, ...]:
    """Every parameter of the model, once, in the order of the forward pass."""
    return (
        *_embed(shape),
        *(weight for layer in range(shape.layers) for weight in block(shape, layer)),
        *_head(shape),
    )


def parameters(shape: ModelShape) -> int:
    """How many numbers the model learns; a tied weight counts once."""
    return sum(weight.size for weight in weights(shape))


def flops_per_token(shape: ModelShape) -> int:
    """Model FLOPs to train on one token: forward and backward, without recomputation.

    Each element of a matrix that multiplies takes 2 FLOPs forward and 4 backward; of experts as many count as a token
    goes to; the head counts also when tied, the lookup of embeddings does not. Attention's two products take
    12 x layers x heads x head_dim x sequence, every token seeing the whole sequence: by convention (PaLM, appendix B)
    the causal mask's saving is not subtracted.
    """
    head = shape.vocabulary * shape.width
    attention = 12 * shape.layers * shape.heads * shape.head_dim * shape.sequence
    return 6 * (shape.layers * multiplied(shape) + head) + attention


def multiplied(shape: ModelShape) -> int:
    """How many elements of a block's matrices a token is multiplied with: of experts, those that it goes to."""
    matrices = [weight for weight in block(shape, 0) if len(weight.shape) > 1]
    alone = sum(weight.size for weight in matrices if weight.dims[0] != "expert")
    stacked = sum(weight.size for weight in matrices if weight.dims[0] == "expert")
    return alone + (stacked // shape.experts * shape.experts_per_token if shape.experts else 0)


def block(shape: ModelShape, layer: int) -> Iterator[Weight]:
    """The parameters of one transformer block."""
    attention, mlp = f"blocks.{layer}.attention", f"blocks.{layer}.mlp"
    residual_std = shape.init_std / math.sqrt(2 * shape.layers)  # 2 x layers branches add up to one variance (GPT-2)
    yield from _norm(shape, f"{attention}.norm")
    yield from _spread(shape, attention, "query", "heads")
    yield from _spread(shape, attention, "key", "kv_heads")
    yield from _spread(shape, attention, "value", "kv_heads")
    for name in ("query_norm", "key_norm") if shape.head_norm else ():
        yield from _norm(shape, f"{attention}.{name}", "head_dim")
    yield from _gather(shape, attention, "out", "heads", residual_std)
    yield from _norm(shape, f"{mlp}.norm")
    if shape.experts:
        yield from _experts(shape, mlp, residual_std)
        return
    for name in MLPS[shape.mlp]:
        yield from _spread(shape, mlp, name, "mlp")
    yield from _gather(shape, mlp, "down", "mlp", residual_std)


def _embed(shape: ModelShape) -> Iterator[Weight]:
    yield _weight(shape, "embed.tokens", ("vocabulary", "width"), std=shape.init_std)
    if shape.positions == "learned":
        yield _weight(shape, "embed.positions", ("sequence", "width"), std=shape.init_std)


def _head(shape: ModelShape) -> Iterator[Weight]:
    yield from _norm(shape, "head.norm")
    if not shape.tied:
        yield _weight(shape, "head.logits.weight", ("vocabulary", "width"), std=shape.init_std)


def _norm(shape: ModelShape, name: str, dim: str = "width") -> Iterator[Weight]:
    for vector in NORMS[shape.norm]:
        yield _weight(shape, f"{name}.{vector}", (dim,), mean=1.0 if vector == "weight" else 0.0)


def _spread(shape: ModelShape, part: str, name: str, dim: str) -> Iterator[Weight]:
    """A linear map from the width to a dim that may be cut: its matrix is ``[out, in]``."""
    yield _weight(shape, f"{part}.{name}.weight", (dim, "width"), std=shape.init_std)
    if name in shape.bias:
        yield _weight(shape, f"{part}.{name}.bias", (dim,))


def _gather(shape: ModelShape, part: str, name: str, dim: str, std: float) -> Iterator[Weight]:
    """A linear map from a dim that may be cut back to the width: its matrix is ``[in, out]``."""
    yield _weight(shape, f"{part}.{name}.weight", (dim, "width"), std=std)
    if name in shape.bias:
        yield _weight(shape, f"{part}.{name}.bias", ("width",))


def _experts(shape: ModelShape, part: str, std: float) -> Iterator[Weight]:
    """A router, ``[choice, width]``, and for each expert the three maps of a gated feed-forward part, stacked."""
    stack = ("expert", "inner", "width")
    yield _weight(shape, f"{part}.router.weight", ("choice", "width"), std=shape.init_std)
    for name in MLPS[shape.mlp]:
        yield _weight(shape, f"{part}.{name}.weight", stack, std=shape.init_std)
    yield _weight(shape, f"{part}.down.weight", stack, std=std)


def _weight(shape: ModelShape, name: str, dims: tuple[str, ...], mean: float = 0.0, std: float = 0.0) -> Weight:
    sizes = {
        "vocabulary": shape.vocabulary,
        "width": shape.width,
        "sequence": shape.sequence,
        "mlp": shape.mlp_width,
        "head_dim": shape.head_dim,
        "heads": shape.heads * shape.head_dim,
        "kv_heads": shape.kv_heads * shape.head_dim,
        "expert": shape.experts,
        "inner": shape.mlp_width,
        "choice": shape.experts,
    }
    return Weight(name, tuple(sizes[dim] for dim in dims), dims, mean, std)


def _mlp_width(width: int, numerator: int, denominator: int, multiple: int) -> int:
    return -(-width * numerator // (denominator * multiple)) * multiple


def _experts_of(config: ModelConfig, usual: int, usual_per_token: int) -> tuple[int, int]:
    """How many experts there are, and how many a token goes to: none, where a family has none."""
    given = {key: getattr(config, key) for key in ("experts", "experts_per_token") if getattr(config, key) is not None}
    if given and not usual:
        told = " and ".join(f"model.{key} = {value}" for key, value in given.items())
        raise ConfigError(
            f'{told} with model.family = "{config.family}"',
            "its blocks have one feed-forward part for all tokens",
            f'set model.family to "mixtral", or leave {" and ".join(f"model.{key}" for key in given)} out',
        )
    experts, per_token = config.experts or usual, config.experts_per_token or usual_per_token
    if per_token > experts:
        raise ConfigError(
            f"model.experts_per_token = {per_token} is more than model.experts = {experts}",
            "a token goes to so many different experts",
            f"set model.experts_per_token to {experts} or less, or model.experts to {per_token} or more",
        )
    return experts, per_token


def _check(shape: ModelShape, vocabulary: int) -> None:
    if shape.vocabulary < vocabulary:
        raise ConfigError(
            f"model.vocabulary = {shape.vocabulary} is less than the tokenizer's {vocabulary} tokens",
            "a token beyond the embedding has no vector",
            f'set model.vocabulary to {vocabulary} or more, or leave it "auto"',
        )
    if shape.positions == "rotary" and shape.head_dim % 2:
        raise ConfigError(
            f"model.head_dim, or model.width / model.heads, = {shape.head_dim} is odd",
            "rotary positions turn the dimensions of a head in pairs",
            "choose a width that is an even multiple of model.heads, or an even model.head_dim",
        )
