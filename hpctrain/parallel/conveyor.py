"""Conveyor: brings each unit's weights before they are used, while the unit before it computes.

Weights that stay (``resident``) are brought once after each update, all units in one order, each waited for where it is
used. Weights that come and go are brought in the order in which the first step used them, forwards and backwards:
as many ahead as there is room for, and from then on to places that stay (``shelf.py``). A gather is a collective, so
nothing here depends on how fast one is: every rank asks for the same ones in the same order, given that all ranks use
the units in one order. Held units are brought before the others and stay until the step is over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hpctrain.parallel.shelf import crowded, off_shelves, settle
from hpctrain.parallel.travel import Travel
from hpctrain.parallel.units import Part, Shelf

_log = logging.getLogger(__name__)


class Conveyor:
    """Gathers by ``travel``; ``room_bytes`` limits the weights alive at once, besides held ones. Live."""

    def __init__(self, parts: Sequence[Part], travel: Travel, resident: bool, room_bytes: int) -> None:
        self.parts, self.travel, self.resident, self.room_bytes = parts, travel, resident, room_bytes
        self._held = [part for part in parts if part.unit.held]
        self._order: list[Part] | None = None  # None until the first step is over
        self._next: int | None = None  # where in the order the step is; None outside of a step
        self._record: list[Part] = []
        self._comers = len(parts) - len(self._held)
        self._pinned = False
        self._used: set[Part] = set()  # that come and go, and are in use now
        self._alone = True  # whether no two of them were in use at once

    def attach(self, module: nn.Module, modules: dict[str, nn.Module]) -> None:
        """Bring weights when modules run. ``modules`` are those of the units, by unit."""
        held = {id(p) for part in self._held for p in part.parameters.values()}
        around = [m for m in module.modules() if any(id(p) in held for p in m.parameters(recurse=False))]
        for one in dict.fromkeys([module, *around]):
            one.register_forward_pre_hook(lambda *_: self.need(*self._held))
        for part in self.parts:
            if not part.unit.held:
                self._attach(part, modules[part.unit.name])

    def begin(self) -> None:
        """A step begins; ranks that will use nothing in it bring resident weights all the same."""
        self._next, self._record = 0, []
        self._used.clear()
        self._forget()
        if self.resident:
            self.need()

    def need(self, *needed: Part) -> None:
        """Return when these are whole."""
        for part in needed:
            self._follow(part)
        self._used.update(part for part in needed if not part.unit.held)
        self._alone &= len(self._used) <= 1
        for part in self.parts if self.resident else (*needed, *self._window()):
            self._start(part)
        for part in needed:
            part.gathering.wait()

    def release(self, part: Part) -> None:
        """The unit is not in use any more; it goes, unless it is used again before what there is room for."""
        part.busy = False
        self._used.discard(part)
        if not (self.resident or part.unit.held or self._pinned) and part not in self._window():
            self._free(part)

    def finish(self) -> None:
        """The step is over, and the weights are to change: all that is whole now will be old. Collective."""
        self._next = None
        self.drop()
        self._forget()
        if self._order is None and self._record:
            self._order = self._record
            settle(self.parts, self.travel, self.room_bytes, self._alone)

    def drop(self) -> None:
        """Let every unit go."""
        for part in self.parts:
            self._free(part)

    @contextmanager
    def pinned(self) -> Iterator[None]:
        """All weights are whole inside. Collective."""
        if not self.resident:
            self.drop()
        with off_shelves(self.parts):
            for part in self.parts:
                self._start(part)
                part.gathering.wait()
            self._pinned = True
            try:
                yield
            finally:
                self._pinned = False
            if not self.resident:
                self.drop()

    # ---- hooks ---------------------------------------------------------------------------------------------------

    def _attach(self, part: Part, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda *_: self.need(part))
        if not self.resident:
            module.register_forward_hook(lambda _module, _inputs, output: self._ran(part, output))

    def _ran(self, part: Part, output: object) -> None:
        """After a forward. The backward needs the weights again when the gradient of an output is there."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self._back(part))
        if not part.busy:
            self.release(part)

    def _back(self, part: Part) -> None:
        part.busy = True
        self.need(part)

    # ---- order ---------------------------------------------------------------------------------------------------

    def _follow(self, part: Part) -> None:
        if self.resident or part.unit.held or self._next is None:
            return
        self._record.append(part)
        if self._order and self._coming() is part:
            self._next += 1
        elif self._order:
            self._order = []  # on demand from here on
            _log.warning(
                "unit %r is used where the first step used another one: weights are no longer gathered ahead of"
                " their use, which is slower", part.unit.name,
            )  # fmt: skip

    def _coming(self) -> Part | None:
        """What is used next, as far as is known."""
        if self._next is None or not self._order or self._next >= len(self._order):
            return None
        return self._order[self._next]

    def _window(self) -> dict[Part, Shelf | None]:
        """What is used next, as far as there is room for it beside what is used now, and the shelf of each."""
        window = {part: part.shelf for part in self._used}
        alive = sum(part.full.nbytes for part in window)
        for part in islice(self._order or (), self._next, None) if self._next is not None else ():
            if part not in window:
                alive += part.full.nbytes
                if alive > self.room_bytes or (part.shelf and part.shelf in window.values()):
                    break
                window[part] = part.shelf
            elif len(window) == self._comers:
                break
        return window

    # ---- weights -------------------------------------------------------------------------------------------------

    def _start(self, part: Part) -> None:
        if part.whole:
            return
        self._clear(part)
        part.whole = True
        if not self.resident:
            part.show()
        part.gathering = self.travel.gather(part)

    def _clear(self, part: Part) -> None:
        """Take from the unit's shelf what will not be used there; where it is used, this one gets its own memory."""
        other = part.shelf and part.shelf.on
        if not (other and other.whole):
            return
        if other not in self._used:
            self._free(other)
        elif self._next is not None and self._record.count(part) > 1:
            raise crowded(part, other)
        else:
            part.put_up(None)

    def _free(self, part: Part) -> None:
        part.gathering.wait()
        if part.whole and not self.resident:
            if part.near and not part.near.kept and self._next is not None:
                part.near.keep(part.full)
            part.hide()
        part.whole = part.busy = False

    def _forget(self) -> None:
        """What neighbours keep is old when the weights change."""
        for part in self.parts:
            if part.near:
                part.near.kept = False
