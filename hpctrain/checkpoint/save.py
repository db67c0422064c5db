"""Save: the two ways to fill a laid-out file. Whichever is taken, the file's bytes are the same.

``direct``: each rank writes its byte ranges itself, with no MPI call and no HDF5. ``mpio``: it does so through parallel
HDF5. Tensors whose runs alternate between ranks are exchanged first, so that each rank has long ranges of them as well.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from hpctrain.checkpoint import disk, exchange, format, shared_file
from hpctrain.checkpoint.checksums import Made, Written, add_torn, add_whole
from hpctrain.checkpoint.disk import Piece, Seen
from hpctrain.checkpoint.ranges import flat_bytes, piece_of, pieces, write_boxes
from hpctrain.checkpoint.shared_file import SharedFile
from hpctrain.checkpoint.shares import crossing
from hpctrain.checkpoint.state import Entry, State
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError
from hpctrain.plan.layout import Box

FULL = 'free space there, or set checkpoint.writer to "direct", whose errors are told in full'

Wrote = tuple[list[Written], Made]
"""What this rank wrote of each tensor, and the digests of the blocks that it has something of."""
Writer = Callable[[Path, Sequence[Entry], State, Sequence[format.Slot], Group, CheckpointConfig], Wrote]
Put = Callable[[Iterable[Piece], Seen, float], None]
"""Writes pieces, as ``disk.write`` does."""


def direct(
    path: Path,
    entries: Sequence[Entry],
    state: State,
    slots: Sequence[format.Slot],
    group: Group,
    config: CheckpointConfig,
) -> Wrote:
    """Write this rank's ranges of bytes at the datasets' places. Collective; an error of one rank is raised on all."""

    def put(pieces: Iterable[Piece], seen: Seen, begin: float) -> None:
        disk.write(path, pieces, False, seen, begin)

    wrote = _fill(put, path, entries, state, slots, group)
    together(group, lambda: _settle(path, *wrote, config.sync), f"checking {path}")
    return wrote


def mpio(
    path: Path,
    entries: Sequence[Entry],
    state: State,
    slots: Sequence[format.Slot],
    group: Group,
    config: CheckpointConfig,
) -> Wrote:
    """Write the same ranges with parallel HDF5. Collective; an error of one rank is raised on all."""
    with _opened(path, group, config) as file:
        wrote = _fill(partial(_put, file, path), path, entries, state, slots, group)
    together(group, lambda: _settle(path, *wrote, config.sync), f"checking {path}")
    return wrote


WRITERS: dict[str, Writer] = {"direct": direct, "mpio": mpio}


def writer(kind: str, group: Group) -> Writer:
    """The writer of that name; CheckpointError where it cannot work here."""
    if kind == "mpio" and not (shared_file.available() and hasattr(group, "comm")):
        talk = f"these ranks talk by {type(group).__name__}"
        lacking = talk if shared_file.available() else "this h5py is a serial build"
        raise CheckpointError(
            'checkpoint.writer = "mpio" cannot be used here',
            f"{lacking}; mpio needs h5py built with HDF5_MPI=ON, and ranks that talk by MPI",
            'leave checkpoint.writer "auto", or set it to "direct": the file is the same',
        )
    return WRITERS["direct" if kind == "auto" else kind]


def _fill(
    put: Put, path: Path, entries: Sequence[Entry], state: State, slots: Sequence[format.Slot], group: Group
) -> Wrote:
    """Write all that this rank has of the file. Collective."""
    made, told = Made.of(slots), f"writing {path}"
    placed = {slot.name: slot for slot in slots}
    for ranges in exchange.gathered(entries, state, group, told):
        found = [piece_of(placed[stretch.entry.name], stretch.start, memory) for stretch, memory in ranges]
        together(group, lambda found=found: put(found, made.see, 0), told)

    def act() -> list[Written]:
        own = parts(entries, state, slots, crossing(entries, group.size))
        put((piece for _, pieces in own for piece in pieces), made.see, group.rank / group.size)
        return own

    return together(group, act, told), made


@contextmanager
def _opened(path: Path, group: Group, config: CheckpointConfig) -> Iterator[SharedFile]:
    """The file as all ranks have it open. Collective, and so is leaving it, by an error too."""
    told = f"opening {path}"
    with together(group, lambda: path.open("r+b"), told) as plain:  # by all before any waits for the others in HDF5
        file = together(group, lambda: SharedFile(path, plain, group.comm, config.hints), told)
        try:
            yield file
        except CheckpointError:
            with suppress(Exception):
                file.close()
            raise
        together(group, file.close, f"closing {path}")


def _put(file: SharedFile, path: Path, pieces: Iterable[Piece], seen: Seen, begin: float) -> None:
    """Write by HDF5, which keeps the system's number of an error to itself.

    What it could not write is written once more without it: a full disk then says that it is one.
    """
    pieces = list(pieces)
    try:
        file.write(pieces, seen, begin)
    except Exception as error:
        disk.write(path, pieces, sync=True)
        raise CheckpointError(f"writing {path} failed", f"HDF5: {error}", FULL) from error


def parts(
    entries: Sequence[Entry], state: State, slots: Sequence[format.Slot], but: Collection[str] = ()
) -> list[Written]:
    """What this rank writes of each tensor of which it writes something, in the file's order; nothing of ``but``."""
    placed = {slot.name: slot for slot in slots}

    def part(entry: Entry, boxes: Sequence[Box]) -> Written:
        slot = placed[entry.name]
        return slot, list(pieces(entry, boxes, flat_bytes(state[entry.name].tensor), slot))

    return [part(entry, boxes) for entry, boxes in write_boxes(entries) if boxes and entry.name not in but]


def _settle(path: Path, own: Sequence[Written], made: Made, sync: bool) -> None:
    """Make the digests that are lacking, once all ranks have written, while the disk takes what it has not yet."""
    with ThreadPoolExecutor(1, "checkpoint") as pool:
        synced = pool.submit(sync_file, path) if sync else None
        add_torn(path, made, add_whole(made, own))
    if synced:
        synced.result()


def sync_file(path: Path) -> None:
    """Return when the disk has the file's bytes, or a folder's names."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
