"""Checkpoint: saves a run's tensors now and then, and goes on from the newest.

Every method but ``due`` is collective: all ranks of the group call it, in the same order, and meet the same errors.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import disk, format, inspect, keep
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.load import load
from hpctrain.checkpoint.ranges import file_order
from hpctrain.checkpoint.save import sync_file, writer
from hpctrain.checkpoint.state import WEIGHTS, Entry, State, agree
from hpctrain.checkpoint.together import led
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError
from hpctrain.plan.mesh import Mesh

log = logging.getLogger(__name__)


class Checkpoint:
    """The checkpoints of one run, in one folder. ``group`` is of all ranks of ``mesh``, numbered as there."""

    def __init__(self, config: CheckpointConfig, folder: Path, mesh: Mesh, group: Group) -> None:
        self.config, self.folder, self.mesh, self.group = config, Path(folder), mesh, group
        self._write = writer(config.writer, group)

    def due(self, step: int) -> bool:
        """Whether to save after ``step`` steps."""
        return self.config.every > 0 and step > 0 and step % self.config.every == 0

    def save(self, step: int, state: State, attributes: dict[str, Any]) -> Path:
        """Write ``state`` as the checkpoint of ``step``, and give its path; ``attributes`` are JSON-able.

        The file has its name only when every rank's bytes are there, and older ones go only after that. On an error
        all ranks raise it, what was there before is whole, and nothing half-written is left.
        """
        entries = agree(state, self.mesh, self.group)
        begun = led(self.group, lambda: self._begin(step, entries, attributes), f"laying out step {step}")
        part, path = Path(begun["part"]), self.folder / keep.file_name(step)
        try:
            self._write(part, entries, state, begun["offsets"], self.group, self.config)
            led(self.group, lambda: self._publish(part, path, step), f"publishing {path}")
        except BaseException:
            self._discard(part)
            raise
        return path

    def resume(self, state: State) -> int:
        """Fill ``state`` from the newest whole checkpoint and give its step; 0 with none there.

        Then weights are those of ``checkpoint.start_from`` where it names another checkpoint, else nothing is filled.
        """
        entries = agree(state, self.mesh, self.group)
        found = led(self.group, lambda: self._find(entries), f"looking for checkpoints in {self.folder}")
        if found is None:
            self._start(entries, state)
            return 0
        index = Index.from_json(found["index"])
        load(Path(found["path"]), index, entries, state, self.group)
        return index.step

    def _start(self, entries: tuple[Entry, ...], state: State) -> None:
        """Fill the weights alone from the checkpoint to start from. Collective."""
        source = self.config.start_from
        if source is None:
            return
        found = led(self.group, lambda: _weights(Path(source)), f"looking at {source} (checkpoint.start_from)")
        wanted = [entry for entry in entries if entry.name.startswith(WEIGHTS)]
        load(Path(found["path"]), Index.from_json(found["index"]), wanted, state, self.group, convert=True)

    def newest(self) -> Path | None:
        """The newest whole checkpoint."""
        found = led(self.group, self._newest, f"looking for checkpoints in {self.folder}")
        return found and Path(found)

    # ---- what the leading rank does alone ----------------------------------------------------------------------------

    def _begin(self, step: int, entries: tuple[Entry, ...], attributes: dict[str, Any]) -> dict[str, Any]:
        tensors = _slots(entries)
        self.folder.mkdir(parents=True, exist_ok=True)
        keep.sweep(self.folder, keep.listing(self.folder))
        keep.check_room(self.folder, format.needed_bytes(tensors))
        part = self.folder / keep.part_name(keep.file_name(step))
        try:
            offsets = format.lay_out(part, tensors, step, attributes)
            disk.reserve(part)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return {"part": str(part), "offsets": offsets}

    def _discard(self, part: Path) -> None:
        """Without talking: after an error others may not answer."""
        if self.group.leads:
            part.unlink(missing_ok=True)

    def _publish(self, part: Path, path: Path, step: int) -> None:
        format.mark_complete(part)
        if self.config.sync:
            sync_file(part)
        keep.publish(part, path, self.config.sync)
        keep.prune(self.folder, keep.listing(self.folder), self.config.keep, step)

    def _find(self, entries: tuple[Entry, ...]) -> dict[str, Any] | None:
        names = keep.listing(self.folder)
        keep.sweep(self.folder, names)
        self._warn_of_room(entries)
        found = keep.newest(self.folder, names)
        return found and {"path": str(found[0]), "index": found[1].to_json()}

    def _warn_of_room(self, entries: tuple[Entry, ...]) -> None:
        """Say before the first step that the first save will fail."""
        try:
            keep.check_room(self.folder, format.needed_bytes(_slots(entries)))
        except CheckpointError as error:
            log.warning("%s", "; ".join(str(error).split("\n  ")))

    def _newest(self) -> str | None:
        found = keep.newest(self.folder, keep.listing(self.folder))
        return found and str(found[0])


def _weights(source: Path) -> dict[str, Any]:
    """The path of the checkpoint at ``source``, and its weights."""
    path, index = inspect.find(source)
    slots = tuple(slot for slot in index.slots if slot.name.startswith(WEIGHTS))
    return {"path": str(path), "index": replace(index, slots=slots, attributes={}).to_json()}


def _slots(entries: tuple[Entry, ...]) -> list[Slot]:
    """The tensors as the file has them, in its order; their offsets are still to be found."""
    return [Slot(entry.name, entry.layout.shape, entry.layout.dtype, 0) for entry in file_order(entries)]
