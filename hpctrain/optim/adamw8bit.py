"""AdamW whose running means are codes of 8 bits (Dettmers 2022, 8-bit Optimizers via Block-wise Quantization).

Blocks are those of the whole parameter, and the scale of one is the largest number in it on any rank: so codes and
scales are the same under every cut. All ranks of the group keep all scales, 1/32 byte a parameter. The means are made
twice in an update, once for the scales and once for the codes, so that they never lie in memory all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.config import OptimConfig
from hpctrain.optim.adamw import AdamW, factors, move, plain
from hpctrain.optim.codes import decode, encode, largest, stretched
from hpctrain.optim.flat import Flat, Piece
from hpctrain.optim.optimizer import Optimizer, State
from hpctrain.plan.states import BLOCK, SMALL

SIGNED = {"exp_avg": True, "exp_avg_sq": False}


class AdamW8bit(Optimizer):
    """Holds, for each parameter that is not small, codes for this rank's elements and the scales of all blocks."""

    def __init__(self, flats: Sequence[Flat], config: OptimConfig, group: Group, seed: int = 0) -> None:
        super().__init__(flats, config, group, seed)
        self.large = {name: entry for name, entry in self.entries.items() if entry.size >= SMALL}
        self.small = AdamW(self.parts(lambda entry: entry.size < SMALL), config, group)
        self.codes = {
            state: {name: torch.zeros_like(self.here(name), dtype=torch.uint8) for name in self.large}
            for state in SIGNED
        }
        blocks = {name: -(-entry.size // BLOCK) for name, entry in self.large.items()}
        self.all_scales = self.like.new_zeros(len(SIGNED), sum(blocks.values()), dtype=torch.float32)
        self.scales = dict(zip(SIGNED, self.all_scales, strict=True))
        stops = accumulate(blocks.values())
        self._blocks = {name: slice(stop - blocks[name], stop) for name, stop in zip(blocks, stops, strict=True)}

    def states(self) -> dict[str, list[State]]:
        found = self.small.states()
        for state in SIGNED:
            found[f"{state}_code"] = [State(name, self.codes[state][name]) for name in self.large]
            scales = self.scales[state]
            found[f"{state}_scale"] = [State(name, scales[self._blocks[name]], whole=True) for name in self.large]
        return found

    @torch.no_grad()
    def update(self, rate: float, step: int) -> None:
        self.small.update(rate, step)
        fresh = self._fresh_scales()
        now = torch.tensor(step + 1.0)
        for piece, flat in self._chunks():
            means = self._means(piece, flat.parameter.dtype)
            plain([flat.parameter], [flat.gradient], *([mean] for mean in means), [], [now],
                  **factors(self.config, rate, flat.decay))  # fmt: skip
            for (state, signed), mean, scales in zip(SIGNED.items(), means, fresh, strict=True):
                self._code(state, piece).copy_(encode(mean, self._scale(scales, piece), signed))
        self.all_scales.copy_(fresh)

    def _fresh_scales(self) -> Tensor:
        """The largest number of each block, of each mean that takes in this step's gradient."""
        fresh = torch.zeros_like(self.all_scales)
        for piece, flat in self._chunks():
            means = self._means(piece, flat.parameter.dtype)
            move(flat.gradient, *means, self.config.beta1, self.config.beta2)
            for scales, mean in zip(fresh, means, strict=True):
                found, first = largest(mean, piece.first), piece.first // BLOCK
                scales[self._blocks[piece.name]][first : first + len(found)] = found
        self.group.all_reduce(fresh, "max")
        return fresh

    def _chunks(self) -> Iterator[tuple[Piece, Flat]]:
        """What this rank has of the large parameters, a few blocks at a time."""
        return (chunk for name in self.large for chunk in self.blocks(name, self.chunk))

    def _means(self, piece: Piece, dtype: torch.dtype) -> list[Tensor]:
        return [
            decode(self._code(state, piece), self._scale(self.scales[state], piece), signed).to(dtype)
            for state, signed in SIGNED.items()
        ]

    def _code(self, state: str, piece: Piece) -> Tensor:
        shift = self.places[piece.name][1].start
        return self.codes[state][piece.name][piece.start - shift : piece.stop - shift]

    def _scale(self, scales: Tensor, piece: Piece) -> Tensor:
        stop = piece.first + piece.stop - piece.start
        return stretched(scales[self._blocks[piece.name]], piece.first, stop)
