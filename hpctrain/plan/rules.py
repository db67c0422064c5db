"""Rules: which dims of a weight are cut over which axes of the mesh, by the dims' names.

Tensor parallelism cuts dim 0 of every matrix of a block, and of the embedding and the head (``hpctrain.plan.weights``
keeps the dim to be cut first); all else, norms and what is added after a sum over ranks, every rank has whole. The
pieces are those of ``hpctrain.plan.layout.piece``: any vocabulary and any mlp width will do, and nothing is padded.
Heads and experts are cut in whole ones, so their numbers must divide.

Ranks may outnumber the heads of keys and values. Each such head is then on several ranks, and the ranks have two axes:
``tp`` over the heads of keys and values, and within it ``tp_copy`` over ranks that have the same one. Where the mesh
has no ``tp_copy``, an axis of size 1, every rank has heads of its own, by the same rules.
"""

from __future__ import annotations

from hpctrain.errors import PlanError
from hpctrain.plan.layout import Box, Cut, Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.weights import ModelShape, Weight, weights

TP, COPY = "tp", "tp_copy"
TENSOR = (TP, COPY)  # along which ranks share every product

RULES = {
    "heads": TENSOR,
    "kv_heads": (TP,),
    "mlp": TENSOR,
    "vocabulary": TENSOR,
    "expert": TENSOR,
}


def axes(shape: ModelShape, ranks: int) -> tuple[tuple[str, int], ...]:
    """The axes of ``ranks`` tensor-parallel ranks, outermost first. Refuses a number that cuts heads in pieces."""
    check(shape, ranks)
    copies = max(1, ranks // shape.kv_heads)
    return ((TP, ranks // copies), *([(COPY, copies)] if copies > 1 else []))


def split(mesh: Mesh, shape: ModelShape) -> Mesh:
    """The same mesh with its axis ``tp`` seen as the axes that the heads of this model want."""
    found = []
    for name, size in mesh.axes:
        found += axes(shape, size) if name == TP else [(name, size)]
    return mesh.regroup(*found)


def check(shape: ModelShape, ranks: int) -> None:
    """Refuse a number of tensor-parallel ranks that does not fit the model, and name those that do."""
    if ranks not in (fit := fitting(shape)):
        raise PlanError(
            f"parallel.tp = {ranks} does not fit a model of {shape.heads} heads, {shape.kv_heads} of keys and values"
            + f", {shape.experts} experts" * (shape.experts > 0)
            + f", and {shape.vocabulary} tokens" * (shape.vocabulary < ranks),
            "each rank takes whole heads, as many of keys and values or a copy of one, "
            + "whole experts, " * (shape.experts > 0)
            + "and a part of the vocabulary",
            f"set parallel.tp to one of {', '.join(map(str, fit))}",
        )


def fitting(shape: ModelShape) -> tuple[int, ...]:
    """The numbers of ranks that a model's heads and experts can be cut over."""
    divisors = (ranks for ranks in range(1, shape.heads + 1) if shape.heads % ranks == 0)
    whole = (ranks for ranks in divisors if shape.kv_heads % ranks == 0 or ranks % shape.kv_heads == 0)
    return tuple(ranks for ranks in whole if ranks <= shape.vocabulary and shape.experts % ranks == 0)


def cuts(weight: Weight) -> tuple[Cut, ...]:
    """How a weight is cut: in dim 0, or not at all."""
    return tuple(Cut(dim, RULES[name]) for dim, name in enumerate(weight.dims) if name in RULES)


def layouts(shape: ModelShape, dtype: str) -> dict[str, Layout]:
    """Where each weight of the model lies, by its name, on any mesh with the axes of ``split``."""
    return {weight.name: Layout(weight.shape, dtype, cuts(weight)) for weight in weights(shape)}


def counts(weight: Weight, mesh: Mesh, rank: int) -> bool:
    """Whether a rank counts its elements of a weight in a sum over all tensor-parallel ranks; of copies one does."""
    cut = {axis for one in cuts(weight) for axis in one.axes}
    return mesh.index(rank, *(axis for axis in TENSOR if axis not in cut)) == 0


def local(weight: Weight, mesh: Mesh, rank: int) -> Box:
    """The box of a weight that a rank of the mesh holds; its ``shape`` is that of the rank's parameter."""
    return Layout(weight.shape, "float32", cuts(weight)).box(mesh, rank)
