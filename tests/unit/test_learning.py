"""Model, loss, clipping, rate and optimizer together: a short training run whose losses stand in tests/golden."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpctrain.comm.group import SoloGroup
from hpctrain.config import Config, parse
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.clip import global_norm, scale_
from hpctrain.optim.flat import Flat, Piece
from hpctrain.optim.rate import rate
from hpctrain.plan.weights import ModelShape

GOLDEN = Path(__file__).parents[1] / "golden" / "losses"
STEPS = 20


def config_of(family: str) -> Config:
    model = dict(family=family, layers=2, width=32, heads=4, kv_heads=2, sequence=16)
    return parse(dict(model=model, optim=dict(rate=0.01, warmup=3, shape="wsd"), run=dict(seed=4)))


def course(config: Config) -> list[float]:
    """The mean loss of every step, in fp64, on one batch of rising and falling runs of tokens."""
    shape = ModelShape.of(config.model, vocabulary=40)
    model = Transformer(shape).double()
    initialise(model, shape, config.run.seed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    flats = [
        Flat(p.data.view(-1), p.grad.view(-1), p.dim() > 1, (Piece(name, tuple(p.shape), 0, 0, p.numel()),))
        for name, p in model.named_parameters()
    ]
    optimizer = AdamW(flats, config.optim, SoloGroup())
    run = torch.arange(17)
    samples = torch.stack([run, run * 2, 39 - run, 39 - run * 2])
    losses = []
    for step in range(STEPS):
        for flat in flats:
            flat.gradient.zero_()
        loss, count = model.loss(samples[:, :-1], samples[:, 1:], balanced=True)
        (loss / count).backward()
        gradients = [flat.gradient for flat in flats]
        scale_(gradients, global_norm(gradients), config.optim.clip)
        optimizer.update(rate(config.optim, step, STEPS), step)
        losses.append(loss.item() / count.item())
    return losses


@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
def test_a_short_run_learns_and_has_the_losses_of_every_release(family):
    losses = course(config_of(family))
    assert losses[-1] < 0.5 * losses[0]
    golden = [float(line) for line in (GOLDEN / f"{family}.txt").read_text().splitlines() if not line.startswith("#")]
    assert losses == pytest.approx(golden, rel=1e-8)
