"""The loss of the head: cross-entropy of the next token, without ever holding all logits.

The tokens are taken in chunks of rows. With gradients wanted, a chunk's logits turn in place into their own gradient
and are used up at once, in the forward pass, for the gradients of the hidden states and of the head's weight. Against
``F.cross_entropy`` this needs one chunk of logits in place of three whole copies, and fewer passes over memory.
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
        hidden_grad, weight_grad = torch.empty_like(hidden_ND), torch.zeros_like(weight_VD)
        losses = []
        chunks = zip(hidden_ND.split(ROWS), targets_N.split(ROWS), hidden_grad.split(ROWS), strict=True)
        for hidden, targets, grad in chunks:
            loss, logits_grad = _chunk(hidden, weight_VD, targets)
            torch.mm(logits_grad, weight_VD, out=grad)
            weight_grad.addmm_(logits_grad.t(), hidden)
            losses.append(loss)
        ctx.save_for_backward(hidden_grad, weight_grad)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        hidden_grad, weight_grad = ctx.saved_tensors
        # In place: a second backward pass then meets torch's own error for changed tensors, not wrong numbers.
        return hidden_grad.mul_(gradient), weight_grad.mul_(gradient), None


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of some tokens, and its gradient by their logits."""
    valid = (targets != IGNORE).to(hidden.dtype)[:, None]
    index = targets.clamp(min=0)[:, None]
    logits = hidden @ weight.t()
    top = logits.amax(1, keepdim=True)
    chosen = logits.gather(1, index)
    powers = logits.sub_(top).exp_()
    total = powers.sum(1, keepdim=True)
    loss = ((total.log() + top - chosen) * valid).sum(dtype=torch.float64)
    return loss, powers.mul_(valid / total).scatter_add_(1, index, -valid)
