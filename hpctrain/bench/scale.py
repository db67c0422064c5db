"""What a checkpoint of many ranks costs beside its data: seconds and memory of the leading rank, and of another.

One process plays a rank of the whole job, by the code that saves and loads: the plan, the agreement on all names, the
file's layout (a real file, with no data in it), what the rank writes and reads, and the table of checksums. What the
other ranks would say comes from ``Answers``, so no rank is started, and no time of a network is in the figures.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint import checksums, format, load, ranges, save
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.state import Entry, Held, State, agree, catalog, digest
from hpctrain.comm.group import DONE, Handle, SoloGroup
from hpctrain.config import Config
from hpctrain.plan.layout import Layout
from hpctrain.plan.plan import Plan, decide
from hpctrain.plan.topology import Topology
from hpctrain.plan.units import PIPE

STATES = ("exp_avg", "exp_avg_sq")  # those of AdamW
MIB = 1 << 20
STEP = 1  # that the file is of


@dataclass(frozen=True)
class Row:
    """A part of the work: ``items`` of what it is about, and the peak of the process until its end, or None."""

    part: str
    rank: int
    items: int
    of: str
    seconds: float
    peak_mib: float | None


class Answers(SoloGroup):
    """A rank among many whose other members are values: it answers for them, with what each would have sent.

    It has a state, the values of the collective that is under way.
    """

    def __init__(self, size: int, rank: int, told: Callable[[int], Any]) -> None:
        super().__init__()
        self.ranks, self.rank, self.size, self.told = tuple(range(size)), rank, size, told
        self._pending: list[Tensor] = []

    def collect(self, value: Any) -> list[Any]:
        """What all ranks say: this one's value, and by the others the same where it says nothing."""
        values = [value if value is None or rank == self.rank else self.told(rank)["digest"] for rank in self.ranks]
        texts = [json.dumps(one).encode() for one in values]
        lengths = torch.tensor([len(text) for text in texts])
        self._pending = [lengths, torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)]
        return super().collect(value)

    def share(self, value: Any, source: int = 0) -> Any:
        """The value of one rank, through text as over a network."""
        return json.loads(json.dumps(value if source == self.rank else self.told(source)["catalog"]))

    def _all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], later: bool) -> Handle:
        out.copy_(self._pending.pop(0))
        return DONE

    def _all_reduce(self, x: Tensor, op: str, later: bool) -> Handle:
        """The greatest digests and complements: blocks that this rank has not are told by the others as 1."""
        digests, others = x.view(2, -1)  # as ``checksums`` lays them
        unknown = digests == checksums.LEAST
        digests[unknown], others[unknown] = 1, ~1
        return DONE


@dataclass(frozen=True)
class Scene:
    """A job that no machine runs."""

    plan: Plan
    stages: tuple[dict[str, Any], ...]
    """For each rank along ``pp``: the layouts of its tensors, and what it would say of them."""

    @classmethod
    def of(cls, plan: Plan) -> Scene:
        """What each stage of a plan's pipeline has, with the optimizer's states."""
        return cls(plan, tuple(_told(_layouts(plan, units)) for units in plan.units))

    def told(self, rank: int) -> dict[str, Any]:
        """What a rank would say."""
        return self.stages[self.plan.mesh.index(rank, PIPE)]

    def state(self, rank: int) -> State:
        """A rank's tensors; their memory is never touched, and takes none."""
        layouts = self.told(rank)["layouts"]
        return {name: Held(layout, _empty(layout, self.plan, rank)) for name, layout in layouts.items()}


def run(config: Config, ranks: int, vocabulary: int, others: Sequence[int] = ()) -> list[Row]:
    """Time the leading rank of ``ranks`` and each of ``others``; peaks are of this process, by the kernel's count."""
    clock = Clock()
    plan = clock.time(
        "plan the run", 0, "ranks", lambda: decide(config, Topology(("node",) * ranks), vocabulary), ranks
    )
    scene = clock.time("list every stage's tensors", 0, "stages", lambda: Scene.of(plan))
    with TemporaryDirectory(prefix="scale-") as folder:
        path = Path(folder) / "step.h5"
        for rank in (0, *others):
            _rank(clock, scene, rank, path, config)
    return [*clock.rows, clock.all()]


