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

from hpctrain.config import Config, load
from hpctrain.data.batch import Batches, MicroBatch
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.plan.formats import FORMATS
from hpctrain.plan.weights import ModelShape, weights


class Ddp:
    """A run by torch's means; live."""

    def __init__(self, config: Config, shape: ModelShape, batches: Batches, process_group: dist.ProcessGroup) -> None:
        self.config, self.batches, self.group = config, batches, process_group
        model = Transformer(shape).to(getattr(torch, FORMATS[config.precision.compute].master))
        initialise(model, shape, config.run.seed)
        self.model = nn.parallel.DistributedDataParallel(
            _Loss(model), process_group=process_group, gradient_as_bucket_view=True
        )
        self.optimizer = _adamw(model, shape, config)

    def step(self, number: int) -> float:
        """Take one step; its loss, over all ranks. All ranks of the process group call it."""
        self.optimizer.zero_grad(set_to_none=True)
        *early, last = self.batches.part(number, dist.get_rank(self.group), dist.get_world_size(self.group))
        with self.model.no_sync():
            for m in early:
                (self.model(m) / (len(early) + 1)).backward()
        loss = self.model(last) / (len(early) + 1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip)
        self.optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=self.group)
        return float(mean) / dist.get_world_size(self.group)


class _Loss(nn.Module):
    """What DDP wraps: a module whose forward gives the loss that is to be averaged over ranks."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, m: MicroBatch) -> Tensor:
        loss, tokens = self.model.loss(m.tokens, m.targets, m.documents)
        return loss / tokens


def _adamw(model: Transformer, shape: ModelShape, config: Config) -> torch.optim.Optimizer:
    optim = config.optim
    decays = {weight.name: weight.decay for weight in weights(shape)}
    kinds = [
        {"params": [p for name, p in model.named_parameters() if decays[name] is kind], "weight_decay": decay}
        for kind, decay in ((True, optim.decay), (False, 0.0))
    ]
    return torch.optim.AdamW(kinds, lr=optim.rate, betas=(optim.beta1, optim.beta2), eps=optim.epsilon, fused=True)


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
