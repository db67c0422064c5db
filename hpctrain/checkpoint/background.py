"""Background: saves that a run does not wait for, one after another, and what is kept between them.

A run stands still while the ranks agree, once for all saves of the same tensors, and while each rank copies what it
writes (``snapshot``). All else is a ``Flight``. Every rank needs the places of the tensors in the file: rank 0 lays out
the first file at once and tells them. In a later one they are the same, as long as tensors and attributes are.
"""

from __future__ import annotations

import json
import logging
import os
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.flight import Acts, Flight
from hpctrain.checkpoint.folder import Folder
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.snapshot import Room, Snapshot, fits
from hpctrain.checkpoint.state import Agreement, Entry, State
from hpctrain.checkpoint.together import led, together

log = logging.getLogger(__name__)


class Background:
    """How the ranks of one run start saves in the background; live."""

    def __init__(self, folder: Folder, agreement: Agreement) -> None:
        self.folder, self.group = folder, agreement.group
        self._agreement = agreement
        self._entries: tuple[Entry, ...] | None = None  # of which there is a snapshot
        self._snapshot: Snapshot | None = None
        self._fits = False
        self._slots: tuple[Slot, ...] = ()
        self._text: str | None = None  # the attributes with which the file has these places; on rank 0 alone

    def begin(self, step: int, state: State, attributes: dict[str, Any]) -> Flight | None:
        """Copy ``state`` and start to save it; None, with nothing done, where memory has no room for the copy.

        Collective. The save before must have ended: its copy is written over.
        """
        if self.copy(step, state) is None:
            return None
        attributes = deepcopy(attributes) if self.group.leads else {}  # as they are now
        aside, part = self.folder.aside(step), self.folder.aside(step)
        told = led(self.group, lambda: self._place(step, aside, part, attributes), f"laying out step {step}")
        if told["index"]:
            self._slots = Index.from_json(told["index"]).slots
        acts = Acts(
            make=partial(self._make, step, aside, part, attributes),
            written=partial(self._snapshot.written, self._slots),
            publish=partial(self.folder.publish, part, step, self._slots),
            discard=lambda: [path.unlink(missing_ok=True) for path in (aside, part)],
        )
        blocks = sum(slot.blocks for slot in self._slots)
        return Flight(step, Path(told["part"]), acts, blocks, self.group, self.folder.config.sync)

    def copy(self, step: int, state: State) -> Snapshot | None:
        """A copy of what each rank writes of ``state``; None, on all, where memory has no room. Collective.

        There is one, for all saves: the one before must have ended.
        """
        self._agree(state)
        if not self._fits:
            return None
        self._snapshot.take(state, f"copying step {step}")
        return self._snapshot

    def _agree(self, state: State) -> None:
        """Agree on the names and on whether there is memory, if any rank has other tensors than at the save before."""
        entries = self._agreement.on(state)
        if entries is self._entries:
            return
        self._entries = self._snapshot = self._text = None
        made = Snapshot(entries, self.group)
        room = together(self.group, lambda: asdict(Room.seen(made.nbytes)), "looking for memory")
        self._fits = fits([Room(**one) for one in self.group.collect(room)])
        if not self._fits and self.group.leads:
            log.warning("memory has no room for a copy of what is saved, so the run waits for each save")
        self._entries, self._snapshot = entries, made

    # ---- what the leading rank does alone ----------------------------------------------------------------------------

    def _place(self, step: int, aside: Path, part: Path, attributes: dict[str, Any]) -> dict[str, Any]:
        """The name of the file, and its tensors' places where the ranks do not know them: then it is laid out now."""
        text = json.dumps(attributes, sort_keys=True)
        if text == self._text:
            return {"part": str(part), "index": None}
        placed = self.folder.lay_out(aside, step, self._entries, attributes)
        self._text = text
        return {"part": str(part), "index": Index(step, {}, placed).to_json()}

    def _make(self, step: int, aside: Path, part: Path, attributes: dict[str, Any]) -> None:
        """Give the file its name aside only when it is laid out and has its room: others write when they see it."""
        if not aside.exists():
            placed = self.folder.lay_out(aside, step, self._entries, attributes)
            assert placed == self._slots, "equal tensors and attributes lie at equal places"
        self.folder.reserve(aside)
        os.rename(aside, part)