def _rank(clock: Clock, scene: Scene, rank: int, path: Path, config: Config) -> None:
    state = scene.state(rank)
    group = Answers(scene.plan.mesh.ranks_total, rank, scene.told)
    entries = clock.time("agree on all names", rank, "tensors", lambda: agree(state, scene.plan.mesh, group))
    if group.leads:
        attributes = {"plan": scene.plan.to_json(), "config": config.model_dump()}
        slots = clock.time("lay out the file", rank, "tensors", lambda: _lay_out(path, entries, attributes))
        count = sum(slot.blocks for slot in slots)
        made = checksums.Made(count)
        sums = clock.time("gather the checksums", rank, "blocks", lambda: checksums.met(path, [], made, group))
        clock.time("write them and the seal", rank, "blocks", lambda: format.mark_complete(path, slots, sums), count)
        del sums
    index = clock.time("read the file's index", rank, "tensors", lambda: _index(path))
    clock.time("plan what to write", rank, "pieces", lambda: _pieces(entries, state, index.slots))
    clock.time("plan what to read", rank, "pieces", lambda: _reads(path, index, entries, state))


class Clock:
    """Rows as they come."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def time(self, part: str, rank: int, of: str, act: Callable[[], Any], items: int | None = None) -> Any:
        """Do ``act``, and put down how long it took and what the process had at most."""
        _forget_peak()
        start = time.perf_counter()
        made = act()
        seconds = time.perf_counter() - start
        count = items if items is not None else len(getattr(made, "stages", getattr(made, "slots", made)))
        self.rows.append(Row(part, rank, count, of, seconds, _peak_mib()))
        return made

    def all(self) -> Row:
        """The sum of the seconds of the leading rank, and the greatest peak."""
        lead = [row for row in self.rows if row.rank == 0]
        peaks = [row.peak_mib for row in lead if row.peak_mib is not None]
        return Row("all of it", 0, len(lead), "parts", sum(row.seconds for row in lead), max(peaks, default=None))


def _layouts(plan: Plan, units: Sequence[Any]) -> dict[str, Layout]:
    names = [slot.name for unit in units for slot in unit.slots]
    return {f"{kind}/{name}": plan.layouts[name] for kind in ("model", *_kinds()) for name in names}


def _kinds() -> tuple[str, ...]:
    return tuple(f"optim/{state}" for state in STATES)


def _told(layouts: dict[str, Layout]) -> dict[str, Any]:
    told = catalog(layouts)
    return {"layouts": layouts, "catalog": told, "digest": digest(told)}


def _empty(layout: Layout, plan: Plan, rank: int) -> Tensor:
    start, stop = layout.interval(plan.mesh, rank)
    return torch.empty(stop - start, dtype=getattr(torch, layout.dtype))


def _lay_out(path: Path, entries: Sequence[Entry], attributes: dict[str, Any]) -> list[Slot]:
    slots = [Slot(entry.name, entry.layout.shape, entry.layout.dtype) for entry in ranges.file_order(entries)]
    return format.lay_out(path, slots, STEP, attributes)


def _index(path: Path) -> Index:
    """What the leading rank reads and sends to all."""
    return Index.from_json(json.loads(json.dumps(format.read_index(path).to_json())))


def _pieces(entries: Sequence[Entry], state: State, slots: Sequence[Slot]) -> list[Any]:
    return [piece for _, pieces in save.parts(entries, state, slots) for piece in pieces]


def _reads(path: Path, index: Index, entries: Sequence[Entry], state: State) -> list[Any]:
    load.check(path, index, entries)
    return [piece for reading in load.readings(index, entries, state) for piece in reading.pieces]


def _forget_peak() -> None:
    """Have the kernel count the peak from here on, where it can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def _peak_mib() -> float | None:
    """The most resident memory since then."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next(int(line.split()[1]) * 1024 / MIB for line in lines if line.startswith("VmHWM"))
