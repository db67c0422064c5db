"""Recompute: what of the forward is not kept for the backward, but made again or laid aside in the host's memory.

What the backward needs of a block is by far more than the block's input. ``train.recompute`` says what is kept:
everything; everything but the inside of attention; of each k-th or of every block only the input, from which the
block is computed a second time when its backward comes (Chen 2016, Training Deep Nets with Sublinear Memory Cost);
or everything, but in the host's memory. A second forward is the same as the first, as dropout is a pure function of
where it stands (``hpctrain.model.noise``), so no random state is saved, and gradients are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from hpctrain.model.blocks import Block
from hpctrain.model.frame import Frame
from hpctrain.model.transformer import Transformer


def recompute(model: Transformer, kind: str) -> None:
    """Make ``model`` keep what ``kind``, a value of ``train.recompute``, says. Call it once.

    Parameters keep their names. Hooks on a module run at its first forward alone: the second one is a part of its
    backward.
    """
    blocks = list(model.blocks.values())
    name, _, every = kind.partition(":")
    for module, around in KINDS[name](blocks, int(every or 1)):
        module.forward = around(module)


def again(module: nn.Module) -> Callable[..., Tensor]:
    """The module's forward, keeping only what goes in."""
    return partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)


def aside(module: nn.Module) -> Callable[..., Tensor]:
    """The module's forward, keeping what the backward needs in the host's memory.

    The module's first input is its own; the mask in the frame all modules share, and it stays where it is.
    """
    forward = module.forward

    def laid_aside(x: Tensor, frame: Frame) -> Tensor:
        stay = (*module.parameters(), *(() if frame.allowed is None else (frame.allowed,)))
        store = Aside({one.untyped_storage().data_ptr() for one in stay})
        with saved_tensors_hooks(store.put, store.get):
            return forward(x, frame)

    return laid_aside


Kept = Iterator[tuple[nn.Module, Callable[[nn.Module], Callable[..., Tensor]]]]
KINDS: dict[str, Callable[[list[Block], int], Kept]] = {
    "none": lambda blocks, every: iter(()),
    "selective": lambda blocks, every: ((block.attention.core, again) for block in blocks),
    "every": lambda blocks, every: ((block, again) for block in blocks[::every]),
    "full": lambda blocks, every: ((block, again) for block in blocks),
    "offload": lambda blocks, every: ((block, aside) for block in blocks),
}


class Copy:
    """A piece of memory in the host; live: it counts the saved tensors that lie in it and are still to come back."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device, self.uses, self._back = storage.device, 0, None
        source = _bytes(storage)
        self._host = torch.empty(source.shape, dtype=torch.uint8, pin_memory=source.is_cuda)
        self._host.copy_(source, non_blocking=True)

    def back(self) -> torch.UntypedStorage:
        """The memory on its device again; it goes away with the last tensor that was saved in it."""
        if self._back is None:
            self._back = self._host.to(self.device, non_blocking=True, copy=True).untyped_storage()
        self.uses -= 1
        back, self._back = self._back, self._back if self.uses > 0 else None
        return back


class Aside:
    """Where the saved tensors of one forward lie; live.

    Tensors that share memory are copied once: what one layer gives and the next one takes is saved by both. So
    that memory which is used again is not taken for what lay there before, the tensors of this forward stay until it
    ends. What lies in ``here`` is kept as it is.
    """

    def __init__(self, here: set[int]) -> None:
        self._here = here
        self._copies: dict[int, tuple[torch.UntypedStorage, Copy]] = {}

    def put(self, tensor: Tensor) -> Tensor | tuple:
        """What is saved in the tensor's place."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._here:
            return tensor
        if storage.data_ptr() not in self._copies:
            self._copies[storage.data_ptr()] = storage, Copy(storage)
        copy = self._copies[storage.data_ptr()][1]
        copy.uses += 1
        return copy, tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()

    @staticmethod
    def get(saved: Tensor | tuple) -> Tensor:
        """The tensor as it was."""
        if isinstance(saved, Tensor):
            return saved
        copy, dtype, size, stride, offset = saved
        return torch.empty(0, dtype=dtype, device=copy.device).set_(copy.back(), offset, size, stride)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
