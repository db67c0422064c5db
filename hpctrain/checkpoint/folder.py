"""Folder: what one rank alone does in the folder of a run's checkpoints, for each save and each start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint import disk, format, keep, stripes
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.ranges import file_order
from hpctrain.checkpoint.save import sync_file
from hpctrain.checkpoint.state import Entry
from hpctrain.config import CheckpointConfig
from hpctrain.errors import FullError

log = logging.getLogger(__name__)


class Folder:
    """A run's checkpoints on the disk. Only the leading rank calls its methods; the others hear what came of it."""

    def __init__(self, config: CheckpointConfig, path: Path) -> None:
        self.config, self.path = config, path

    def aside(self, step: int) -> Path:
        """A new name to write the file of ``step`` aside under."""
        return self.path / keep.part_name(keep.file_name(step))

    def lay_out(self, part: Path, step: int, entries: Sequence[Entry], attributes: dict[str, Any]) -> tuple[Slot, ...]:
        """Make the file aside, with holes where the tensors' bytes belong, and give their places.

        FullError where there is too little room. After an error nothing is left of it.
        """
        tensors = _slots(entries)
        self.path.mkdir(parents=True, exist_ok=True)
        keep.sweep(self.path, keep.listing(self.path))
        keep.check_room(self.path, format.needed_bytes(tensors))
        try:
            there = self.config.writer == "mpio" and stripes.make(part, self.config.hints)
            return tuple(format.lay_out(part, tensors, step, attributes, "w" if there else "x"))
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def reserve(self, part: Path) -> None:
        """Set aside room for all of a file that is laid out. After an error nothing is left of it."""
        try:
            disk.reserve(part)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def publish(self, part: Path, step: int, slots: Sequence[Slot], sums: np.ndarray) -> None:
        """Complete the file of ``step``, whose bytes are all there, with its checksums; name it, and prune old ones."""
        knobs, path = self.config, self.path / keep.file_name(step)
        format.mark_complete(part, slots, sums)
        if knobs.sync:
            sync_file(part)
        keep.publish(part, path, knobs.sync)
        keep.hold(self.path, path.name, knobs.keep_hours)
        keep.prune(self.path, keep.listing(self.path), keep.Keep(knobs.keep, knobs.keep_every), step)

    def find(self, entries: Sequence[Entry], damaged: Sequence[str]) -> tuple[Path, Index] | None:
        """The newest whole checkpoint but those found ``damaged``; first it clears away what dead writers left."""
        names = keep.listing(self.path)
        if not damaged:
            keep.sweep(self.path, names)
            self._warn_of_room(entries)
        return keep.newest(self.path, names, damaged)

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = keep.newest(self.path, keep.listing(self.path))
        return found and found[0]

    def _warn_of_room(self, entries: Sequence[Entry]) -> None:
        """Say before the first step that the first save will fail."""
        try:
            keep.check_room(self.path, format.needed_bytes(_slots(entries)))
        except FullError as error:
            log.warning("%s", keep.in_a_line(error))


def _slots(entries: Sequence[Entry]) -> list[Slot]:
    """The tensors as the file has them, in its order; their places are still to be found."""
    return [Slot(entry.name, entry.layout.shape, entry.layout.dtype) for entry in file_order(entries)]
