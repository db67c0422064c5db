"""Batch: the samples of a step, as a function of (seed, step) alone, and the part of them that a rank takes.

Sample n of a run comes from the source that ``Blend`` gives it; a source that has given all its samples starts its next
epoch, in another order. Step k takes samples k x batch to (k + 1) x batch, whatever the mesh: ranks and micro-batches
only cut this list. So a run resumes from its step, also on another number of ranks.

Token t of a sample is the input and token t + 1 its target, also where a document ends and the next begins; what has no
target has ``IGNORE``. Where attention must not cross that border, ``documents`` says which document each input is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hpctrain.config import DataConfig, TrainConfig
from hpctrain.data.blend import Blend
from hpctrain.data.corpus import Corpus, Sample
from hpctrain.data.order import shuffled
from hpctrain.data.tokens import Tokens, describe
from hpctrain.errors import ConfigError, DataError, PlanError

IGNORE = -100  # what torch's cross_entropy leaves out

_SAMPLE_KEY, _VALIDATION_KEY = 0x5EED0003, 0x5EED0004


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that go through the model at once: int64, [sequences, tokens]."""

    tokens: Tensor
    targets: Tensor
    """``IGNORE`` where nothing is to be predicted."""
    documents: Tensor | None
    """A number for each document, -1 for padding; None where attention may cross documents."""
    samples: tuple[int, ...] = ()
    """Which sequences of the step's batch these are, counted from 0 over all ranks: what dropout goes by."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on a device."""
        documents = None if self.documents is None else self.documents.to(device)
        return MicroBatch(self.tokens.to(device), self.targets.to(device), documents, self.samples)

    @property
    def predicted(self) -> int:
        """How many targets count."""
        return int((self.targets != IGNORE).sum())


class Batches:
    """The batches of a run. Live: it holds the mapped token files. Raises ConfigError and DataError."""

    def __init__(
        self, data: DataConfig, train: TrainConfig, sequence: int, seed: int, vocabulary: int | None = None
    ) -> None:
        if not data.sources:
            raise ConfigError("data.sources is empty", "a batch is made of tokens", "name the PREFIX of a pair")
        self.data, self.train, self.sequence, self.seed = data, train, sequence, seed
        self.vocabulary = _vocabulary([source.path for source in data.sources], vocabulary)
        self.corpora = tuple(Corpus(Tokens(source.path), sequence, data.validation, seed) for source in data.sources)
        self.blend = Blend.of([source.weight for source in data.sources])
        self._samples = np.array([corpus.samples for corpus in self.corpora])
        self.validation_samples = self.blend.reach([corpus.validation_samples for corpus in self.corpora])

    @property
    def validation_batches(self) -> int:
        """Batches that hold every validation sample once, in the proportions of the blend; the last is padded."""
        return -(-self.validation_samples // self.train.batch)

    def batch(self, step: int) -> NDArray[np.int64]:
        """The numbers of the samples of a step, [batch]; the same for every mesh."""
        return np.arange(step * self.train.batch, (step + 1) * self.train.batch)

    def locate(self, samples: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The source of each sample number, that source's epoch, and the sample of its packed tokens."""
        source, index = self.blend.pick(samples)
        epoch, place = np.divmod(index, self._samples[source])
        return source, epoch, shuffled(place, self._samples[source], _SAMPLE_KEY, self.seed, source, epoch)

    def part(self, step: int, rank: int = 0, size: int = 1, microbatch: int | None = None) -> list[MicroBatch]:
        """The micro-batches of a step for data-parallel rank ``rank`` of ``size``.

        The last one is smaller where ``microbatch`` (``train.microbatch`` when not given) does not divide the part.
        """
        mine = _share(self.batch(step), rank, size)
        first = rank * self.train.batch // size
        return self._cut([self._sample(*place) for place in zip(*self.locate(mine), strict=True)], first, microbatch)

    def validation(self, index: int, rank: int = 0, size: int = 1, microbatch: int | None = None) -> list[MicroBatch]:
        """The micro-batches of validation batch ``index`` for one rank: the same at every step, epoch and seed.

        Samples that fill up the last batch have no target, so that every rank has as many micro-batches.
        """
        if not 0 <= index < self.validation_batches:
            why = f"data.validation = {self.data.validation} keeps {self.validation_samples} samples, in batches of"
            mend = "keep a larger data.validation, or ask for fewer train.validate_batches"
            raise DataError(f"there is no validation batch {index}", f"{why} {self.train.batch}", mend)
        first = rank * self.train.batch // size
        return self._cut([self._validation_sample(n) for n in _share(self.batch(index), rank, size)], first, microbatch)

    def _sample(self, source: int, epoch: int, i: int) -> Sample:
        return self._known(source, self.corpora[source].sample(int(i), int(epoch)))

    def _validation_sample(self, n: int) -> Sample:
        if n >= self.validation_samples:
            return np.zeros(self.sequence + 1, np.int64), np.full(self.sequence + 1, -1)
        source, index = (int(found) for found in self.blend.pick(n))
        corpus = self.corpora[source]
        i = int(shuffled(index, corpus.validation_samples, _VALIDATION_KEY)[0])
        return self._known(source, corpus.validation_sample(i))

    def _known(self, source: int, sample: Sample) -> Sample:
        """The sample, when the model's embedding has a row for each of its tokens."""
        low, high = int(sample[0].min()), int(sample[0].max())
        if low < 0 or high >= self.vocabulary:
            what = f"{self.data.sources[source].path} holds token {low if low < 0 else high}"
            why = f"the vocabulary has {self.vocabulary} tokens"
            raise DataError(what, why, "set model.vocabulary to the number of its tokenizer")
        return sample

    def _cut(self, samples: list[Sample], first: int, microbatch: int | None) -> list[MicroBatch]:
        """Micro-batches of samples that are numbers ``first`` and following of the batch."""
        size = microbatch or self.train.microbatch
        return [self._micro(samples[i : i + size], first + i) for i in range(0, len(samples), size)]

    def _micro(self, samples: Sequence[Sample], first: int) -> MicroBatch:
        tokens, documents = (np.stack(rows) for rows in zip(*samples, strict=True))
        targets = np.where(documents[:, 1:] < 0, IGNORE, tokens[:, 1:])
        marks = None if self.data.cross_documents else torch.from_numpy(documents[:, :-1].copy())
        inputs = torch.from_numpy(tokens[:, :-1].copy())
        return MicroBatch(inputs, torch.from_numpy(targets), marks, tuple(range(first, first + len(samples))))


def _share(samples: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """The samples of one data-parallel rank: equally many for each."""
    batch = len(samples)
    if batch % size:
        below, above = batch // size * size, -(-batch // size) * size
        sizes = " or ".join(str(n) for n in (below, above) if n)
        what = f"train.batch = {batch} does not divide over {size} data-parallel ranks"
        raise PlanError(what, "each of them takes as many sequences", f"set it to {sizes}")
    return samples[rank * batch // size : (rank + 1) * batch // size]


def _vocabulary(paths: list[str], given: int | None) -> int:
    """The size of the vocabulary: as given, else as the sources' descriptions say."""
    if given is not None:
        return given
    known = {path: found.vocabulary for path in paths if (found := describe(path)) is not None}
    if not known:
        why = f"no {paths[0]}.json says how many tokens its tokenizer has"
        raise ConfigError('model.vocabulary = "auto" cannot be found out', why, "set model.vocabulary to a number")
    if len(set(known.values())) > 1:
        told = ", ".join(f"{path}: {size}" for path, size in known.items())
        raise DataError("the sources have different vocabularies", told, "prepare them with one tokenizer")
    return next(iter(known.values()))
