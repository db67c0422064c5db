"""Checkpoint: saves a run's tensors now and then, and goes on from the newest.

Every method but ``due`` is collective: all ranks of the group call it, in the same order, and meet the same errors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint import checksums, disk, format, inspect, keep
from hpctrain.checkpoint.choice import Choice
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.load import begin, load
from hpctrain.checkpoint.near import Near
from hpctrain.checkpoint.ranges import file_order
from hpctrain.checkpoint.save import parts, sync_file, writer
from hpctrain.checkpoint.state import Entry, State, agree
from hpctrain.checkpoint.together import led
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.errors import DamagedError, FullError, IncompleteError
from hpctrain.plan.mesh import Mesh

log = logging.getLogger(__name__)


class Checkpoint:
    """The checkpoints of one run, in one folder. ``group`` is of all ranks of ``mesh``, numbered as there.

    ``host`` names this rank's node, where its host's name does not tell nodes apart.
    """

    def __init__(
        self, config: CheckpointConfig, folder: Path, mesh: Mesh, group: Group, host: str | None = None
    ) -> None:
        self.config, self.folder, self.mesh, self.group = config, Path(folder), mesh, group
        self._write = writer(config.writer, group)
        self.near = Near(config, folder, mesh, group, host)

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
        slots = Index.from_json(begun["index"]).slots
        try:
            self._write(part, entries, state, slots, self.group, self.config)
            count = sum(slot.blocks for slot in slots)
            sums = checksums.of_ranks(part, parts(entries, state, slots), self.group, count)
            led(self.group, lambda: self._publish(part, path, step, sums), f"publishing {path}")
        except BaseException:
            self._discard(part)
            raise
        return path

    def save_if_room(self, step: int, state: State, attributes: dict[str, Any]) -> Path | None:
        """As ``save``, but on a full disk None, with a line in the log, where the run is to go on without."""
        try:
            return self.save(step, state, attributes)
        except FullError as error:
            if self.config.on_full == "stop":
                raise
            if self.group.leads:
                log.warning("step %d was not saved: %s", step, keep.in_a_line(error))
            return None

    def resume(self, state: State) -> int:
        """Fill ``state`` from the newest whole checkpoint, here or near the ranks, and give its step.

        One that turns out to be damaged is passed over with a line in the log. With none there it gives 0, and fills
        nothing but what ``checkpoint.start_from`` gives.
        """
        entries = agree(state, self.mesh, self.group)
        damaged: list[str] = []
        while True:
            step, found = self._look(entries, damaged, state)
            if step or not found:
                break
            path, index = Path(found["path"]), Index.from_json(found["index"])
            try:
                load(path, index, entries, state, self.group, self.config.verify)
                return index.step
            except DamagedError as error:
                damaged.append(path.name)
                if self.group.leads:
                    log.warning("skipped: %s", keep.in_a_line(error))
        if not step and self.config.start_from is not None:
            self._start(Path(self.config.start_from), entries, state)
        return step

    def _look(
        self, entries: tuple[Entry, ...], damaged: Sequence[str], state: State
    ) -> tuple[int, dict[str, Any] | None]:
        """The newest whole file, and before that the step that a newer near checkpoint filled ``state`` with, or 0."""
        try:
            found = led(self.group, lambda: self._find(entries, damaged), f"looking for checkpoints in {self.folder}")
        except IncompleteError:
            step = self.near.resume(entries, state, newer_than=0)
            if not step:
                raise
            return step, None
        return self.near.resume(entries, state, newer_than=found["index"]["step"] if found else 0), found

    def _start(self, source: Path, entries: tuple[Entry, ...], state: State) -> None:
        """Take from another checkpoint what the configuration says. Collective."""
        found = led(self.group, lambda: _told(inspect.find(source)), f"looking at {source} (checkpoint.start_from)")
        path, index = Path(found["path"]), Index.from_json(found["index"])
        choice = Choice(self.config.only, self.config.rename)
        count = begin(path, index, entries, state, self.group, choice, self.config.verify)
        if self.group.leads:
            line = "took %d of this run's %d tensors from %s (its step %d); the others begin anew, and so does the step"
            log.warning(line, count, len(entries), path, index.step)

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
            placed = format.lay_out(part, tensors, step, attributes)
            disk.reserve(part)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        return {"part": str(part), "index": Index(step, {}, tuple(placed)).to_json()}

    def _discard(self, part: Path) -> None:
        """Without talking: after an error others may not answer."""
        if self.group.leads:
            part.unlink(missing_ok=True)

    def _publish(self, part: Path, path: Path, step: int, sums: np.ndarray) -> None:
        format.mark_complete(part, sums)
        if self.config.sync:
            sync_file(part)
        keep.publish(part, path, self.config.sync)
        knobs = self.config
        keep.hold(self.folder, path.name, knobs.keep_hours)
        keep.prune(self.folder, keep.listing(self.folder), keep.Keep(knobs.keep, knobs.keep_every), step)

    def _find(self, entries: tuple[Entry, ...], damaged: Sequence[str]) -> dict[str, Any] | None:
        names = keep.listing(self.folder)
        if not damaged:
            keep.sweep(self.folder, names)
            self._warn_of_room(entries)
        found = keep.newest(self.folder, names, damaged)
        return found and _told(found)

    def _warn_of_room(self, entries: tuple[Entry, ...]) -> None:
        """Say before the first step that the first save will fail."""
        try:
            keep.check_room(self.folder, format.needed_bytes(_slots(entries)))
        except FullError as error:
            log.warning("%s", keep.in_a_line(error))

    def _newest(self) -> str | None:
        found = keep.newest(self.folder, keep.listing(self.folder))
        return found and str(found[0])


def _told(found: tuple[Path, Index]) -> dict[str, Any]:
    """What other ranks need to know of a file, which its attributes, with a whole plan in them, are not."""
    return {"path": str(found[0]), "index": replace(found[1], attributes={}).to_json()}


def _slots(entries: tuple[Entry, ...]) -> list[Slot]:
    """The tensors as the file has them, in its order; their places are still to be found."""
    return [Slot(entry.name, entry.layout.shape, entry.layout.dtype) for entry in file_order(entries)]
