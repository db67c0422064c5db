"""Training in low precision: after 60 steps the loss is near that of fp32."""

from __future__ import annotations

from functools import cache
from statistics import mean

import pytest
import torch

from hpctrain.comm.group import SoloGroup
from hpctrain.config import Config, parse
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.clip import global_norm, scale_
from hpctrain.optim.rate import rate
from hpctrain.parallel.zero import Formats, shard
from hpctrain.plan.formats import FORMATS
from hpctrain.plan.weights import ModelShape
from hpctrain.precision.fp8 import in_fp8
from hpctrain.precision.scale import LossScale

STEPS, LAST = 60, 10
# compute, fp8 -> the most by which the mean loss of the last steps may differ from fp32's, relative
BOUNDS = {
    ("bf16", "none"): 0.001,
    ("fp16", "none"): 0.001,
    ("bf16", "tensor"): 0.005,
    ("bf16", "block"): 0.005,
    ("fp32", "block"): 0.005,
}


@pytest.mark.parametrize("precision", BOUNDS, ids="-".join)
def test_the_loss_after_sixty_steps_is_near_that_in_fp32(precision: tuple[str, str]) -> None:
    expected, found = course("fp32", "none"), course(*precision)
    assert expected[-1] < 0.6 * expected[0]
    assert found != expected and abs(mean(found[-LAST:]) / mean(expected[-LAST:]) - 1) < BOUNDS[precision]


@cache
def course(compute: str, fp8: str) -> list[float]:
    """The mean loss of every step, each on other samples of a text with a pattern."""
    knobs = {"family": "llama", "layers": 2, "width": 64, "heads": 4, "sequence": 32}
    optim = {"rate": 3e-3, "warmup": 5}
    config = parse({"model": knobs, "optim": optim, "precision": {"compute": compute, "fp8": fp8}})
    shape = ModelShape.of(config.model, vocabulary=64)
    model = Transformer(shape)
    initialise(model, shape, seed=1)
    in_fp8(model.blocks, fp8)
    sharded = shard(model, SoloGroup(), stage=0, formats=Formats(getattr(torch, FORMATS[compute].compute)))
    optimizer, scale = AdamW(sharded.flats(), config.optim, SoloGroup()), LossScale(config.precision)
    return [step(number, config, model, sharded, optimizer, scale) for number in range(STEPS)]


def step(number: int, config: Config, model: Transformer, sharded, optimizer: AdamW, scale: LossScale) -> float:
    tokens = samples(number)
    sharded.begin()
    loss, count = model.loss(tokens[:, :-1], tokens[:, 1:])
    with sharded.reducing():
        (loss / count * scale.value).backward()
    sharded.finish()
    gradients = [flat.gradient for flat in sharded.flats()]
    scale.undo(gradients)
    norm = global_norm(gradients)
    if not scale.skips(norm):
        scale_(gradients, norm, config.optim.clip)
        optimizer.update(rate(config.optim, number, STEPS), number)
    return loss.item() / count.item()


def samples(number: int) -> torch.Tensor:
    """Sequences that go up in steps of 1 to 4 and, one time in eight, anywhere."""
    make = torch.Generator().manual_seed(number)
    rows = torch.randint(64, (8, 1), generator=make) + torch.randint(1, 5, (8, 1), generator=make) * torch.arange(33)
    noise = torch.rand(rows.shape, generator=make) < 1 / 8
    return torch.where(noise, torch.randint(64, rows.shape, generator=make), rows % 64)
