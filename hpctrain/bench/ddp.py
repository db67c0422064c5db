"""The peer of the step and start benchmarks: the same training by torch's own means, as its tutorials have it.

DistributedDataParallel with bucket views, fused AdamW, clip by norm. ``torchrun -m hpctrain.bench.ddp CONFIG FOLDER``
takes the first step of a run and prints the moment when it was done, in seconds since 1970.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.bench.peer import Loss, adamw, clip, dtypes, mean_over_ranks
from hpctrain.config import Config, load
from hpctrain.data.batch import Batches, MicroBatch
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import ModelShape


class Ddp:
    """A run by torch's means; live."""

    def __init__(self, config: Config, shape: ModelShape, batches: Batches, process_group: dist.ProcessGroup) -> None:
        self.config, self.batches, self.group = config, batches, process_group
        model = Transformer(shape).to(dtypes(config)[1])
        initialise(model, shape, config.run.seed)
        self.model = nn.parallel.DistributedDataParallel(
            Loss(model), process_group=process_group, gradient_as_bucket_view=True
        )
        self.optimizer = adamw(model, shape, config)

    def step(self, number: int) -> float:
        """Take one step; its loss, over all ranks. All ranks of the process group call it."""
        self.optimizer.zero_grad(set_to_none=True)
        *early, last = self.batches.part(number, dist.get_rank(self.group), dist.get_world_size(self.group))
        mean = torch.zeros((), dtype=torch.float64)
        with self.model.no_sync():
            for m in early:
                mean += self._backward(m, len(early) + 1)
        mean += self._backward(last, len(early) + 1)
        clip(self.model, self.config.optim.clip)
        self.optimizer.step()
        return mean_over_ranks(mean, self.group)

    def _backward(self, m: MicroBatch, microbatches: int) -> Tensor:
        loss = self.model(m) / microbatches
        loss.backward()
        return loss.detach()


def main(config_path: str, data_prefix: str) -> None:
    """Take one step under torchrun, on token files that stand at ``data_prefix``."""
    dist.init_process_group("gloo")
    config = load(config_path, (f'data.sources=[{{path="{data_prefix}"}}]',))
    batches = Batches(config.data, config.train, config.model.sequence, config.run.seed)
    shape = ModelShape.of(config.model, batches.vocabulary)
    Ddp(config, shape, batches, dist.group.WORLD).step(0)
    if dist.get_rank() == 0:
        print(time.time(), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], str(Path(sys.argv[2])))
