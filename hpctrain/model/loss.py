"""The loss of the head: cross-entropy of the next token, without ever holding all logits.

The tokens are taken in chunks of rows. With gradients wanted, a chunk's logits turn in place into their own gradient
and are used up at once, in the forward pass, for the gradients of the hidden states and of the head's weight. Against
``F.cross_entropy`` this needs one chunk of logits in place of three whole copies, and fewer passes over memory.

In 16-bit formats the products are taken in the format, and all else, the sum of the weight's gradient included, in
fp32: a probability of a large vocabulary is below what fp16 can tell from nothing, and a bf16 sum stands still.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORE = -100  # a target that is not counted; torch's own default
ROWS = 512  # tokens in a chunk: its logits are smaller than the weight's gradient for any width above this


def cross_entropy(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss (fp64) over targets that are not IGNORE, and their number.

    Divide by the number of targets of the whole step, over all ranks and micro-batches. Its graph can be
    used for one backward pass.
    """
    count = (targets_N != IGNORE).sum()
    if torch.is_grad_enabled():
        return _CrossEntropy.apply(hidden_ND, weight_VD, targets_N), count
    losses = [_chunk(h, weight_VD, t)[0] for h, t in zip(hidden_ND.split(ROWS), targets_N.split(ROWS), strict=True)]
    return torch.stack(losses).sum(), count


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> Tensor:
        hidden_grad, weight_grad = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD, dtype=_wide(weight_VD))
        losses, lift = [], LIFT.get(hidden_ND.dtype, 1.0)
        chunks = zip(hidden_ND.split(ROWS), targets_N.split(ROWS), hidden_grad.split(ROWS), strict=True)
        for hidden, targets, grad in chunks:
            loss, logits_grad = _chunk(hidden, weight_VD, targets)
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
        return hidden_grad.mul_(factor), weight_grad.mul_(factor).to(ctx.dtype), None


# What logits' gradients, all between -1 and 1, are multiplied by until the backward: most would vanish in fp16.
LIFT = {torch.float16: 1024.0}


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of some tokens, and its gradient by their logits, both in fp32 or wider."""
    valid = (targets != IGNORE).to(_wide(hidden))[:, None]
    index = targets.clamp(min=0)[:, None]
    logits = (hidden @ weight.t()).to(valid.dtype)
    top = logits.amax(1, keepdim=True)
    chosen = logits.gather(1, index)
    powers = logits.sub_(top).exp_()
    total = powers.sum(1, keepdim=True)
    loss = ((total.log() + top - chosen) * valid).sum(dtype=torch.float64)
    return loss, powers.mul_(valid / total).scatter_add_(1, index, -valid)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to a sum that may be of a wider format."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
