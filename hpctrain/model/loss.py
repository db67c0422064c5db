"""The loss of the head: cross-entropy of the next token, without ever holding all logits.

The tokens are taken in chunks of rows. With gradients wanted, a chunk's logits turn in place into their own gradient
and are used up at once, in the forward pass, for the gradients of the hidden states and of the head's weight. Against
``F.cross_entropy`` this needs one chunk of logits in place of three whole copies, and fewer passes over memory.

The vocabulary may be cut over ranks, each of which makes the logits of its own tokens alone: then the softmax is put
together from a few figures a token (Shoeybi 2019, Megatron-LM, section 3), and no rank ever has all its logits.

In 16-bit formats the products are taken in the format, and all else, the sum of the weight's gradient included, in
fp32: a probability of a large vocabulary is below what fp16 can tell from nothing, and a bf16 sum stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORE = -100  # a target that is not counted; torch's own default
ROWS = 512  # tokens in a chunk: its logits are smaller than the weight's gradient for any width above this


@dataclass(frozen=True)
class Share:
    """Which tokens of the vocabulary this rank makes logits of: all of them where it is alone."""

    first: int = 0
    """The token of the weight's first row."""
    vocabulary: int | None = None
    """Tokens of all ranks; the rows of the weight where not given."""
    together: Callable[[Tensor], Tensor] = lambda figures_NK: figures_NK[None]
    """Every rank's figures, ``[ranks, N, K]``. Collective, where there are other ranks."""


ALONE = Share()


def cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    share: Share = ALONE,
) -> tuple[Tensor, Tensor]:
    """The summed loss (fp64) over targets that are not IGNORE, and their number.

    Divide by the number of targets of the whole step, over all ranks and micro-batches. Its graph can be
    used for one backward pass. ``smoothing`` of the target's probability is spread over all tokens alike (Szegedy 2015,
    section 7); ``z_loss`` times the squared logarithm of the softmax's denominator is added (PaLM, section 5). With a
    ``share``, all its ranks call it with the same hidden states and targets and get the same loss; the gradient of the
    hidden states is then a part, the sum of which over ranks is theirs.
    """
    count = (targets_N != IGNORE).sum()
    terms = _Terms(smoothing, z_loss, share)
    if torch.is_grad_enabled():
        return _CrossEntropy.apply(hidden_ND, weight_VD, targets_N, terms), count
    chunks = zip(hidden_ND.split(ROWS), targets_N.split(ROWS), strict=True)
    return torch.stack([_chunk(h, weight_VD, t, terms)[0] for h, t in chunks]).sum(), count


@dataclass(frozen=True)
class _Terms:
    """What the loss is made of, beside the target's own logarithm."""

    smoothing: float
    z_loss: float
    share: Share


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, terms: _Terms) -> Tensor:
        hidden_grad, weight_grad = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD, dtype=_wide(weight_VD))
        losses, lift = [], LIFT.get(hidden_ND.dtype, 1.0)
        chunks = zip(hidden_ND.split(ROWS), targets_N.split(ROWS), hidden_grad.split(ROWS), strict=True)
        for hidden, targets, grad in chunks:
            loss, logits_grad = _chunk(hidden, weight_VD, targets, terms)
            logits_grad = (logits_grad.mul_(lift) if lift != 1.0 else logits_grad).to(hidden.dtype)
            torch.mm(logits_grad, weight_VD, out=grad)
            _add_product(weight_grad, logits_grad.t(), hidden)
            losses.append(loss)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.lift, ctx.dtype = lift, weight_VD.dtype
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        hidden_grad, weight_grad = ctx.saved_tensors
        factor = gradient / ctx.lift
        # In place: a second backward pass then meets torch's own error for changed tensors, not wrong numbers.
        return hidden_grad.mul_(factor), weight_grad.mul_(factor).to(ctx.dtype), None, None


# What logits' gradients, all about 1 at most, are multiplied by until the backward: most would vanish in fp16.
LIFT = {torch.float16: 1024.0}


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor, terms: _Terms) -> tuple[Tensor, Tensor]:
    """The summed loss of some tokens, and its gradient by their logits here, both in fp32 or wider."""
    valid = (targets != IGNORE).to(_wide(hidden))[:, None]
    index = targets[:, None] - terms.share.first
    here = (index >= 0) & (index < len(weight))
    index = index.clamp(0, len(weight) - 1)
    logits = (hidden @ weight.t()).to(valid.dtype)
    top = logits.amax(1, keepdim=True)
    chosen, sums = logits.gather(1, index).where(here, 0.0), logits.sum(1, keepdim=True) if terms.smoothing else None
    powers = logits.sub_(top).exp_()
    figures = [top, powers.sum(1, keepdim=True), chosen, *([] if sums is None else [sums])]
    highest, total, chosen, *sums = _whole(terms.share.together(torch.cat(figures, 1)))
    level = total.log() + highest  # the logarithm of the softmax's denominator
    kept, spread = 1 - terms.smoothing, terms.smoothing / (terms.share.vocabulary or len(weight))
    loss = level - kept * chosen + terms.z_loss * level.square()
    pull = valid * (1 + 2 * terms.z_loss * level)
    gradient = powers.mul_(pull * (top - highest).exp() / total).scatter_add_(1, index, -kept * valid * here)
    if terms.smoothing:
        loss = loss - spread * sums[0]
        gradient.sub_(spread * valid)
    return (loss * valid).sum(dtype=torch.float64), gradient


def _whole(figures_RNK: Tensor) -> list[Tensor]:
    """What the ranks' figures say of all logits, ``[N, 1]`` each: the largest, the sum of powers below it, and sums."""
    tops, powers, *sums = figures_RNK.unsqueeze(-1).unbind(2)
    highest = tops.amax(0)
    return [highest, (powers * (tops - highest).exp()).sum(0), *(one.sum(0) for one in sums)]


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to a sum that may be of a wider format."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
