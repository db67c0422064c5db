"""Saver: when a run saves, and what it says of it. A training loop calls it after each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import State
from hpctrain.cluster.deadline import Pace
from hpctrain.errors import DivergedError, FullError


class Saver:
    """Saves a run's ``state`` when it is due; live, closed by ``with``: after an error nothing half-written is left.

    A save under way is then given up, but not at a DivergedError: all ranks meet that, and can wait for the save.
    ``attributes`` go with each checkpoint; ``say`` tells a person a line; ``pace`` is told how long each save takes.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        state: State,
        attributes: dict[str, Any],
        say: Callable[[str], None],
        pace: Pace | None = None,
    ) -> None:
        self.checkpoint, self.state, self.attributes, self.say = checkpoint, state, attributes, say
        self.pace = pace or Pace()
        self._begun = 0  # the step that was saved last, or is being saved
        self._began = 0.0

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind and issubclass(kind, DivergedError):
                self._told(self.checkpoint.wait)
        finally:
            self.checkpoint.close()

    def step(self, step: int, last: bool) -> dict[str, float]:
        """Save after ``step`` steps if that is due, or bring a save that is under way on; collective.

        After the ``last`` step there is a checkpoint of it on return. Gives ``save_seconds``, how long the run stood
        still, where it did for a save.
        """
        checkpoint, near, began = self.checkpoint, self.checkpoint.near, time.perf_counter()
        if not (last or checkpoint.under_way or near.under_way or checkpoint.due(step) or near.due(step)):
            return {}
        self._told(checkpoint.advance)
        self._told_near(near.wait if last or checkpoint.due(step) or near.due(step) else near.advance)
        if last:
            self._told(checkpoint.wait)
            self._begin(step)
            self._told(lambda: checkpoint.save(step, self.state, self.attributes), last=True)
            near.clear()  # what the nodes have is older now
        elif checkpoint.due(step):
            self._told(checkpoint.make_way)
            self._begin(step)
            self._told(lambda: checkpoint.begin(step, self.state, self.attributes))
        elif near.due(step):
            self._told_near(lambda: checkpoint.begin_near(step, self.state), step)
        return {"save_seconds": time.perf_counter() - began}

    def _told_near(self, act: Callable[[], int], step: int | None = None) -> None:
        """Say which step ``act`` has saved near; a full disk is told in the log."""
        near, saved = self.checkpoint.near, []
        near.if_room(near.under_way if step is None else step, lambda: saved.append(act()))
        for one in filter(None, saved):
            self.say(f"saved step {one} near, on the nodes' own disks")

    def _begin(self, step: int) -> None:
        self._begun, self._began = step, time.perf_counter()

    def _told(self, act: Callable[[], Path | None], last: bool = False) -> None:
        """Say what ``act`` ended, or that a full disk did and the run goes on, which it does not after the last."""
        try:
            path = act()
        except FullError as error:
            if last:
                raise
            self.checkpoint.go_on(self._begun, error)
            self.say(f"step {self._begun} was not saved, and training goes on")
        else:
            if path:
                self.pace.saved(time.perf_counter() - self._began)
                self.say(f"saved {path}")
        finally:
            self.pace.saving = self.checkpoint.under_way
