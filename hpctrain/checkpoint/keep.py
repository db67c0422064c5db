"""Keep: the folder of checkpoints. Its files appear whole or not at all, and only old ones go.

A file is written aside as ``.step-00000100.h5.HOST.PID.TOKEN.part``, renamed to ``step-00000100.h5`` when all ranks
have confirmed their bytes, and named in ``latest``. The text file ``kept`` names those that are never removed.

Only one rank calls anything here: folders are listed once, and what is decided is told to the others, who may see an
older state of a network file system.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hpctrain.checkpoint.format import Index, read_index
from hpctrain.checkpoint.save import sync_file
from hpctrain.cluster import aside
from hpctrain.errors import CheckpointError, FullError, IncompleteError

FOLDER = "checkpoints"  # of a run's folder
POINTER = "latest"
KEPT = "kept"
STEP_FILE = re.compile(r"step-(\d{8,})\.h5")
PART_FILE = re.compile(rf"\.(?:step-\d{{8,}}\.h5|latest|kept)\.{aside.TAG}\.part")

log = logging.getLogger(__name__)


def file_name(step: int) -> str:
    """The name of a step's file."""
    return f"step-{step:08d}.h5"


def part_name(name: str) -> str:
    """A new name to write ``name`` aside under: it tells whose it is, and no other writer has it."""
    return f".{name}.{aside.tag()}.part"


def listing(folder: Path) -> list[str]:
    """The names in the folder, none where there is no folder yet. Any other failure to list is an error."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


@dataclass(frozen=True)
class Keep:
    """What stays, beside what the folder's list names: the ``newest`` so many, and each step that ``every`` divides."""

    newest: int
    every: int = 0


def newest(folder: Path, names: Iterable[str], but: Collection[str] = ()) -> tuple[Path, Index] | None:
    """The newest whole checkpoint among ``names``; each newer file that is passed over gets a line in the log.

    ``but`` names those that were found damaged.

    None where there are no files of steps at all. Raises IncompleteError where there are, and none is whole: a run that
    silently began again would be worse. A file that cannot be read raises its OSError.
    """
    steps = sorted(((int(found[1]), found[0]) for name in names if (found := STEP_FILE.fullmatch(name))), reverse=True)
    for _, name in steps:
        try:
            if name not in but:
                return folder / name, read_index(folder / name)
        except CheckpointError as error:
            log.warning("skipped: %s", in_a_line(error))
    if steps:
        raise IncompleteError(
            f"{folder} has {len(steps)} checkpoints and none of them is whole",
            "the log names each and its fault",
            "remove them to start from the beginning",
        )
    return None


def publish(part: Path, path: Path, sync: bool) -> None:
    """Give a finished file its name, and let the pointer name it."""
    os.replace(part, path)
    if sync:
        sync_file(path.parent)
    _write(path.parent / POINTER, path.name + "\n", sync)


def hold(folder: Path, name: str, hours: float) -> None:
    """Put a checkpoint on the list of those that are kept for good, where the last one was put there ``hours`` ago."""
    path = folder / KEPT
    if hours and (not path.exists() or time.time() - path.stat().st_mtime >= hours * 3600):
        _write(path, "".join(f"{one}\n" for one in [*_held(folder), name]), False)


def prune(folder: Path, names: Iterable[str], keep: Keep, step: int) -> None:
    """Remove what is older than the newest whole checkpoints, counted from ``step``, just saved, down.

    Later steps, which a run that went back has left behind it, stay: only a person knows what they are worth.
    """
    held = _held(folder)
    steps = sorted(((int(found[1]), found[0]) for name in names if (found := STEP_FILE.fullmatch(name))), reverse=True)
    whole = 0
    for number, name in steps:
        if number > step:
            continue
        if whole == keep.newest:
            if name in held or (keep.every and number % keep.every == 0):
                continue
            (folder / name).unlink(missing_ok=True)
        elif number == step or _whole(folder / name):
            whole += 1


def sweep(folder: Path, names: Iterable[str]) -> None:
    """Remove files aside whose writers are dead."""
    for name in names:
        found = PART_FILE.fullmatch(name)
        if found and aside.dead(folder / name, found["host"], int(found["pid"])):
            (folder / name).unlink(missing_ok=True)


def abandoned(folder: Path, name: str) -> Iterator[Path]:
    """What writers of ``name`` that are dead left aside."""
    named = re.compile(rf"\.{re.escape(name)}\.{aside.TAG}\.part")
    for entry in listing(folder):
        found = named.fullmatch(entry)
        if found and aside.dead(folder / entry, found["host"], int(found["pid"])):
            yield folder / entry


def check_room(folder: Path, needed: int) -> None:
    """Raise CheckpointError where the folder's file system has less than ``needed`` bytes left for us."""
    found = os.statvfs(_standing(folder))
    free = found.f_bavail * found.f_frsize
    if free < needed:
        raise FullError(
            f"{folder}: a checkpoint needs {needed} bytes and {free} are free",
            "the newest one stays until the next is whole, so there must be room for both",
            "free space there, give another folder (run.dir), or lower checkpoint.keep",
        )


def in_a_line(error: Exception) -> str:
    """An error's parts, for the log."""
    return "; ".join(str(error).split("\n  "))


def _held(folder: Path) -> list[str]:
    """The names on the list of those that are kept for good; a person may add to it."""
    path = folder / KEPT
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def _write(path: Path, text: str, sync: bool) -> None:
    """Replace a small file of text, whole."""
    part = path.parent / part_name(path.name)
    part.write_text(text, encoding="utf-8")
    if sync:
        sync_file(part)
    os.replace(part, path)
    if sync:
        sync_file(path.parent)


def _standing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())


def _whole(path: Path) -> bool:
    try:
        read_index(path)
    except CheckpointError:
        return False
    return True
