"""Prepare: text to a token file pair, on all ranks.

The bytes of all files are one row (``text``); each rank takes an equal range of it, writes the tokens of its documents
aside (``part``), and puts them in their place when all ranks know how much the ranks before them have. So the pair is
the same whatever the number of ranks. It gets its name last, from files written and synced beside it, under names that
no other job has: several may prepare the same text in the same place at once, and none waits for another.

Ranks work in rounds. After each they tell each other how far they are and whether one of them failed: an error of one
rank is raised on all of them, within a round.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from hpctrain.cluster import aside
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import DataConfig, SourceConfig
from hpctrain.data import tokenizer as tokenizers
from hpctrain.data.part import Part
from hpctrain.data.progress import Tell, shown
from hpctrain.data.text import File, documents, find
from hpctrain.data.together import each, led
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import Description, publish
from hpctrain.errors import ConfigError, DataError

ROUND_BYTES = 16 << 20  # of text, on each rank: a few seconds from one round to the next
BATCH_CHARACTERS = 1 << 20  # given to the tokenizer at once
TRAINING_BYTES = 4096  # of text that a tokenizer is trained on, for each token that it is to have
TRAINING_PLACES = 64  # where that text is taken from, spread evenly over the row

FILES = r"(?:bin|idx|json|tokenizer\.json|part\d+)\.tmp"


@dataclass(frozen=True)
class Request:
    """What a pair is to be made of, and how."""

    sources: tuple[str, ...]
    tokenizer: str = "bytes"
    pattern: str = "*.txt"
    key: str = "text"
    """Where the text lies in the objects of JSONL."""
    eod: str | None = None
    """The token that ends a document, where the tokenizer's JSON has an unusual one."""
    on_error: Literal["fail", "skip"] = "fail"
    """Whether a document that cannot be read ends the work, or is left out and counted."""


def prepare(
    request: Request,
    out: str | Path,
    group: Group | None = None,
    tell: Tell | None = None,
    heed: Callable[[], None] = lambda: None,
) -> Description:
    """Make ``OUT.bin``, ``OUT.idx`` and ``OUT.json``, and ``OUT.tokenizer.json`` where the tokenizer has one.

    Collective. All ranks must see the folder of ``out``. ``heed`` is called by all between rounds, and may end the work
    by an error of all; then nothing is left. Raises DataError and ConfigError, on all ranks alike.
    """
    group = group or SoloGroup()
    own = led(group, lambda: _own(Path(out)))
    files = [File(*file) for file in led(group, lambda: _files(request))]
    asked = led(group, lambda: _fingerprint(request, files))  # before they are read: they may change meanwhile
    tokenizer = Tokenizer(*led(group, lambda: _tokenizer(request, files)))
    part = Part(own, group.rank, tokenizer)
    with part.aside():
        counts = _fill(part, request, files, group, tell, heed)
        _join(part, group)
        return Description(**led(group, lambda: _publish(part, str(out), asked, files, counts)))


def prepare_shown(
    request: Request, out: str | Path, group: Group, stream: TextIO, heed: Callable[[], None] = lambda: None
) -> Description:
    """``prepare``, its progress shown on ``stream`` of the leading rank."""
    if not group.leads:
        return prepare(request, out, group, heed=heed)
    with shown(stream) as tell:
        return prepare(request, out, group, tell, heed)


def ready(
    data: DataConfig,
    folder: Path,
    group: Group,
    stream: TextIO | None = None,
    heed: Callable[[], None] = lambda: None,
) -> tuple[SourceConfig, ...]:
    """The sources of a run: those that it names, else its text, prepared in ``folder`` unless that was done before.

    Collective. The leading rank shows its progress on ``stream`` (the error stream when not given); ``heed`` as in
    ``prepare``. Text that is not UTF-8 is left out and counted: the tests of the standard library hold some. Jobs that
    call it at once each prepare the text, and all take the tokens of the one that is done first.
    """
    if data.sources:
        return data.sources
    if not data.text:
        raise ConfigError("data.sources and data.text are empty", "there is nothing to train on", "name one of them")
    request = Request(data.text, data.tokenizer, data.pattern, on_error="skip")
    found = led(group, lambda: _standing(request, folder))
    return (SourceConfig(path=found or _made(request, folder, group, stream or sys.stderr, heed)),)


