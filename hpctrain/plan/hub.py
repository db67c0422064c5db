"""Hub: how Hugging Face names and keeps the weights of the models that we have, as a table.

A tensor of theirs is some of our weights side by side in the last dim, each as it is or turned: GPT-2's maps are
``[in, out]`` and its queries, keys and values one matrix; all maps of the others are ``[out, in]``. Our experts are
stacked, and each of theirs has tensors of its own. Rotary pairs are the same on both sides
(``hpctrain.model.attention``), so no rows change places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

from hpctrain.plan.layout import piece
from hpctrain.plan.weights import ModelShape, Weight, weights


@dataclass(frozen=True)
class Place:
    """Where one of our weights, or the vector and the matrix of one of our parts, is on their side."""

    name: str  # {} stands for the layer, a second {} for the expert
    turned: bool = False  # whether their matrix is ours the other way round


@dataclass(frozen=True)
class Naming:
    """The names of one kind of model."""

    base: str  # what names begin with, left out in files of a model saved without its head
    places: Mapping[str, Place]
    ignored: str  # names of what files may have beside the weights, as a regular expression


@dataclass(frozen=True)
class Part:
    """One of our weights in a tensor of theirs, or one matrix of a stack."""

    weight: Weight
    turned: bool
    number: int | None = None
    """Which matrix of the stack."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on their side."""
        shape = self.weight.shape if self.number is None else self.weight.shape[1:]
        return shape[::-1] if self.turned else shape


@dataclass(frozen=True)
class Theirs:
    """A tensor of theirs, made of some of our weights."""

    name: str
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return (*self.parts[0].shape[:-1], sum(part.shape[-1] for part in self.parts))

    @property
    def size(self) -> int:
        """Its elements."""
        return prod(self.shape)


QKV = Place("transformer.h.{}.attn.c_attn", turned=True)
GPT2 = Naming(
    "transformer.",
    {
        "embed.tokens": Place("transformer.wte.weight"),
        "embed.positions": Place("transformer.wpe.weight"),
        "attention.norm": Place("transformer.h.{}.ln_1"),
        "attention.query": QKV,
        "attention.key": QKV,
        "attention.value": QKV,
        "attention.out": Place("transformer.h.{}.attn.c_proj"),
        "mlp.norm": Place("transformer.h.{}.ln_2"),
        "mlp.up": Place("transformer.h.{}.mlp.c_fc", turned=True),
        "mlp.down": Place("transformer.h.{}.mlp.c_proj"),
        "head.norm": Place("transformer.ln_f"),
        "head.logits": Place("lm_head"),
    },
    ignored=r"h\.\d+\.attn\.(masked_)?bias$",  # the causal mask, which older releases saved
)
LLAMA = Naming(
    "model.",
    {
        "embed.tokens": Place("model.embed_tokens.weight"),
        "attention.norm": Place("model.layers.{}.input_layernorm"),
        "attention.query": Place("model.layers.{}.self_attn.q_proj"),
        "attention.key": Place("model.layers.{}.self_attn.k_proj"),
        "attention.value": Place("model.layers.{}.self_attn.v_proj"),
        "attention.query_norm": Place("model.layers.{}.self_attn.q_norm"),
        "attention.key_norm": Place("model.layers.{}.self_attn.k_norm"),
        "attention.out": Place("model.layers.{}.self_attn.o_proj", turned=True),
        "mlp.norm": Place("model.layers.{}.post_attention_layernorm"),
        "mlp.gate": Place("model.layers.{}.mlp.gate_proj"),
        "mlp.up": Place("model.layers.{}.mlp.up_proj"),
        "mlp.down": Place("model.layers.{}.mlp.down_proj", turned=True),
        "head.norm": Place("model.norm"),
        "head.logits": Place("lm_head"),
    },
    ignored=r"rotary_emb\.inv_freq$",
)
MIXTRAL = replace(
    LLAMA,
    places=LLAMA.places
    | {
        "mlp.router": Place("model.layers.{}.block_sparse_moe.gate"),
        "mlp.gate": Place("model.layers.{}.block_sparse_moe.experts.{}.w1"),
        "mlp.up": Place("model.layers.{}.block_sparse_moe.experts.{}.w3"),
        "mlp.down": Place("model.layers.{}.block_sparse_moe.experts.{}.w2", turned=True),
    },
)
TIED = "lm_head.weight"  # the embedding once more, in files of some releases


def tensors(naming: Naming, shape: ModelShape) -> tuple[Theirs, ...]:
    """Their tensors for all of our weights, in model order."""
    found: dict[str, list[Part]] = {}
    for weight in weights(shape):
        for number in range(weight.shape[0]) if weight.dims[0] == "expert" else (None,):
            name, turned = _place(naming, weight, number)
            found.setdefault(name, []).append(Part(weight, turned, number))
    return tuple(Theirs(name, tuple(parts)) for name, parts in found.items())


def stacks(wanted: Iterable[Theirs]) -> list[tuple[Theirs, ...]]:
    """Those that are matrices of one of our stacks together, in order; each other one by itself."""
    keys = groupby(wanted, key=lambda one: one.name if one.parts[0].number is None else one.parts[0].weight.name)
    return [tuple(part) for _, part in keys]


def headless(naming: Naming, wanted: Sequence[Theirs], names: Iterable[str]) -> tuple[Theirs, ...]:
    """``wanted`` under the names of a file that leaves out what names begin with, where it does."""
    if any(name.startswith(naming.base) for name in names):
        return tuple(wanted)
    return tuple(Theirs(one.name.removeprefix(naming.base), one.parts) for one in wanted)


def faults(
    naming: Naming, shape: ModelShape, wanted: Sequence[Theirs], found: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """What is wrong with the names and shapes of a file: tensors that it lacks, has too much, or has otherwise."""
    known = {one.name for one in wanted} | ({TIED} if shape.tied else set())
    told = [fault for one in wanted if (fault := _fault(one, found.get(one.name)))]
    extra = (name for name in sorted(found) if name not in known and not re.search(naming.ignored, name))
    return told + [f"{name}: no part of this model" for name in extra]


def shards(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """The numbers of the tensors in each file, in order, each file below ``limit`` bytes or with one tensor alone."""
    files: list[list[int]] = [[]]
    room = limit
    for number, size in enumerate(sizes):
        if files[-1] and size > room:
            files.append([])
            room = limit
        files[-1].append(number)
        room -= size
    return files


def share(sizes: Sequence[int], ranks: int, rank: int) -> list[int]:
    """The numbers of the tensors that a rank works on: neighbours, so that each rank has about as many bytes."""
    start, stop = piece(sum(sizes), ranks, rank)
    own, at = [], 0
    for number, size in enumerate(sizes):
        if start <= at < stop:
            own.append(number)
        at += size
    return own


def _place(naming: Naming, weight: Weight, number: int | None) -> tuple[str, bool]:
    """The name of their tensor, and whether our weight is turned in it."""
    layer, rest = re.fullmatch(r"(?:blocks\.(\d+)\.)?(.*)", weight.name).groups()
    part, _, last = rest.rpartition(".")
    whole = naming.places.get(rest)
    place = whole or naming.places[part]
    name = place.name.format(layer, number)
    return name if whole else f"{name}.{last}", place.turned and len(weight.shape) > 1


def _fault(wanted: Theirs, shape: tuple[int, ...] | None) -> str | None:
    if shape is None:
        return f"{wanted.name}: missing, it would be {list(wanted.shape)}"
    if shape != wanted.shape:
        return f"{wanted.name}: {list(shape)}, where config.json makes it {list(wanted.shape)}"
    return None
