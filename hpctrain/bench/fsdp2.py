"""The same training by torch's FSDP2: every block sharded by itself, and what is around the blocks together.

Weights are made in place, each rank its own rows, so that no rank ever holds the whole model. A block's weights are
freed after its forward and gathered again for its backward, the next one ahead of time; gradients are reduced to the
own rows after every micro-batch. Where the formats differ, weights multiply in the short one, and gradients are
reduced and kept in the long one.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hpctrain.bench.peer import Loss, adamw, clip, dtypes, mean_over_ranks
from hpctrain.config import Config
from hpctrain.data.batch import Batches
from hpctrain.model.init import fill
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import ModelShape, weights


class Fsdp2:
    """A run by FSDP2; live. All ranks of the process group make it."""

    def __init__(self, config: Config, shape: ModelShape, batches: Batches, process_group: dist.ProcessGroup) -> None:
        self.config, self.batches, self.group = config, batches, process_group
        compute, master = dtypes(config)
        with torch.device("meta"):
            model = Transformer(shape).to(master)
        self.model = _sharded(model, DeviceMesh.from_group(process_group, "cpu"), compute, master)
        self.model.to_empty(device="cpu")
        _initialise(model, shape, config.run.seed, dist.get_rank(process_group), dist.get_world_size(process_group))
        self.optimizer = adamw(model, shape, config)

    def step(self, number: int) -> float:
        """Take one step; its loss, over all ranks. All ranks of the process group call it."""
        self.optimizer.zero_grad(set_to_none=True)
        microbatches = self.batches.part(number, dist.get_rank(self.group), dist.get_world_size(self.group))
        mean = torch.zeros((), dtype=torch.float64)
        for m in microbatches:
            self.model.set_is_last_backward(m is microbatches[-1])
            loss = self.model(m) / len(microbatches)
            loss.backward()
            mean += loss.detach()
        clip(self.model, self.config.optim.clip)
        self.optimizer.step()
        return mean_over_ranks(mean, self.group)


def _sharded(model: Transformer, mesh: DeviceMesh, compute: torch.dtype, master: torch.dtype) -> FSDPModule:
    policy = MixedPrecisionPolicy() if compute == master else MixedPrecisionPolicy(compute, master)
    blocks = [fully_shard(block, mesh=mesh, mp_policy=policy) for block in model.blocks.values()]
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
    whole = fully_shard(Loss(model), mesh=mesh, mp_policy=policy)
    whole._set_unshard_async_op(True)  # without streams, as on CPUs, this is what lets a gathering overlap anything
    return whole


@torch.no_grad()
def _initialise(model: Transformer, shape: ModelShape, seed: int, rank: int, ranks: int) -> None:
    """Fill this rank's rows of every weight: rows are dealt in equal chunks, of which the last may be short."""
    for weight in weights(shape):
        own: Tensor = model.get_parameter(weight.name).to_local()
        rows = weight.shape[0]
        first = min(rank * -(-rows // ranks), rows)
        if own.numel():
            fill(own.view(-1), weight, seed, first * own[0].numel())
