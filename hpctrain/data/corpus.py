"""Corpus: the documents of one token file, split into training and validation and packed end to end into samples.

Documents are taken in blocks of consecutive ones, so that nothing grows with the corpus but a few numbers a block.
A fixed part of each block's tokens, in whole documents but for one that is cut, is for validation. Each epoch arranges
the blocks anew, and the documents within each; sample i is then S+1 tokens from place i x S on. So documents mix with
the 4096 around them, and samples with all others (``order.shuffled``, where batches are made).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.data.order import order
from hpctrain.data.tokens import Tokens
from hpctrain.errors import DataError

Split = Literal["train", "validation"]
Sample = tuple[NDArray[np.int64], NDArray[np.int64]]

BLOCK = 4096  # documents; arranging so many takes less than a millisecond
_KEPT = 64  # arranged blocks held, 24 bytes a document

# Keys of the two kinds of order, apart from each other and from anything that batches draw from the same seed.
_SPLIT_KEY, _EPOCH_KEY = 0x5EED0001, 0x5EED0002


@dataclass(frozen=True, eq=False)
class Course:
    """The blocks of one split in the order of one epoch; ``ends[k]`` tokens lie in the first k + 1 of them."""

    blocks: NDArray[np.int64]
    ends: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Pieces:
    """The documents of a block in the order of one epoch: ``places[k]`` is where piece k begins in the file.

    ``ends[k]`` tokens lie in the first k pieces, so piece k is tokens ends[k] to ends[k + 1] of the block.
    """

    places: NDArray[np.int64]
    documents: NDArray[np.int64]
    ends: NDArray[np.int64]


class Corpus:
    """Samples of ``sequence`` + 1 tokens of one token file. Live: it keeps the blocks that it arranged last."""

    def __init__(self, tokens: Tokens, sequence: int, validation: float = 0.0, seed: int = 0) -> None:
        self.tokens, self.sequence, self.seed = tokens, sequence, seed
        self._firsts = np.append(np.arange(0, tokens.documents, BLOCK), tokens.documents)
        self._sizes = _split_sizes(_places(tokens, self._firsts), validation)
        self._course = lru_cache(maxsize=4)(self._course)
        self._pieces = lru_cache(maxsize=_KEPT)(self._pieces)
        self.samples = self._count("train") // sequence
        self.validation_samples = -(-self._count("validation") // sequence)
        self._check(validation)

    def sample(self, i: int, epoch: int = 0) -> Sample:
        """Sample ``i`` of the packed training tokens of an epoch: S+1 tokens, and the document of each."""
        start = i * self.sequence
        return self._read("train", epoch, start, start + self.sequence + 1)

    def validation_sample(self, i: int) -> Sample:
        """Validation sample ``i``: as ``sample``; the last is filled up with token 0 of document -1."""
        start = i * self.sequence
        stop = min(start + self.sequence, self._count("validation")) + 1
        tokens, documents = self._read("validation", 0, start, stop)
        missing = self.sequence + 1 - len(tokens)
        return np.pad(tokens, (0, missing)), np.pad(documents, (0, missing), constant_values=-1)

    def _count(self, split: Split) -> int:
        """Tokens of a split that have one before them, and so can be predicted."""
        return max(0, int(self._sizes[split].sum()) - 1)

    def _check(self, validation: float) -> None:
        if self.samples:
            return
        held = int(self._sizes["train"].sum())
        why = f"one takes {self.sequence + 1}; the file has {self.tokens.total}, {validation} of them for validation"
        mend = "give more text, or a smaller model.sequence or data.validation"
        raise DataError(f"{self.tokens.prefix} has {held} tokens to train on, fewer than one sample", why, mend)

    def _read(self, split: Split, epoch: int, start: int, stop: int) -> Sample:
        """Tokens ``start`` to ``stop`` of a split's packed tokens, and the document of each."""
        tokens, documents = np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        course, at = self._course(split, epoch), start
        while at < stop:
            turn = int(np.searchsorted(course.ends, at, "right"))
            block = int(course.blocks[turn])
            until = min(stop, int(course.ends[turn]))
            begin = int(course.ends[turn]) - int(self._sizes[split][block])
            done = slice(at - start, until - start)
            self._copy(self._pieces(split, epoch, block), at - begin, tokens[done], documents[done])
            at = until
        return tokens, documents

    def _copy(self, pieces: Pieces, at: int, tokens: NDArray, documents: NDArray) -> None:
        """Fill ``tokens`` and ``documents`` from place ``at`` of a block on."""
        done, piece = 0, int(np.searchsorted(pieces.ends, at, "right")) - 1
        while done < len(tokens):
            skipped = at + done - int(pieces.ends[piece])
            taken = min(len(tokens) - done, int(pieces.ends[piece + 1]) - at - done)
            place = int(pieces.places[piece]) + skipped
            tokens[done : done + taken] = self.tokens.read(place, place + taken)
            documents[done : done + taken] = pieces.documents[piece]
            done, piece = done + taken, piece + 1

    def _course(self, split: Split, epoch: int) -> Course:
        sizes = self._sizes[split]
        blocks = np.arange(len(sizes)) if split == "validation" else order(len(sizes), _EPOCH_KEY, self.seed, epoch)
        return Course(blocks, np.cumsum(sizes[blocks]))

    def _pieces(self, split: Split, epoch: int, block: int) -> Pieces:
        first, last = int(self._firsts[block]), int(self._firsts[block + 1])
        places, sizes, documents = _part(self.tokens.borders(first, last), int(self._sizes["validation"][block]), split)
        if split == "train":
            arranged = order(len(places), _EPOCH_KEY, self.seed, epoch, block)
            places, sizes, documents = places[arranged], sizes[arranged], documents[arranged]
        return Pieces(places, documents + first, np.concatenate(([0], np.cumsum(sizes))))


def _places(tokens: Tokens, firsts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([tokens.borders(int(first), int(first)) for first in firsts])


def _split_sizes(borders: NDArray[np.int64], validation: float) -> dict[Split, NDArray[np.int64]]:
    """Tokens of each block in each split. The part is taken of the running sum, so that small blocks add up right."""
    kept = np.diff(np.floor(borders * validation).astype(np.int64))
    return {"train": np.diff(borders) - kept, "validation": kept}


def _part(borders: NDArray[np.int64], kept: int, split: Split) -> tuple[NDArray, NDArray, NDArray]:
    """Place, size and number in the block of each document of a split, in an order that no seed or epoch changes.

    The first ``kept`` tokens of that order are for validation; the document that this cuts has a piece in each split.
    """
    fixed = order(len(borders) - 1, _SPLIT_KEY, int(borders[0]))
    places, sizes = borders[:-1][fixed], np.diff(borders)[fixed]
    heads = np.clip(kept - (np.cumsum(sizes) - sizes), 0, sizes)
    if split == "validation":
        sizes = heads
    else:
        places, sizes = places + heads, sizes - heads
    filled = sizes > 0
    return places[filled], sizes[filled], fixed[filled]
