"""Stage: collectives of ordinary memory, through a stretch of shared memory that is used again and again.

A message passes in chunks. Each stretch has two halves: while the others read a chunk from one half, its rank writes
the next one to the other, so that one meeting a chunk is enough, and what passes stays in the cache. The memory is
``bytes_for(size)`` a rank, whatever the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hpctrain.comm.group import Op
from hpctrain.comm.reduce import Reducer, cut
from hpctrain.comm.window import LINE_BYTES

CHUNK_BYTES = 1 << 20

Step = Callable[[int], None]


class Stage:
    """The stretches of the ranks of a node, which ``meet`` brings together. Every call is collective over them."""

    def __init__(self, stretches: Sequence[Tensor], rank: int, meet: Callable[[], None], reducer: Reducer) -> None:
        self._rank, self._size = rank, len(stretches)
        self._others = [rank for rank in range(self._size) if rank != self._rank]
        self._meet, self._reduce = meet, reducer
        inputs_and_results = [CHUNK_BYTES, CHUNK_BYTES, *[_sum_bytes(self._size)] * 2]
        quarters = [stretch.split(inputs_and_results) for stretch in stretches]
        self._quarters = [[quarter[index] for quarter in quarters] for index in range(4)]
        self._typed: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    @staticmethod
    def bytes_for(size: int) -> int:
        """The memory that each of ``size`` ranks gives: two chunks come in, two sums of a part wait to be fetched."""
        return 2 * (CHUNK_BYTES + _sum_bytes(size))

    def all_reduce(self, x: Tensor, op: Op) -> None:
        """In one turn chunk t comes in, chunk t - 1 is summed, and the sums of chunk t - 2 are fetched."""
        align = LINE_BYTES // x.itemsize
        chunks = [chunk.split(cut(chunk.numel(), self._size, align)) for chunk in x.split(CHUNK_BYTES // x.itemsize)]

        def bring(turn: int) -> None:
            self._bring(turn, chunks[turn])

        def add(turn: int) -> None:
            own = chunks[turn][self._rank]
            self._add(self._result(turn, self._rank, own), own, turn, len(chunks[turn][0]), op)

        def fetch(turn: int) -> None:
            for rank, piece in enumerate(chunks[turn]):
                piece.copy_(self._result(turn, rank, piece))

        self._turns(len(chunks), bring, add, fetch)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int]) -> None:
        """``out`` may be this rank's piece of ``x``, and shares no other memory with it."""
        step = CHUNK_BYTES // x.itemsize // self._size
        pieces = _in_steps(x.split(list(sizes)), step)
        outs = out.split(step)

        def bring(turn: int) -> None:
            self._bring(turn, [piece[turn] for piece in pieces], step)

        def add(turn: int) -> None:
            if out.numel() > turn * step:
                self._add(outs[turn], pieces[self._rank][turn], turn, step, op)

        self._turns(len(pieces[0]), bring, add)

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int]) -> None:
        """``x`` may be this rank's piece of ``out``, and shares no other memory with it."""
        step = CHUNK_BYTES // x.itemsize
        pieces = _in_steps(out.split(list(sizes)), step)
        own = out.split(list(sizes))[self._rank]
        source = _in_steps([x], step, len(pieces[0]))[0]

        def bring(turn: int) -> None:
            self._input(turn, self._rank, source[turn]).copy_(source[turn])

        def fetch(turn: int) -> None:
            for rank in self._others:
                pieces[rank][turn].copy_(self._input(turn, rank, pieces[rank][turn]))

        self._turns(len(source), bring, fetch)
        if own.data_ptr() != x.data_ptr():
            own.copy_(x)

    def all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], largest: int
    ) -> None:
        """``largest`` is the size of the largest piece that any rank sends."""
        step = CHUNK_BYTES // x.itemsize // self._size
        turns = -(-largest // step)
        sent = _in_steps(x.split(list(sizes)), step, turns)
        taken = _in_steps(out.split(list(out_sizes)), step, turns)

        def bring(turn: int) -> None:
            self._bring(turn, [piece[turn] for piece in sent], step)

        def fetch(turn: int) -> None:
            for rank in self._others:
                piece = taken[rank][turn]
                piece.copy_(self._input(turn, rank, piece, self._rank * step))

        self._turns(turns, bring, fetch)
        out.split(list(out_sizes))[self._rank].copy_(x.split(list(sizes))[self._rank])

    def broadcast(self, x: Tensor, source: int) -> None:
        chunks = x.split(CHUNK_BYTES // x.itemsize)

        def bring(turn: int) -> None:
            if self._rank == source:
                self._input(turn, source, chunks[turn]).copy_(chunks[turn])

        def fetch(turn: int) -> None:
            if self._rank != source:
                chunks[turn].copy_(self._input(turn, source, chunks[turn]))

        self._turns(len(chunks), bring, fetch)

    # ---- steps ---------------------------------------------------------------------------------------------------

    def _turns(self, count: int, *steps: Step) -> None:
        """Do each step for each of ``count`` chunks; a step takes up a chunk one meeting after the step before it."""
        for turn in range(count + len(steps) - 1):
            if turn:
                self._meet()
            for lag, step in enumerate(steps):
                if 0 <= turn - lag < count:
                    step(turn - lag)

    def _bring(self, turn: int, pieces: Sequence[Tensor], step: int = 0) -> None:
        """Put the pieces that are for others ``step`` apart into this rank's stretch, its own piece being at hand."""
        step = step or len(pieces[0])
        for rank in self._others:
            self._input(turn, self._rank, pieces[rank], rank * step).copy_(pieces[rank])

    def _add(self, out: Tensor, own: Tensor, turn: int, step: int, op: Op) -> None:
        """Reduce this rank's piece of a chunk, which the others brought."""
        sources = [self._input(turn, rank, own, self._rank * step) for rank in range(self._size)]
        sources[self._rank] = own
        self._reduce(out, sources, op)

    def _input(self, turn: int, rank: int, like: Tensor, start: int = 0) -> Tensor:
        return self._quarter(turn % 2, like.dtype)[rank][start : start + len(like)]

    def _result(self, turn: int, rank: int, like: Tensor) -> Tensor:
        return self._quarter(2 + turn % 2, like.dtype)[rank][: len(like)]

    def _quarter(self, index: int, dtype: torch.dtype) -> list[Tensor]:
        if (index, dtype) not in self._typed:
            self._typed[index, dtype] = [stretch.view(dtype) for stretch in self._quarters[index]]
        return self._typed[index, dtype]


def _sum_bytes(size: int) -> int:
    return -(-CHUNK_BYTES // size // LINE_BYTES) * LINE_BYTES + LINE_BYTES


def _in_steps(pieces: Sequence[Tensor], step: int, turns: int = 0) -> list[list[Tensor]]:
    """Each piece cut into runs of ``step``, all into as many: that of the largest, or ``turns``."""
    turns = turns or -(-max(len(piece) for piece in pieces) // step)
    return [[piece[turn * step : (turn + 1) * step] for turn in range(turns)] for piece in pieces]
