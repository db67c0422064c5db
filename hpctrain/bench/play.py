"""A start as ``hpctrain train`` does it, with a stopwatch: what ``phases`` starts on each rank.

It imports no more at its head than the command line does, so that the import of torch has a phase of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import TypeVar

from hpctrain.config import Config, load

PHASES = ("launcher", "python", "mpi", "torch", "groups", "data", "model", "step")
Made = TypeVar("Made")


class Clock:
    """Two stopwatches, of the wall and of this process's processors; live."""

    def __init__(self, launched_at: float) -> None:
        born_at = time.time() - _age()
        self.seconds = {"launcher": born_at - launched_at, "python": time.time() - born_at}
        self.processor = {"launcher": 0.0, "python": time.process_time()}

    def timed(self, phase: str, act: Callable[[], Made]) -> Made:
        """Do something as part of ``phase``."""
        began, computed = time.perf_counter(), time.process_time()
        made = act()
        self.seconds[phase] = time.perf_counter() - began
        self.processor[phase] = time.process_time() - computed
        return made


def play(config: Config, clock: Clock) -> None:
    """Start a run as ``hpctrain train`` does, up to its first step, and let rank 0 print the figures. Collective."""
    from hpctrain.cluster.world import World

    world = clock.timed("mpi", lambda: World.join(config.comm))
    with world:
        story = clock.timed("torch", _story)
        site, groups = clock.timed("groups", lambda: _meet(story, config, world))
        batches = clock.timed("data", lambda: story.open_data(config, groups))
        job = clock.timed("model", lambda: _build(story, config, site, groups, batches.vocabulary))
        clock.timed("step", lambda: job.step(0, batches))
        walls, processors = world.collect(clock.seconds), world.collect(clock.processor)
        if world.leads:
            worst = {phase: max(one[phase] for one in walls) for phase in PHASES}
            print(json.dumps({"wall": worst, "processor": {p: mean(one[p] for one in processors) for p in PHASES}}))
        groups.close()


def _age() -> float:
    """Seconds since this process was started. The kernel's two clocks of it tick together, unlike the wall's."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")


def _story():  # noqa: ANN202 - a module
    from hpctrain import train

    return train


def _meet(story, config: Config, world):  # noqa: ANN001, ANN202 - modules and live parts of a run
    site = story.Site.settle(config, world)
    return site, story.Groups.open(story.lay(config, site.topology), world, config.comm)


def _build(story, config: Config, site, groups, vocabulary: int):  # noqa: ANN001, ANN202
    return story.Job.build(config, story.decide(config, site.topology, vocabulary), groups, site.device)


if __name__ == "__main__":
    path, prefix, folder, launched_at = sys.argv[1:]
    sets = (f"run.dir={folder}", f'data.sources=[{{path="{prefix}"}}]', "train.steps=1", "train.validate_every=0")
    play(load(path, sets), Clock(float(launched_at)))
