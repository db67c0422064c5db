"""Tensor and sequence parallelism: the ranks of a group share every product of a model, and the tokens between them.

``tensor_parallel`` makes the parts of a whole model their kin that know of other ranks. Parameters keep their names,
and each becomes this rank's box of it, as ``hpctrain.plan.rules`` says. What is between the products every rank has for
all tokens, and does for all of them; with ``sequence`` each has a part of the tokens, and norms, dropout and residuals
cost a part of their memory and time. Losses, gradients and dropped elements are those of one rank.

What every rank has whole needs no care without ``sequence``: all ranks make the same gradient, bit for bit. With it a
rank sees a part of the tokens, so the gradients of norms and of learned positions are summed over the group, and every
rank has the same sum. So are, always, those of norms of heads, of which a rank sees its own alone, and of the router,
of which it uses what its own experts are chosen by.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from hpctrain.comm import autograd
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.errors import PlanError, ShapeError
from hpctrain.model.attention import Attention
from hpctrain.model.blocks import MLPS
from hpctrain.model.experts import Experts
from hpctrain.model.parts import Gather, HeadNorm, Norm, Spread, normalise
from hpctrain.model.transformer import Embed, Head, Transformer
from hpctrain.parallel import vocabulary
from hpctrain.parallel.experts import SharedExperts
from hpctrain.parallel.linear import ColumnLinear, Region, RowLinear, fan
from hpctrain.plan import rules
from hpctrain.plan.layout import Box
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.weights import Weight, weights


def tensor_parallel(model: Transformer, group: Group, sequence: bool = True, copies: Group | None = None) -> None:
    """Let the ranks of ``group`` share the model. Call it once, on every rank of the group.

    A parameter that has its numbers keeps this rank's part of them; one without memory (on ``meta``, or a number
    expanded to a shape) stays without. ``copies`` are the ranks of the group that have the same head of keys and
    values, the axis ``tp_copy`` of the mesh, where there are fewer such heads than ranks. ``recompute`` and ``in_fp8``
    may be called before or after it, ``Sharded`` after it. Raises PlanError when heads do not divide over the ranks.
    """
    copies = copies or SoloGroup()
    mesh = Mesh(rules.axes(model.shape, group.size))
    _check_copies(mesh, copies)
    found = {weight.name: weight for weight in weights(model.shape)}
    for name, parameter in model.named_parameters():
        _check_whole(found[name], parameter)
        parameter.data = own(parameter.data, rules.local(found[name], mesh, group.rank))
    region = Region(group, sequence and group.size > 1)
    for module in list(model.modules()):
        PARTS.get(type(module), _as_it_is)(module, region, copies)


def own(whole: Tensor, box: Box) -> Tensor:
    """A box of a tensor, in memory of its own if the tensor has memory for its elements."""
    part = whole[box.slices]
    held = whole.untyped_storage().nbytes() >= whole.nbytes
    return part.clone() if held and part.shape != whole.shape else part


class SequenceNorm(Norm):
    """A norm of this rank's tokens or heads; its weights are every rank's, their gradients summed over the group."""

    def __init__(self, kind: str, width: int, epsilon: float, group: Group) -> None:
        super().__init__(kind, width, epsilon)
        self.region = Region(group, sequence=True)

    def forward(self, x: Tensor) -> Tensor:
        """As ``Norm`` does. Collective, backwards."""
        vectors = [self.weight] if self.bias is None else [self.weight, self.bias]
        weight, *bias = autograd.copies(vectors, self.region.group)
        return normalise(x, weight, bias[0] if bias else None, self.epsilon)


# ---- what becomes of each part ---------------------------------------------------------------------------------------
# A module changes its class and stays the same object: who holds it, its hooks and its parameters are as before.


def _attention(part: Attention, region: Region, copies: Group) -> None:
    part.fan = fan
    _column(part.query, region, SoloGroup())
    _column(part.key, region, copies)
    _column(part.value, region, copies)


def _mlp(part: nn.Module, region: Region, copies: Group) -> None:
    part.fan = fan
    for one in part.children():
        if isinstance(one, Spread):
            _column(one, region, SoloGroup())


def _experts(part: Experts, region: Region, copies: Group) -> None:
    part.__class__, part.region = SharedExperts, region


def _column(part: Spread, region: Region, copies: Group) -> None:
    part.__class__, part.region, part.copies = ColumnLinear, region, copies


def _row(part: Gather, region: Region, copies: Group) -> None:
    part.__class__, part.region = RowLinear, region


def _norm(part: Norm, region: Region, copies: Group) -> None:
    if region.sequence:
        part.__class__, part.region = SequenceNorm, region


def _head_norm(part: HeadNorm, region: Region, copies: Group) -> None:
    part.__class__, part.region = SequenceNorm, region


def _embed(part: Embed, region: Region, copies: Group) -> None:
    part.lookup = partial(vocabulary.lookup, region=region, vocabulary=part.vocabulary)
    if region.sequence:
        part.places = partial(vocabulary.places, group=region.group)


def _head(part: Head, region: Region, copies: Group) -> None:
    more = dict(region=region, vocabulary=part.vocabulary)
    part.output = partial(vocabulary.logits, **more)
    part.loss = partial(vocabulary.cross_entropy, inner=part.loss, **more)


def _model(part: Transformer, region: Region, copies: Group) -> None:
    part.between = region.tokens


def _as_it_is(part: nn.Module, region: Region, copies: Group) -> None:
    pass


PARTS: dict[type, Callable[..., None]] = {
    Transformer: _model,
    Embed: _embed,
    Attention: _attention,
    **dict.fromkeys(MLPS.values(), _mlp),
    Experts: _experts,
    Gather: _row,
    Norm: _norm,
    HeadNorm: _head_norm,
    Head: _head,
}


def _check_copies(mesh: Mesh, copies: Group) -> None:
    if copies.size != mesh.size(rules.COPY):
        raise PlanError(
            f"each head of keys and values is on {mesh.size(rules.COPY)} ranks, but copies is a group of {copies.size}",
            "the gradients of such a head are summed over the ranks that have it",
            f'give copies=groups["{rules.COPY}"] of the mesh that hpctrain.plan.rules.split makes',
        )


def _check_whole(weight: Weight, parameter: nn.Parameter) -> None:
    if tuple(parameter.shape) != weight.shape:
        raise ShapeError(
            f"{weight.name} has the shape {list(parameter.shape)}, where the whole weight has {list(weight.shape)}",
            "tensor_parallel takes a whole model and cuts it once",
            "make the model anew, and call it before anything else changes its weights",
        )
