"""Our optimizer of 8 bits beside torchao's: the same codes, scales and weights."""

from __future__ import annotations

import os

import pytest
import torch

from hpctrain.config import OptimConfig
from hpctrain.optim.adamw8bit import SIGNED, AdamW8bit
from tests.support import shards

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torchao would compile its update, for minutes
torchao = pytest.importorskip("torchao.optim", reason="pip install torchao to compare")

CONFIG = OptimConfig(kind="adamw8bit", beta1=0.8, beta2=0.97, epsilon=1e-6, decay=0.3)
SHAPE = {"w": (64, 80)}  # whole blocks, and no fewer than torchao codes


@pytest.mark.parametrize("cuts", [(), (0.123, 0.5)], ids=["one rank", "three ranks"])
def test_twenty_updates_are_those_of_torchao(cuts: tuple[float, ...]) -> None:
    weights = shards.random(SHAPE, 1, torch.float32)
    gradients = [shards.random(SHAPE, 2 + step, torch.float32) for step in range(20)]
    x = torch.nn.Parameter(weights["w"].clone())
    betas = (CONFIG.beta1, CONFIG.beta2)
    reference = torchao.AdamW8bit(
        [x], lr=torch.tensor(0.01), betas=betas, eps=CONFIG.epsilon, weight_decay=CONFIG.decay
    )
    for now in gradients:
        x.grad = now["w"]
        reference.step()
    found, states = shards.course(lambda flats, group: AdamW8bit(flats, CONFIG, group), weights, gradients, cuts)
    torch.testing.assert_close(found["w"], x.detach(), rtol=0, atol=1e-5)
    for name in SIGNED:
        theirs = reference.state[x][name]
        torch.testing.assert_close(states[f"{name}_scale"]["w"], theirs.scale, rtol=1e-5, atol=0)
        # A number within a rounding of the middle of two codes may get either.
        assert (states[f"{name}_code"]["w"] != theirs.codes).float().mean() < 1e-3
