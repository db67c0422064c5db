"""Part: the tokens of one rank's documents, written aside and then put in their place in the pair of all ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import dtype_for, fill_index, lay_index, sync
from hpctrain.errors import DataError

LAID_OUT = (".bin.tmp", ".idx.tmp", ".json.tmp", ".tokenizer.json.tmp")


class Part:
    """Live: it holds the name of this rank's file, and the size of each document written there.

    ``own`` is what the names of all files aside begin with: the same on all ranks, and no other job's.
    """

    def __init__(self, own: str, rank: int, tokenizer: Tokenizer) -> None:
        self.own, self.tokenizer = own, tokenizer
        self.dtype = dtype_for(tokenizer.vocabulary)
        self.path = Path(f"{own}.part{rank}.tmp")
        self._sizes = [np.zeros(0, np.int64)]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Remove this rank's file at the end; after an error, also what was laid out for all ranks."""
        try:
            yield
        except BaseException:
            for suffix in LAID_OUT:
                Path(self.own + suffix).unlink(missing_ok=True)
            raise
        finally:
            self.path.unlink(missing_ok=True)

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each document, its end included."""
        return np.concatenate(self._sizes)

    def add(self, texts: Sequence[str]) -> int:
        """Append the tokens of documents, each with its end; how many tokens these are."""
        end = np.array([self.tokenizer.eod])
        found = [np.append(tokens, end) for tokens in self.tokenizer.encode_batch(texts)]
        with open(self.path, "ab") as file:
            for tokens in found:
                file.write(tokens.astype(self.dtype.newbyteorder("<")).tobytes())
        self._sizes.append(np.array([len(tokens) for tokens in found]))
        return int(self._sizes[-1].sum())

    def lay_out(self, documents: int, tokens: int) -> None:
        """Make both files of the pair in their full length, for all ranks to fill. One rank calls it."""
        lay_index(self.own + ".idx.tmp", self.dtype, documents)
        with open(self.own + ".bin.tmp", "wb") as whole:
            whole.truncate(tokens * self.dtype.itemsize)

    def place(self, documents_before: int, tokens_before: int) -> None:
        """Move this part to its place in the files laid out, behind those of the ranks before."""
        sizes = self.sizes
        fill_index(self.own + ".idx.tmp", sizes, documents_before, tokens_before)
        if not len(sizes):
            return
        self._check(int(sizes.sum()) * self.dtype.itemsize)
        with open(self.path, "rb") as part, open(self.own + ".bin.tmp", "r+b") as whole:
            whole.seek(tokens_before * self.dtype.itemsize)
            shutil.copyfileobj(part, whole, 16 << 20)
            sync(whole)
        self.path.unlink()

    def _check(self, nbytes: int) -> None:
        """Refuse a file that is not what was written, since somebody else has touched it."""
        found = self.path.stat().st_size
        if found != nbytes:
            what = f"{self.path} has {found} bytes and not the {nbytes} that were written"
            raise DataError(what, "nobody else may write or remove it meanwhile", "look who did, and start again")
