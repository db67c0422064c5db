"""Checkpoints of small models with weights at random, as training would leave them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.state import Held
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig, ModelConfig
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.weights import ModelShape, weights

VOCABULARY = 61  # odd: nothing divides it


def model_of(**knobs: Any) -> ModelConfig:
    """A model of a few thousand parameters whose sizes all differ."""
    return ModelConfig(**dict(layers=2, width=24, heads=4, mlp_width=40, sequence=16) | knobs)


def saved(folder: Path, model: ModelConfig, dtype: str = "float32", step: int = 7) -> Path:
    """A checkpoint in ``folder`` of a model at random, with a state of its optimizer, too."""
    make = torch.Generator().manual_seed(1)
    shape = ModelShape.of(model, VOCABULARY)
    tensors = {
        f"model/{one.name}": torch.randn(one.shape, generator=make).to(getattr(torch, dtype)) for one in weights(shape)
    }
    tensors["optim/exp_avg/embed.tokens"] = torch.ones(VOCABULARY, shape.width)
    return save(folder, tensors, {"config": {"model": model.model_dump()}}, step)


def save(folder: Path, tensors: dict[str, Tensor], attributes: dict[str, Any], step: int = 7) -> Path:
    """A checkpoint of these tensors."""
    state = {name: Held(Layout(tuple(t.shape), str(t.dtype)[6:]), t) for name, t in tensors.items()}
    return Checkpoint(CheckpointConfig(sync=False), folder, Mesh(()), SoloGroup()).save(step, state, attributes)


def read(path: Path) -> dict[str, Tensor]:
    """The weights of a checkpoint."""
    found = {}
    for slot in read_index(path).slots:
        if slot.name.startswith("model/"):
            memory = torch.empty(slot.nbytes, dtype=torch.uint8)
            disk.read(path, [disk.Piece(slot.offset, memory)])
            found[slot.name] = memory.view(getattr(torch, slot.dtype)).view(slot.shape)
    return found
