"""Experts: a feed-forward part for each token chosen among several (Shazeer 2017; Jiang 2024, Mixtral of Experts).

A router gives each token the probability of each expert. The token goes to the most probable ones, and gets the sum of
what they make of it, each times its probability as a part of those of the chosen. No expert has a limit, so no token is
dropped: rows of tokens are sorted by expert, each expert has a run of them, which may be empty, and one grouped product
multiplies each run with its expert's matrix.

The balance loss (Fedus 2021, Switch Transformers, section 2.2) is the number of experts times the sum over them of
their share of the tokens times their mean probability: K where all are used alike, and more where those that get more
tokens are also more probable. Shares have no gradient; so that of the probabilities is one number for each expert.

Dims: N tokens, D width, E experts, K experts of a token, S rows: a token has one for each of its experts that is here;
I and O inputs and outputs of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.model.frame import Balance, Frame
from hpctrain.model.parts import norm
from hpctrain.plan.weights import ModelShape


class Experts(nn.Module):
    """A norm, then the experts of each token; ``shape`` says how many there are, and how many a token goes to."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.per_token = shape.experts_per_token
        self.norm, self.router = norm(shape), Router(shape.width, shape.experts)
        self.gate, self.up, self.down = (Stack(shape.experts, shape.mlp_width, shape.width) for _ in range(3))

    def forward(self, x_BTD: Tensor, frame: Frame) -> Tensor:
        x_ND = self.norm(x_BTD).flatten(0, -2)
        return self.through(x_ND, self.router.weight, frame.balance).view(x_BTD.shape)

    def through(self, x_ND: Tensor, router_ED: Tensor, balance: Balance | None, first: int = 0) -> Tensor:
        """What this module's experts, those from number ``first`` on, make of tokens that are chosen among all."""
        probabilities_NE = F.linear(x_ND, router_ED).to(_wide(x_ND)).softmax(-1)
        here = range(first, first + len(self.gate.weight))
        weights_NK, chosen_NK = choice(probabilities_NE, self.per_token)
        if balance is not None:
            balance.add(_BalanceLoss.apply(probabilities_NE, chosen_NK, here))
        rows = Rows.of(chosen_NK, len(router_ED), here)
        x_SD = _Deal.apply(x_ND, rows)
        up_SI = F.silu(self.gate(x_SD, rows.ends)) * self.up(x_SD, rows.ends)
        y_SD = self.down(up_SI, rows.ends, turned=True)
        return _Collect.apply(y_SD * weights_NK.flatten()[rows.places, None].to(y_SD.dtype), rows)


class Router(nn.Module):
    """The matrix that makes the logits of each token's experts; it is no product of another format (fp8)."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width))


class Stack(nn.Module):
    """A matrix for each expert, ``[out, in]``, or where it is used turned about ``[in, out]``."""

    def __init__(self, experts: int, inner: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, inner, width))
        self.grouped = grouped

    def forward(self, x_SI: Tensor, ends_E: Tensor, turned: bool = False) -> Tensor:
        return self.grouped(x_SI, self.weight.transpose(1, 2) if turned else self.weight, ends_E)


# ---- which token goes where ------------------------------------------------------------------------------------------


def choice(probabilities_NE: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    """The weights of each token's experts, which add up to 1, and their numbers; the most probable one comes first."""
    top_NK, chosen_NK = probabilities_NE.topk(per_token, -1)
    return top_NK / top_NK.sum(-1, keepdim=True), chosen_NK


