"""States to save and load: every element of every tensor tells by its value where it belongs."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from hpctrain.checkpoint.state import Held
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh

# Numbers that any dtype of two bytes and more holds exactly, and that no neighbour has.
MODULUS = 251


def whole(layout: Layout, step: int = 0) -> torch.Tensor:
    """The global tensor whose elements count up from ``step``."""
    numbers = (torch.arange(prod(layout.shape)) + step) % MODULUS
    if layout.dtype == "bool":
        return (numbers % 3 == 0).reshape(layout.shape)
    if layout.dtype.startswith("float8"):
        return numbers.to(torch.uint8).view(getattr(torch, layout.dtype)).reshape(layout.shape)
    return numbers.to(getattr(torch, layout.dtype)).reshape(layout.shape)


def piece(layout: Layout, mesh: Mesh, rank: int, step: int = 0) -> torch.Tensor:
    """What ``rank`` holds of it: its box, or flat where it holds an interval."""
    box = whole(layout, step)[layout.box(mesh, rank).slices]
    start, stop = layout.interval(mesh, rank)
    return box.reshape(-1)[start:stop].clone() if layout.flat else box.clone()


def filled(layouts: Mapping[str, Layout], mesh: Mesh, rank: int, step: int = 0) -> dict[str, Held]:
    """A state with every element in its place."""
    return {name: Held(layout, piece(layout, mesh, rank, step)) for name, layout in layouts.items()}


def blank(layouts: Mapping[str, Layout], mesh: Mesh, rank: int) -> dict[str, Held]:
    """A state to load into."""
    return {
        name: Held(layout, torch.zeros_like(piece(layout, mesh, rank)))
        for name, layout in layouts.items()
    }


def wrong(state: Mapping[str, Held], mesh: Mesh, rank: int, step: int = 0) -> list[str]:
    """The names whose elements are not bit for bit in their places."""
    return [name for name, held in state.items() if bits(held.tensor) != bits(piece(held.layout, mesh, rank, step))]


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements."""
    flat = tensor.contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
