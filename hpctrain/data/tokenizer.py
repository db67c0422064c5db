"""Tokenizer: text to tokens and back.

Three kinds, by how they are named: ``bytes`` (each byte of UTF-8 is a token, and 256 ends a document), ``bpe:N`` (a
byte-level byte-pair encoding of N tokens, trained on the text), or the path of a Hugging Face ``tokenizer.json``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from hpctrain.errors import ConfigError, DataError

EOD = "<|endoftext|>"
# What the families of tokenizers call the token between documents, the likeliest first.
EOD_NAMES = (EOD, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
SMALLEST_BPE = 257  # 256 bytes and the end of a document


@dataclass(frozen=True)
class Tokenizer:
    """Text to tokens and back. ``json`` is the Hugging Face description; None for the one that takes bytes."""

    vocabulary: int
    eod: int
    json: str | None = None

    @property
    def identity(self) -> str:
        """``bytes``, or the SHA-256 of the JSON."""
        return "bytes" if self.json is None else hashlib.sha256(self.json.encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """The tokens of each text. A special token's name in a text is text like any other; none is added."""
        if self.json is None:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.int64) for text in texts]
        found = self._model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in found]

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; special ones leave nothing, and a character cut in two gives a replacement mark."""
        if self.json is None:
            return bytes(int(token) for token in tokens if token != self.eod).decode(errors="replace")
        return self._model.decode([int(token) for token in tokens], skip_special_tokens=True)

    @cached_property
    def _model(self) -> tokenizers.Tokenizer:
        model = tokenizers.Tokenizer.from_str(self.json)
        # Else a text that speaks of <|endoftext|> would end its document there.
        model.encode_special_tokens = True
        # Tokenizers made for batches of one length carry these; a document is whole.
        model.no_truncation()
        model.no_padding()
        return model


BYTES = Tokenizer(vocabulary=257, eod=256)


def bpe_size(name: str) -> int | None:
    """The N of ``bpe:N``; None for the other kinds, which need no training."""
    if not name.startswith("bpe:"):
        return None
    if not re.fullmatch(r"bpe:\d+", name) or int(name[4:]) < SMALLEST_BPE:
        why = f"N is a whole number of tokens: at least {SMALLEST_BPE}, for the 256 bytes and the end of a document"
        raise ConfigError(f"data.tokenizer = {name!r} cannot be", why, "write e.g. bpe:8192")
    return int(name[4:])


def train(texts: Iterable[str], size: int) -> Tokenizer:
    """A byte-level byte-pair encoding of at most ``size`` tokens, trained on ``texts``: the same for the same texts."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[EOD],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return parse(model.to_str())


def load(name: str, eod: str | None = None) -> Tokenizer:
    """The tokenizer called ``bytes``, or that of a JSON file, where ``eod`` may name the token that ends a document."""
    if name == "bytes":
        return BYTES
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        mend = "give bytes, bpe:N or the path of a Hugging Face tokenizer.json"
        raise DataError(f"tokenizer {name} cannot be read", str(error), mend) from None
    return parse(text, eod, name)


def parse(text: str, eod: str | None = None, source: str = "tokenizer") -> Tokenizer:
    """A tokenizer from the text of its JSON; ``source`` names it in errors."""
    try:
        known = tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises nothing narrower
        why = str(error)
        raise DataError(f"{source} is not a Hugging Face tokenizer", why, "give a tokenizer.json") from None
    # Ids may have gaps, so their number is not what an embedding needs.
    return Tokenizer(max(known.values(), default=-1) + 1, _eod(known, eod, source), text)


def beside(prefix: str | Path, description: Any) -> Tokenizer:
    """The tokenizer that a prepared pair was made with, from the files beside it."""
    if description.tokenizer == "bytes":
        return BYTES
    path = f"{prefix}.tokenizer.json"
    found = load(path, None)
    return Tokenizer(found.vocabulary, description.eod, found.json)


def _eod(known: dict[str, int], eod: str | None, source: str) -> int:
    names = EOD_NAMES if eod is None else (eod,)
    for name in names:
        if name in known:
            return known[name]
    why = f"it has no token {' or '.join(names)}"
    raise DataError(f"{source}: no token ends a document", why, "name the one it has with --eod")
