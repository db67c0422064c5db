"""What a rank holds of a shared model, beside the formulas of the ZeRO paper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import ModelConfig, OptimConfig
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.optim.adamw import AdamW
from hpctrain.parallel.units import Part
from hpctrain.parallel.zero import Formats, Sharded, shard
from hpctrain.plan.units import STAGES
from hpctrain.plan.weights import ModelShape, parameters
from tests.support import threads

SHAPE = ModelShape.of(ModelConfig(layers=6, width=24, heads=2, sequence=16), vocabulary=40)


def bytes_of(*tensors: Tensor) -> int:
    """Of the memory that these lie in."""
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def staying(part: Part) -> list[Tensor]:
    """Weights that do not come and go."""
    return [part.full] if part.place_at is None else []


def shelves(sharded: Sharded) -> list[Tensor]:
    """The places in which weights that come and go take turns."""
    return [part.shelf.memory for part in sharded.parts if part.shelf]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_holds_what_the_zero_paper_says(stage: int, ranks: int) -> None:
    whole = 4 * parameters(SHAPE)

    def act(group: Group) -> tuple[int, ...]:
        model = Transformer(SHAPE)
        initialise(model, SHAPE, 1)
        sharded = shard(model, group, stage)
        optimizer = AdamW(sharded.flats(), OptimConfig(), sharded.group)
        alive = []
        for block in model.blocks.values():
            block.register_forward_hook(lambda *_: alive.append(bytes_of(*(p.full for p in sharded.parts if p.whole))))
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(2):
            sharded.begin()
            with sharded.reducing():
                model.loss(tokens, tokens)[0].backward()
            sharded.finish()
        lent = [x for free in sharded.gradients.pool.values() for x in free]
        weights = bytes_of(*model.parameters(), *(x for p in sharded.parts for x in (*staying(p), p.own, p.master)))
        buffers = [p.buffer for p in sharded.parts if p.buffer is not None]
        gradients = bytes_of(*(p.gradient for p in sharded.parts), *buffers)
        states = bytes_of(*optimizer.exp_avg, *optimizer.exp_avg_sq)
        return weights, gradients, states, bytes_of(*lent), bytes_of(*shelves(sharded)), max(alive)

    held = [unit for unit in shard(Transformer(SHAPE), SoloGroup(), 0).parts if unit.unit.held]
    block = (whole - 4 * sum(part.unit.total for part in held)) // SHAPE.layers
    shared = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks, ranks, ranks)}[stage]
    room = 4 * sum(part.unit.total for part in held) + 2 * block
    for weights, gradients, states, lent, shelf, alive in threads.run(ranks, act):
        expected = (whole / shared[0], whole / shared[1], 2 * whole / shared[2])
        assert (weights, gradients, states) == pytest.approx(expected, rel=0.02)
        assert lent == (2 * block + 4 * max(part.unit.total for part in held) if stage > 1 else 0)
        assert shelf == (room if stage == 3 else 0)
        assert alive <= (1.01 * whole if stage < 3 else room)


PAPER = {  # Rajbhandari 2020, section 5 and figure 1: bytes of P parameters, of 2 and 2 and 12 each, on n ranks
    0: lambda p, n: 16 * p,
    1: lambda p, n: 4 * p + 12 * p / n,
    2: lambda p, n: 2 * p + 14 * p / n,
    3: lambda p, n: 16 * p / n,
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_in_bf16_the_state_of_a_model_has_the_bytes_of_the_zero_paper(stage: int, ranks: int) -> None:
    """With gradients in bf16 as there; beside it the lent memory, which the plan tells as buffers."""

    def act(group: Group) -> int:
        model = Transformer(SHAPE)
        initialise(model, SHAPE, 1)
        sharded = shard(model, group, stage, formats=Formats(torch.bfloat16, torch.bfloat16))
        optimizer = AdamW(sharded.flats(), OptimConfig(), sharded.group)
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        sharded.begin()
        with sharded.reducing():
            model.loss(tokens, tokens)[0].backward()
        sharded.finish()
        optimizer.update(0.1, 0)
        parts = sharded.parts
        kept = [x for p in parts for x in (*staying(p), p.own, p.master, p.gradient, p.buffer) if x is not None]
        return bytes_of(*model.parameters(), *kept, *optimizer.exp_avg, *optimizer.exp_avg_sq)

    expected = PAPER[stage](parameters(SHAPE), ranks)
    for found in threads.run(ranks, act):
        assert found == pytest.approx(expected, rel=0.02)
