"""What the peers of the benchmarks are made of: our model and its loss as one module, torch's AdamW, a process group.

A peer averages the means of its micro-batches, as its tutorials do; that is our mean over tokens wherever micro-batches
have equally many.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.cluster.world import World
from hpctrain.comm.store import open_store
from hpctrain.config import Config
from hpctrain.data.batch import MicroBatch
from hpctrain.model.transformer import Transformer
from hpctrain.plan.formats import FORMATS
from hpctrain.plan.weights import ModelShape, weights

TIMEOUT_SECONDS = 600.0


class Loss(nn.Module):
    """What a framework wraps: a module whose forward gives the loss that is to be averaged over ranks."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, m: MicroBatch) -> Tensor:
        loss, tokens = self.model.loss(m.tokens, m.targets, m.documents)
        return loss / tokens


def dtypes(config: Config) -> tuple[torch.dtype, torch.dtype]:
    """The format in which weights multiply, and the one in which they are updated."""
    format = FORMATS[config.precision.compute]
    return getattr(torch, format.compute), getattr(torch, format.master)


def adamw(model: nn.Module, shape: ModelShape, config: Config) -> torch.optim.Optimizer:
    """The optimizer of all parameters of a model, which has them under our names. Vectors do not decay."""
    optim = config.optim
    decays = {weight.name: weight.decay for weight in weights(shape)}
    kinds = [
        {"params": [p for name, p in model.named_parameters() if decays[name] is kind], "weight_decay": decay}
        for kind, decay in ((True, optim.decay), (False, 0.0))
    ]
    return torch.optim.AdamW(kinds, lr=optim.rate, betas=(optim.beta1, optim.beta2), eps=optim.epsilon, fused=True)


def clip(model: nn.Module, limit: float) -> None:
    """Scale the gradients down to the norm ``limit``; 0 for no limit. Collective where they are shared."""
    if limit:
        nn.utils.clip_grad_norm_(model.parameters(), limit)


def mean_over_ranks(loss: Tensor, group: dist.ProcessGroup) -> float:
    """The mean of each rank's loss. Collective."""
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=group)
    return float(mean) / dist.get_world_size(group)


def process_group(world: World, backend: str) -> dist.ProcessGroup:
    """A group of all ranks over ``backend``; torch's default group is over gloo. Collective."""
    import hpctrain.comm.backend  # noqa: F401 - registers "mpi4py"

    if not dist.is_initialized():
        store = open_store(world.comm, TIMEOUT_SECONDS).store
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    return dist.new_group(backend=backend)