@dataclass(frozen=True)
class Rows:
    """The tokens of some experts, sorted by expert: those of one are a run."""

    tokens: int
    per_token: int
    places: Tensor
    """Of each row the place, in ``[N, K]`` laid flat, that it comes from."""
    ends: Tensor
    """Where the run of each expert here ends; int32."""

    @classmethod
    def of(cls, chosen_NK: Tensor, experts: int, here: range) -> Rows:
        """The rows of the experts ``here``, a run of all."""
        flat = chosen_NK.flatten()
        ends_E = flat.bincount(minlength=experts).cumsum(0)
        places = flat.argsort(stable=True)
        before = ends_E[here.start - 1] if here.start else ends_E.new_zeros(())
        if len(here) < experts:
            places = places[int(before) : int(ends_E[here.stop - 1])]
        return cls(*chosen_NK.shape, places, (ends_E[here.start : here.stop] - before).int())

    def dealt(self, x_ND: Tensor) -> Tensor:
        """The row of each token and expert, ``[S, D]``."""
        return x_ND[self.places // self.per_token]

    def collected(self, y_SD: Tensor) -> Tensor:
        """The sum of each token's rows, ``[N, D]``: always in one order, and rounded once."""
        whole = y_SD.new_zeros(self.tokens * self.per_token, y_SD.shape[1])
        whole[self.places] = y_SD
        return whole.view(self.tokens, self.per_token, -1).sum(1)


class _Deal(Function):
    """``Rows.dealt``; its gradient is ``Rows.collected``."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.dealt(x_ND)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SD: Tensor) -> tuple[Any, ...]:
        return ctx.rows.collected(gradient_SD), None


class _Collect(Function):
    """``Rows.collected``; its gradient is ``Rows.dealt``."""

    @staticmethod
    def forward(ctx: Any, y_SD: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return rows.collected(y_SD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Any, ...]:
        return ctx.rows.dealt(gradient_ND), None


class _BalanceLoss(Function):
    """The balance loss of all experts; it pulls at the probabilities of those that are ``here``.

    So the sum over ranks, each with experts of its own, has every pull once. What the backward needs is a number for
    each expert, kept out of autograd's hands: unpacking it would have a block computed again before its turn.
    """

    @staticmethod
    def forward(ctx: Any, probabilities_NE: Tensor, chosen_NK: Tensor, here: range) -> Tensor:
        tokens, experts = probabilities_NE.shape
        shares_E = chosen_NK.flatten().bincount(minlength=experts).to(probabilities_NE.dtype) / tokens
        pull_E = torch.zeros_like(shares_E)
        pull_E[here.start : here.stop] = shares_E[here.start : here.stop] * (experts / tokens)
        ctx.pull, ctx.tokens = pull_E, tokens
        return experts * (shares_E * probabilities_NE.mean(0)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return (gradient * ctx.pull).expand(ctx.tokens, -1), None, None


# ---- products --------------------------------------------------------------------------------------------------------


Gradients = tuple[Tensor | None, ...]
Take = Callable[[tuple[Tensor, ...], Callable[[], Gradients]], Gradients]
"""Gives the gradients of tensors, from what makes them: at once, or none and makes them later."""


def now(tensors: tuple[Tensor, ...], gradients: Callable[[], Gradients]) -> Gradients:
    """The gradients at once."""
    return gradients()


def grouped(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor, take: Take = now) -> Tensor:
    """``x @ weight[e].T`` for each run of rows ``e``, ``[S, O]``; runs end at ``ends``, and may be empty."""
    return _Grouped.apply(take, x_SI, weight_EOI, ends_E)


class _Grouped(Function):
    @staticmethod
    def forward(ctx: Any, take: Take, x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        # Recomputation gives back a stand-in of what is saved: gradients go to the weight itself.
        ctx.take, ctx.tensors = take, (weight_EOI,)
        ctx.save_for_backward(x_SI, weight_EOI, ends_E)
        return rows_product(x_SI, weight_EOI, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_SO: Tensor) -> tuple[Any, ...]:
        x_SI, weight_EOI, ends_E = ctx.saved_tensors
        gradient_SO, (_, wants_x, wants_weight, _) = gradient_SO.contiguous(), ctx.needs_input_grad

        def weights() -> Gradients:
            return (weight_gradient(gradient_SO, x_SI, weight_EOI, ends_E) if wants_weight else None,)

        x_grad = rows_product(gradient_SO, weight_EOI.transpose(1, 2), ends_E) if wants_x else None
        return None, x_grad, *ctx.take(ctx.tensors, weights), None


def rows_product(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Each run of rows times its expert's matrix."""
    if one_kernel(weight_EOI):
        return F.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends_E)
    y_SO = x_SI.new_empty(len(x_SI), weight_EOI.shape[1])
    for expert, (start, stop) in enumerate(_runs(ends_E)):
        torch.mm(x_SI[start:stop], weight_EOI[expert].t(), out=y_SO[start:stop])
    return y_SO


def weight_gradient(gradient_SO: Tensor, x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The gradient of each expert's matrix, in memory as the weight is; zero where an expert has no row."""
    if weight_EOI.stride(1) < weight_EOI.stride(2):  # a turned view
        return weight_gradient(x_SI, gradient_SO, weight_EOI.transpose(1, 2), ends_E).transpose(1, 2)
    if one_kernel(weight_EOI):
        return F.grouped_mm(gradient_SO.t(), x_SI, offs=ends_E)
    found_EOI = torch.empty_like(weight_EOI)
    for expert, (start, stop) in enumerate(_runs(ends_E)):
        torch.mm(gradient_SO[start:stop].t(), x_SI[start:stop], out=found_EOI[expert])
    return found_EOI


KERNELS = {"cpu": (torch.float32, torch.bfloat16, torch.float16), "cuda": (torch.bfloat16,)}
ALIGNED = 16  # bytes that rows, and on GPUs memory, are to be a multiple of


def one_kernel(weight_EOI: Tensor) -> bool:
    """Whether torch multiplies all runs in one call for such weights; elsewhere it is a loop over experts."""
    able = weight_EOI.dtype in KERNELS.get(weight_EOI.device.type, ())
    widths = (size * weight_EOI.element_size() for size in weight_EOI.shape[1:])
    return able and not any(width % ALIGNED for width in (*widths, weight_EOI.data_ptr()))


def _runs(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends], ends, strict=False))


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
