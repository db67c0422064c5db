"""The same training by DeepSpeed's ZeRO, stages 1 to 3, on CPUs over gloo.

DeepSpeed is an optional package, ``hpctrain[peers]``. Its own compiled operators are left out: training here would
use none of them, and compiling one at the start can wait without end for a lock that a killed process left. The
optimizer is torch's fused AdamW, as for the other peers, over DeepSpeed's own flat memory.

Where the formats differ, weights multiply in the short one, and gradients are reduced and summed in fp32.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.bench.peer import Loss, adamw, mean_over_ranks
from hpctrain.config import Config
from hpctrain.data.batch import Batches
from hpctrain.errors import ConfigError
from hpctrain.model.init import fill
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import ModelShape, weights

FORMATS = {"fp32": {}, "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}}


def check_installed() -> None:
    """Raise ConfigError where DeepSpeed is not installed; it is not imported."""
    if find_spec("deepspeed") is None:
        raise _missing("No module named 'deepspeed'")


def load_deepspeed(local_rank: int) -> ModuleType:
    """Import DeepSpeed for CPUs; raises ConfigError where it is not installed."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(local_rank))
    try:
        with _quiet():
            import deepspeed
    except ImportError as error:
        raise _missing(error) from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # none is compiled
    warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)  # at every collective
    return deepspeed


def _missing(why: object) -> ConfigError:
    return ConfigError(
        f"--against deepspeed: {why}",
        "DeepSpeed is an optional package",
        "install it: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install deepspeed",
    )


class DeepSpeed:
    """A run by DeepSpeed; live. All ranks of torch's default group, which is over gloo, make it."""

    def __init__(self, config: Config, shape: ModelShape, batches: Batches, stage: int, deepspeed: ModuleType) -> None:
        self.deepspeed = deepspeed
        self.batches, self.group = batches, dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.settings = settings(config, shape, self.ranks, stage)
        with _quiet():
            loss = Loss(self._model(config, shape, stage))
            if stage == 3:  # the head's weight is used outside the module that has it
                self.deepspeed.zero.register_external_parameter(loss, loss.model._head_weight)
            optimizer = adamw(loss.model, shape, config)
            self.engine, *_ = self.deepspeed.initialize(model=loss, optimizer=optimizer, config=self.settings)

    def step(self, number: int) -> float:
        """Take one step; its loss, over all ranks. All ranks call it."""
        mean = torch.zeros((), dtype=torch.float64)
        microbatches = self.batches.part(number, self.rank, self.ranks)
        for m in microbatches:  # the engine counts them, and updates after the last
            loss = self.engine(m)
            self.engine.backward(loss)
            self.engine.step()
            mean += loss.detach()
        return mean_over_ranks(mean / len(microbatches), self.group)

    def _model(self, config: Config, shape: ModelShape, stage: int) -> Transformer:
        """The model with its weights; in stage 3 cut up while it is made, so that no rank ever holds all of it."""
        zero = self.deepspeed.zero
        # On CPUs, Init takes a dtype= for bf16 whatever it says (0.19): the settings tell it.
        with zero.Init(config_dict_or_path=self.settings) if stage == 3 else nullcontext():
            model = Transformer(shape)
        for weight in weights(shape):
            parameter = model.get_parameter(weight.name)
            with zero.GatheredParameters(parameter, modifier_rank=0) if stage == 3 else nullcontext(), torch.no_grad():
                if self.rank == 0 or stage < 3:
                    fill(parameter.view(-1), weight, config.run.seed)
        return model


def settings(config: Config, shape: ModelShape, ranks: int, stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration of the same training. Raises ConfigError for formats that it has not."""
    if config.precision.compute not in FORMATS:
        raise ConfigError(
            f'precision.compute = "{config.precision.compute}" does not go with --against deepspeed',
            "it is compared in the formats in which both keep fp32 weights for the update",
            f"set it to {' or '.join(FORMATS)}",
        )
    share = config.train.batch // ranks
    microbatch = min(config.train.microbatch, share)
    return {
        "train_micro_batch_size_per_gpu": microbatch,
        "gradient_accumulation_steps": -(-share // microbatch),
        "gradient_clipping": config.optim.clip,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "overlap_comm": False, **_sizes(shape)},  # overlap takes a GPU's streams
        **FORMATS[config.precision.compute],
    }


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """Buckets of about a block, in elements: the defaults, of half a billion, are for GPUs and take gigabytes."""
    block = sum(weight.size for weight in weights(shape) if weight.name.startswith("blocks.0."))
    return {
        "reduce_bucket_size": block,
        "allgather_bucket_size": block,
        "stage3_prefetch_bucket_size": block,
        "stage3_param_persistence_threshold": 10 * shape.width,
        "stage3_max_live_parameters": 2 * block,
        "stage3_max_reuse_distance": 0,
        "memory_efficient_linear": False,  # no less memory was seen with it, and it changes torch's linear for all
    }


@contextmanager
def _quiet() -> Iterator[None]:
    """What DeepSpeed prints goes to the error stream."""
    with redirect_stdout(sys.stderr):
        yield
