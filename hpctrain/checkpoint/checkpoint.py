"""Checkpoint: saves a run's tensors now and then, and goes on from the newest.

Every method but ``due`` and ``close`` is collective: all ranks of the group call it, in the same order, and meet the
same errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import checksums, inspect, keep
from hpctrain.checkpoint.background import Background
from hpctrain.checkpoint.choice import Choice
from hpctrain.checkpoint.flight import Flight
from hpctrain.checkpoint.folder import Folder
from hpctrain.checkpoint.format import Index
from hpctrain.checkpoint.load import begin, load
from hpctrain.checkpoint.near import Near
from hpctrain.checkpoint.save import mpio, writer
from hpctrain.checkpoint.state import Agreement, Entry, State
from hpctrain.checkpoint.together import led
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.errors import DamagedError, FullError, IncompleteError
from hpctrain.plan.mesh import Mesh

log = logging.getLogger(__name__)


class Checkpoint:
    """The checkpoints of one run, in one folder. ``group`` is of all ranks of ``mesh``, in any order.

    Its ``ranks`` are those of the mesh, as ``Groups`` has it. ``host`` names this rank's node, where its host's name
    does not tell nodes apart.
    """

    def __init__(
        self, config: CheckpointConfig, folder: Path, mesh: Mesh, group: Group, host: str | None = None
    ) -> None:
        mesh = mesh.fit(group.size).among(group.ranks)  # numbered as the group's members
        self.config, self.folder, self.mesh, self.group = config, Path(folder), mesh, group
        self.nbytes = 0
        """What a checkpoint's tensors take, once the ranks have agreed on them to resume."""
        self.resumed_near = False
        """Whether what ``resume`` took was near: the run's folder has no whole file of it."""
        self._write = writer(config.writer, group)
        self.near = Near(config, folder, mesh, group, host)
        self._files = Folder(config, self.folder)
        self._agreement = Agreement(mesh, group)
        self._background = Background(self._files, self._agreement)
        self._flight: Flight | None = None

    def due(self, step: int) -> bool:
        """Whether to save after ``step`` steps."""
        return self.config.every > 0 and step > 0 and step % self.config.every == 0

    def save(self, step: int, state: State, attributes: dict[str, Any]) -> Path:
        """Write ``state`` as the checkpoint of ``step``, and give its path; ``attributes`` are JSON-able.

        The file has its name only when every rank's bytes are there, and older ones go only after that. On an error
        all ranks raise it, what was there before is whole, and nothing half-written is left.
        """
        self.wait()
        entries = self._agreement.on(state)
        begun = led(self.group, lambda: self._begin(step, entries, attributes), f"laying out step {step}")
        part, path = Path(begun["part"]), self.folder / keep.file_name(step)
        slots = Index.from_json(begun["index"]).slots
        try:
            wrote, made = self._write(part, entries, state, slots, self.group, self.config)
            sums = checksums.met(part, wrote, made, self.group)
            led(self.group, lambda: self._files.publish(part, step, slots, sums), f"publishing {path}")
        except BaseException:
            if self.group.leads:  # without talking: after an error others may not answer
                part.unlink(missing_ok=True)
            raise
        return path

    def save_if_room(self, step: int, state: State, attributes: dict[str, Any]) -> Path | None:
        """As ``save``, but on a full disk None, with a line in the log, where the run is to go on without."""
        try:
            return self.save(step, state, attributes)
        except FullError as error:
            self.go_on(step, error)
            return None

    def go_on(self, step: int, error: FullError) -> None:
        """Say that ``step`` was not saved on a full disk, where the run is to go on without; else raise the error."""
        if self.config.on_full == "stop":
            raise error
        if self.group.leads:
            log.warning("step %d was not saved: %s", step, keep.in_a_line(error))

    # ---- in the background -------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether a save in the background has not come to its end. The same on all ranks."""
        return self._flight is not None

    def begin(self, step: int, state: State, attributes: dict[str, Any]) -> Path | None:
        """Begin to save ``state`` as ``save`` does, in the background; None while that goes on, to end in ``advance``.

        On return ``state`` is copied and may change. A save that is under way is waited for first (``make_way``). It
        saves at once, and gives the path, where ``checkpoint.background`` is false, under the ``mpio`` writer, and
        where memory has no room for the copy. The copy takes, on each rank, the bytes that the rank writes.
        """
        self.make_way()
        self.near.wait()  # its copy is where this one's is to be
        if self._in_background:
            self._flight = self._background.begin(step, state, attributes)
        return None if self._flight else self.save(step, state, attributes)

    def begin_near(self, step: int, state: State) -> int:
        """Begin to save ``state`` near, in the background; 0 while that goes on, to end in ``near.advance``.

        It saves at once, and gives the step, where ``checkpoint.background`` is false, where memory has no room for
        the copy, and while another save is under way, which has the memory for it.
        """
        self.near.wait()
        copy = self._background.copy(step, state) if self.config.background and not self.under_way else None
        if copy is None:
            self.near.save(step, state)
            return step
        self.near.begin(step, copy)
        return 0

    def advance(self) -> Path | None:
        """Bring the save under way on, without waiting for any disk; its path once it has ended. Call it every step.

        An error of any rank's thread is raised here on all ranks; then nothing half-written is left.
        """
        return self._ended(lambda flight: flight.advance())

    def wait(self) -> Path | None:
        """Wait for the save under way, where there is one, and give its path; errors as in ``advance``."""
        return self._ended(lambda flight: flight.land())

    def make_way(self) -> Path | None:
        """As ``wait``, since another save is due: it is said that saves come too often."""
        if self._flight and self.group.leads:
            line = "the save of step %d is still under way when the next is due, so the run waits for it"
            log.warning(line + ": saves are too frequent for this disk (checkpoint.every)", self._flight.step)
        return self.wait()

    def close(self) -> None:
        """Give up a save that is under way, with nothing half-written left. Not collective: after an error, say."""
        flight, self._flight = self._flight, None
        if flight:
            flight.close()
        self.near.close()

    @cached_property
    def _in_background(self) -> bool:
        """Whether saves can be; the first to ask hears why not."""
        if self.config.background and self._write is mpio and self.group.leads:
            line = 'checkpoint.writer = "mpio" talks by MPI while it writes, so the run waits for each save'
            log.warning(line + ': "auto" writes the same file in the background')
        return self.config.background and self._write is not mpio

    def _ended(self, act: Callable[[Flight], bool]) -> Path | None:
        """The path of the save under way if ``act`` ends it."""
        flight = self._flight
        try:
            if flight is None or not act(flight):
                return None
        except BaseException:
            self.close()
            raise
        self._flight = None
        return self.folder / keep.file_name(flight.step)

    # ---- going on ----------------------------------------------------------------------------------------------------

    def resume(self, state: State) -> int:
        """Fill ``state`` from the newest whole checkpoint, here or near the ranks, and give its step.

        One that turns out to be damaged is passed over with a line in the log. With none there it gives 0, and fills
        nothing but what ``checkpoint.start_from`` gives.
        """
        self.wait()
        self.near.wait()
        entries = self._agreement.on(state)
        self.nbytes = sum(entry.layout.nbytes for entry in entries)
        damaged: list[str] = []
        while True:
            step, found = self._look(entries, damaged, state)
            self.resumed_near = step > 0
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
        looking = f"looking for checkpoints in {self.folder}"
        try:
            found = led(self.group, lambda: _told(self._files.find(entries, damaged)), looking)
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
        self.wait()
        found = led(self.group, lambda: _text(self._files.newest()), f"looking for checkpoints in {self.folder}")
        return found and Path(found)

    def _begin(self, step: int, entries: tuple[Entry, ...], attributes: dict[str, Any]) -> dict[str, Any]:
        """Make the file, on the leading rank; its name aside and its tensors' places are for all ranks."""
        part = self._files.aside(step)
        placed = self._files.lay_out(part, step, entries, attributes)
        self._files.reserve(part)
        return {"part": str(part), "index": Index(step, {}, placed).to_json()}


def _told(found: tuple[Path, Index] | None) -> dict[str, Any] | None:
    """What other ranks need to know of a file, which its attributes, with a whole plan in them, are not."""
    return found and {"path": str(found[0]), "index": replace(found[1], attributes={}).to_json()}


def _text(path: Path | None) -> str | None:
    return path and str(path)