def _made(request: Request, folder: Path, group: Group, stream: TextIO, heed: Callable[[], None]) -> str:
    """The prefix of a run's tokens, prepared in a folder of their own that gets its name when they are whole."""
    own = Path(led(group, lambda: str(folder / f".tokens.{aside.tag()}.tmp")))
    try:
        made = prepare_shown(request, own / "text", group, stream, heed)
        return led(group, lambda: _settle(own, _place(folder, made.request)))
    finally:
        if group.leads:
            shutil.rmtree(own, ignore_errors=True)


# ---- what each rank does -------------------------------------------------------------------------------------------


def _fill(
    part: Part,
    request: Request,
    files: Sequence[File],
    group: Group,
    tell: Tell | None,
    heed: Callable[[], None],
) -> Counter[str]:
    """Write the documents of this rank's range of all bytes, round by round; the counts of all ranks."""
    if group.size > 1:
        # The ranks share the cores already; threads in each would only fight for them.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    total, done = _length(files), Counter()
    # One place more than the bytes: an empty file at the end begins there.
    mine = _cut((0, total + 1), group.rank, group.size)
    rounds = max(1, -(-total // (ROUND_BYTES * group.size)))
    for turn in range(rounds):
        heed()
        span = _cut(mine, turn, rounds)
        done = sum(map(Counter, each(group, lambda span=span: _take(part, request, files, span))), done)
        if group.leads and tell:
            tell(done, total)
    return done


def _take(part: Part, request: Request, files: Sequence[File], span: tuple[int, int]) -> Counter[str]:
    """Write the documents that begin in one range of bytes."""
    counts = Counter(bytes=span[1] - span[0])
    for texts in _grouped(_usable(documents(files, *span, request.key), request, counts)):
        counts.update(documents=len(texts), tokens=part.add(texts))
    return counts


def _usable(found: Iterable[str | DataError], request: Request, counts: Counter[str]) -> Iterator[str]:
    """The documents that have a text; the others are counted, or end the work."""
    for document in found:
        if isinstance(document, DataError):
            if request.on_error == "fail":
                raise document
            counts["skipped"] += 1
        elif document:
            yield document
        else:
            counts["empty"] += 1


def _grouped(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in lists that are worth a call of the tokenizer and do not fill the memory."""
    group, characters = [], 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _join(part: Part, group: Group) -> None:
    """Put the parts of all ranks together, in the order of the ranks."""
    sizes = part.sizes
    told = each(group, lambda: [len(sizes), int(sizes.sum())])
    documents, tokens = (sum(column) for column in zip(*told, strict=True))
    before = [sum(column) for column in zip([0, 0], *told[: group.rank], strict=True)]
    led(group, lambda: _lay_out(part, documents, tokens))
    each(group, lambda: part.place(*before))


# ---- what the leading rank does --------------------------------------------------------------------------------------


def _own(out: Path) -> str:
    """Make the folder, remove what killed runs left there, and give what this one's files aside are called."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in _left(out.parent, rf"{re.escape(out.name)}\.{aside.TAG}\.{FILES}"):
        left.unlink(missing_ok=True)
    return f"{out}.{aside.tag()}"


def _left(folder: Path, named: str) -> list[Path]:
    """What is called so in a folder and belongs to dead processes."""
    found = [(path, re.fullmatch(named, path.name)) for path in folder.iterdir()]
    return [path for path, name in found if name and aside.dead(path, name["host"], int(name["pid"]))]


def _files(request: Request) -> list[list[Any]]:
    return [[file.path, file.start, file.size] for file in find(request.sources, request.pattern)]


def _tokenizer(request: Request, files: Sequence[File]) -> list[Any]:
    size = tokenizers.bpe_size(request.tokenizer)
    if size is None:
        found = tokenizers.load(request.tokenizer, request.eod)
    else:
        found = tokenizers.train(_training_text(files, request.key, size * TRAINING_BYTES), size)
    return [found.vocabulary, found.eod, found.json]


def _training_text(files: Sequence[File], key: str, limit: int) -> Iterator[str]:
    """Text from places spread evenly over all files: all of it, where it is not longer than ``limit``."""
    total = _length(files)
    places = TRAINING_PLACES if total > limit else 1
    for place in range(places):
        found = documents(files, *_cut((0, total), place, places), key)
        yield from _first((one for one in found if isinstance(one, str)), min(total, limit) // places)


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        if characters <= 0:
            return
        yield text[:characters]
        characters -= len(text)


def _lay_out(part: Part, documents: int, tokens: int) -> None:
    if not documents:
        raise DataError("no document has any text", "all files are empty or were left out", "give other sources")
    part.lay_out(documents, tokens)


def _publish(part: Part, out: str, asked: str, files: Sequence[File], counts: Counter[str]) -> dict[str, Any]:
    tokenizer = part.tokenizer
    made = Description(
        tokenizer.vocabulary, tokenizer.eod, tokenizer.identity, len(files), _length(files),
        *(counts[name] for name in ("documents", "tokens", "empty", "skipped")), asked,
    )  # fmt: skip
    beside = {".json": made.text(), ".tokenizer.json": tokenizer.json}
    for suffix, text in beside.items():
        if text is None:
            Path(out + suffix).unlink(missing_ok=True)
        else:
            Path(part.own + suffix + ".tmp").write_text(text, encoding="utf-8")
    publish(part.own, out, ".bin", *(suffix for suffix, text in beside.items() if text is not None))
    return asdict(made)


def _standing(request: Request, folder: Path) -> str | None:
    """The prefix of the tokens that were made before, of the same files in the same way; what the dead left goes."""
    if folder.is_dir():
        for left in _left(folder, rf"\.tokens\.{aside.TAG}\.tmp"):
            shutil.rmtree(left, ignore_errors=True)
    place = _place(folder, _fingerprint(request, find(request.sources, request.pattern)))
    return _whole(place) if place.exists() else None


def _place(folder: Path, asked: str) -> Path:
    """The folder of the tokens that were asked for so; once it has this name, nothing in it changes."""
    return folder / f"tokens-{asked[:16]}"


def _settle(own: Path, place: Path) -> str:
    """Give a folder of tokens its name, unless another job was first: then its own are taken, and they are the same."""
    try:
        os.rename(own, place)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    return _whole(place)


def _whole(place: Path) -> str:
    """The prefix of the tokens in a folder that has its name."""
    prefix = str(place / "text")
    if any(not Path(prefix + suffix).exists() for suffix in (".bin", ".idx", ".json")):
        what = f"{place} lacks some of its tokens' files"
        why = "they were whole when it got its name: somebody has removed one since"
        raise DataError(what, why, "remove it, and they are made again")
    return prefix


def _fingerprint(request: Request, files: Sequence[File]) -> str:
    """A hash of the settings and of each file's name, size and time of change."""
    paths = [file.path for file in files]
    if Path(request.tokenizer).is_file():
        paths.append(request.tokenizer)
    seen = [[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths]
    how = [request.tokenizer, request.key, request.eod, request.on_error]
    return hashlib.sha256(json.dumps([how, seen]).encode()).hexdigest()


# ---- bytes ---------------------------------------------------------------------------------------------------------


def _length(files: Sequence[File]) -> int:
    return files[-1].stop if files else 0


def _cut(span: tuple[int, int], piece: int, pieces: int) -> tuple[int, int]:
    """One of ``pieces`` ranges that make up ``span``, as equal as can be."""
    start, stop = span
    return start + (stop - start) * piece // pieces, start + (stop - start) * (piece + 1) // pieces
