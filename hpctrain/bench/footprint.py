"""What one contestant takes of memory on each rank; the memory benchmark starts it under a launcher.

    python -m hpctrain.bench.footprint NAME TURNS RESULT CONFIG [KEY=VALUE ...]

trains for some steps and leaves what it found in the file RESULT, as JSON. ``memory.py`` says what is measured.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from hpctrain.cluster.world import World
from hpctrain.config import load
from hpctrain.plan.plan import decide
from hpctrain.plan.units import STAGES

if TYPE_CHECKING:
    from hpctrain.bench.step import Scene

MEASURES = ("resident", "shared")
WATCHED = 3
"""Steps that are watched: the first makes the optimizer's states, the next ones have everything at once."""
EVERY_SECONDS = 0.02


def main(name: str, turns: int, told: Path, config_path: str, settings: Sequence[str]) -> None:
    """Measure one contestant, and leave what was found at ``told``. All ranks call it."""
    config = load(config_path, (*settings, "optim.shape=constant", "optim.warmup=0"))
    with World.join(config.comm) as world:
        from hpctrain.bench.step import Scene

        found = measure(name, Scene.open(config, world), turns)
        if world.leads:
            told.write_text(json.dumps(found))


def measure(name: str, scene: Scene, turns: int) -> dict[str, Any]:
    """Tokens/s of ``turns`` steps, the plan's bytes, and each rank's baseline and peaks, in bytes. Collective."""
    from hpctrain.bench.step import contestant, timed

    group = scene.groups.whole
    make = contestant(name)(scene)
    contestant(name)(rehearsal(scene))()(0)
    gc.collect()
    with watch() as look:
        group.barrier()
        baseline = look()
        step = make()
        building = look()
        for number in range(WATCHED):
            step(number)
        training = look()
    taken = median(timed(step, WATCHED + turn, group)[0] for turn in range(turns))
    mine = list(zip(baseline, building, training, strict=True))
    return {
        "tokens_per_second": scene.config.train.batch * scene.config.model.sequence / taken,
        "plan": planned(name, scene),
        "bytes": dict(zip(MEASURES, zip(*group.collect(mine), strict=True), strict=True)),
    }


def rehearsal(scene: Scene) -> Scene:
    """The same with a model of next to nothing, and groups of its own. Collective.

    One step of it loads what a framework loads only when it is first used, which is no part of what training costs.
    """
    model = scene.config.model.model_copy(
        update={"layers": 1, "width": 2 * scene.config.model.heads, "mlp_width": None}
    )
    small = scene.config.model_copy(update={"model": model})
    return replace(scene, config=small).sharing(small.parallel.zero)


def planned(name: str, scene: Scene) -> int | None:
    """What our plan says that the first rank holds, where the contestant is ours."""
    from hpctrain.bench.step import with_stage

    stages = {"hpctrain": scene.config.parallel.zero} | {f"zero-{stage}": stage for stage in STAGES}
    if name not in stages:
        return None
    config = with_stage(scene.config, stages[name])
    return sum(decide(config, scene.plan.topology, scene.batches.vocabulary).bytes.values())


# ---- the kernel's accounts -------------------------------------------------------------------------------------------


@dataclass
class Peak:
    """The most proportional memory that a thread has seen; live."""

    bytes: int = 0
    enough: Event = field(default_factory=Event)
    lock: Lock = field(default_factory=Lock)

    def follow(self) -> None:
        while not self.enough.wait(EVERY_SECONDS):
            self.look()

    def look(self) -> None:
        with self.lock:
            self.bytes = max(self.bytes, _kib("smaps_rollup", "Pss") * 1024)

    def begin(self) -> int:
        """What was seen, of which nothing counts from here on."""
        self.look()
        with self.lock:
            seen, self.bytes = self.bytes, 0
        return seen


@contextmanager
def watch() -> Iterator[Callable[[], tuple[int, int]]]:
    """Gives a function that tells the peaks of this process since it was called before, in the order of MEASURES."""
    peak = Peak()

    def look() -> tuple[int, int]:
        found = _kib("status", "VmHWM") * 1024, peak.begin()
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew from what is there
        return found

    look()
    thread = Thread(target=peak.follow, name="memory", daemon=True)
    thread.start()
    try:
        yield look
    finally:
        peak.enough.set()
        thread.join()


def _kib(account: str, name: str) -> int:
    """A line of one of the kernel's accounts of this process."""
    text = Path("/proc/self", account).read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5:])
