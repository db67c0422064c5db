"""Foreign: where Megatron-Core and Llama's own code keep the weights that Hugging Face names, as tables.

Each tensor of Hugging Face is some rows of one of theirs. Megatron-Core may stack the layers in one tensor; it has
queries, keys and values in one matrix, group by group (the queries that share a key, that key, its value), the gate
above the way up, and the vocabulary filled up with rows. Llama's own code, and torchtitan, have rotary pairs side by
side, where Hugging Face has the first of all pairs and then the second (``pairs``).

Sources of the facts: Megatron-LM (``core/dist_checkpointing``, ``core/transformer/attention.py``, ``mlp.py``) and
llama-models (``models/llama3/model.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from hpctrain.plan.weights import ModelShape

Rows = tuple[tuple[int, int], ...]  # the first row and how many, each


@dataclass(frozen=True)
class Origin:
    """Where a tensor of Hugging Face comes from: rows of a tensor, or of one layer of a stack of them."""

    name: str
    layer: int | None
    rows: Rows | None
    """None for all of them."""
    pairs: int
    """Rows of a head whose rotary pairs are to be taken apart; 0 where there is nothing to do."""


@dataclass(frozen=True)
class Rule:
    """Names that a tensor may have there, which of its rows are meant, and whether they are rotary pairs."""

    names: tuple[str, ...]
    rows: Callable[[ModelShape], Rows] | None = None
    paired: bool = False


def _grouped(first: Callable[[int], int], count: Callable[[int], int]) -> Callable[[ModelShape], Rows]:
    """Rows in each group, counted in heads; ``first`` and ``count`` get the queries of a group."""

    def rows(shape: ModelShape) -> Rows:
        queries, size = shape.heads // shape.kv_heads, shape.head_dim
        starts = (group * (queries + 2) + first(queries) for group in range(shape.kv_heads))
        return tuple((start * size, count(queries) * size) for start in starts)

    return rows


QUERY = _grouped(lambda queries: 0, lambda queries: queries)
KEY = _grouped(lambda queries: queries, lambda queries: 1)
VALUE = _grouped(lambda queries: queries + 1, lambda queries: 1)


def _vocabulary(shape: ModelShape) -> Rows:
    return ((0, shape.vocabulary),)


def _gate(shape: ModelShape) -> Rows:
    return ((0, shape.mlp_width),)


def _up(shape: ModelShape) -> Rows:
    return ((shape.mlp_width, shape.mlp_width),)


# By what Hugging Face calls them. {} in a name there is the layer with a dot after it, or nothing in a stack.
MEGATRON = {
    "model.embed_tokens.weight": Rule(("embedding.word_embeddings.weight",), _vocabulary),
    "model.norm.weight": Rule(("decoder.final_layernorm.weight",)),
    "lm_head.weight": Rule(("output_layer.weight",), _vocabulary),
    "input_layernorm.weight": Rule(
        ("decoder.layers.{}self_attention.linear_qkv.layer_norm_weight", "decoder.layers.{}input_layernorm.weight")
    ),
    "post_attention_layernorm.weight": Rule(
        ("decoder.layers.{}mlp.linear_fc1.layer_norm_weight", "decoder.layers.{}pre_mlp_layernorm.weight")
    ),
    **{
        f"self_attn.{part}_proj.{kind}": Rule((f"decoder.layers.{{}}self_attention.linear_qkv.{kind}",), rows)
        for part, rows in (("q", QUERY), ("k", KEY), ("v", VALUE))
        for kind in ("weight", "bias")
    },
    "self_attn.q_norm.weight": Rule(("decoder.layers.{}self_attention.q_layernorm.weight",)),
    "self_attn.k_norm.weight": Rule(("decoder.layers.{}self_attention.k_layernorm.weight",)),
    "self_attn.o_proj.weight": Rule(("decoder.layers.{}self_attention.linear_proj.weight",)),
    "mlp.gate_proj.weight": Rule(("decoder.layers.{}mlp.linear_fc1.weight",), _gate),
    "mlp.up_proj.weight": Rule(("decoder.layers.{}mlp.linear_fc1.weight",), _up),
    "mlp.down_proj.weight": Rule(("decoder.layers.{}mlp.linear_fc2.weight",)),
}
META = {
    "model.embed_tokens.weight": Rule(("tok_embeddings.weight",)),
    "model.norm.weight": Rule(("norm.weight",)),
    "lm_head.weight": Rule(("output.weight",)),
    "input_layernorm.weight": Rule(("layers.{}attention_norm.weight",)),
    "post_attention_layernorm.weight": Rule(("layers.{}ffn_norm.weight",)),
    "self_attn.q_proj.weight": Rule(("layers.{}attention.wq.weight",), paired=True),
    "self_attn.k_proj.weight": Rule(("layers.{}attention.wk.weight",), paired=True),
    "self_attn.v_proj.weight": Rule(("layers.{}attention.wv.weight",)),
    "self_attn.o_proj.weight": Rule(("layers.{}attention.wo.weight",)),
    "mlp.gate_proj.weight": Rule(("layers.{}feed_forward.w1.weight",)),
    "mlp.up_proj.weight": Rule(("layers.{}feed_forward.w3.weight",)),
    "mlp.down_proj.weight": Rule(("layers.{}feed_forward.w2.weight",)),
}
KINDS: dict[str, Mapping[str, Rule]] = {  # a name that only this kind has -> its rules
    "embedding.word_embeddings.weight": MEGATRON,
    "tok_embeddings.weight": META,
}


def origins(wanted: Collection[str], names: Collection[str], shape: ModelShape) -> dict[str, Origin]:
    """Where each of ``wanted``, names of Hugging Face, comes from among ``names``; empty where none are foreign."""
    rules = next((rules for name, rules in KINDS.items() if name in names), {})
    return dict(_found(wanted, names, rules, shape))


def _found(
    wanted: Collection[str], names: Collection[str], rules: Mapping[str, Rule], shape: ModelShape
) -> Iterator[tuple[str, Origin]]:
    for name in wanted:
        layer, rest = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)", name).groups()
        rule = rules.get(rest)
        if rule is None:
            continue
        rows, pairs = rule.rows and rule.rows(shape), shape.head_dim if rule.paired else 0
        alone = {there.format(f"{layer}."): None for there in rule.names}
        stacked = {there.format(""): layer and int(layer) for there in rule.names}
        for there, number in (alone | stacked).items():
            if there in names:
                yield name, Origin(there, number, rows, pairs)
                break
