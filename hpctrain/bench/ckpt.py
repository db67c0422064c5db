"""How fast checkpoints are saved and loaded, beside torch's distributed checkpoint and what ``fio`` gets on the disk.

Each byte of the state lies on one rank, and is written once and read once. A save is timed from a barrier to the moment
when the slowest rank has it, the disk included (fsync); where it goes on while training does, so is the time until it
lets training go on. A load finds nothing of the files in the page cache, and a second one, ``load cached``, all that
the first one left there. The times are medians; a first round of each warms up, and is not counted.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from hpctrain.bench import fio
from hpctrain.checkpoint import shared_file
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import Held
from hpctrain.cluster.world import World
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import UsageError
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh

GIB = 1 << 30
LARGE, ROWS = 16, 1000
SMALL_NUMEL = 4096  # norms and biases have as many elements at most; there are many, and they weigh nothing

State = Mapping[str, Held]
Wait = Callable[[], Any]


@dataclass(frozen=True)
class Plan:
    """What is moved, how often and by whom: 16 large tensors and ``small`` small ones.

    ``cut`` says how they lie on ranks: ``flat`` (one buffer over all, as ZeRO leaves it), ``rows`` or ``columns`` (each
    by itself, along its first or its last dim). ``onto`` has pairs of ranks that save and ranks that load. Of the
    ``writers`` those are timed that work here.
    """

    gib: float = 1.0
    rounds: int = 3
    against: tuple[str, ...] = ()
    cut: str = "flat"
    small: int = 200
    onto: tuple[tuple[int, int], ...] = ()
    writers: tuple[str, ...] = ("direct", "mpio", "background")
    fio: bool = True


@dataclass(frozen=True)
class Row:
    """A way to move a checkpoint to or from the disk; ``of_fio`` is its speed as a part of fio's, None without fio."""

    operation: str
    writer: str
    bytes: int
    seconds: float
    gb_per_second: float
    of_fio: float | None


class Way(Protocol):
    """A way to save and load, among the first few ranks; those call all of it together."""

    later: bool
    """Whether a save goes on after the call."""

    def save(self, folder: Path, state: State) -> Wait:
        """Save into a folder that is not there yet; what is given returns when the disk has all."""

    def load(self, folder: Path, state: State) -> None:
        """Fill the tensors in place."""


class Ours:
    """hpctrain's own checkpoints, by one of its writers, or in the background."""

    def __init__(self, writer: str, group: Group) -> None:
        self.later = writer == "background"
        self.config, self.group = CheckpointConfig(writer="direct" if self.later else writer, keep=1), group
        self._points: dict[Path, Checkpoint] = {}

    def save(self, folder: Path, state: State) -> Wait:
        """As Way."""
        point = self._point(folder)
        (point.begin if self.later else point.save)(1, state, {})
        return point.wait

    def load(self, folder: Path, state: State) -> None:
        """As Way."""
        self._point(folder).resume(state)

    def _point(self, folder: Path) -> Checkpoint:
        """One object for all saves to a folder, as a run has it."""
        if folder not in self._points:
            self._points[folder] = Checkpoint(self.config, folder, Mesh((("dp", self.group.size),)), self.group)
        return self._points[folder]


class NearBy(Ours):
    """Saves to the nodes' own disks in the background, where half of the ranks are said to be on another node."""

    def __init__(self, group: Group) -> None:
        super().__init__("background", group)

    def save(self, folder: Path, state: State) -> Wait:
        """As Way."""
        point = self._point(folder)
        point.near.clear()  # the folder of the round before is gone
        point.begin_near(1, state)
        return point.near.wait

    def _point(self, folder: Path) -> Checkpoint:
        if folder not in self._points:
            config = self.config.model_copy(update={"near": f"{folder}/{{host}}"})
            host = f"half{2 * self.group.rank // self.group.size}"
            self._points[folder] = Checkpoint(config, folder, Mesh((("dp", self.group.size),)), self.group, host)
        return self._points[folder]


WRITERS = ("direct", "mpio", "background", "near")


# DCP's number of threads, which is one where nothing is said, and whether its save goes on after the call.
PEERS = {"dcp": (1, False), "dcp-4": (4, False), "dcp-async": (1, True)}


class Scene:
    """The ranks, and what the first few of them hold; live."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        check(plan, world.size)
        self.layouts = layouts(plan, lcm(world.size, *(count for pair in plan.onto for count in pair)))
        self._groups: dict[int, Group | None] = {}
        self._peers: dict[int, Any] = {}

    @property
    def group(self) -> Group:
        """Of all ranks."""
        return self.members(self.world.size)

    @property
    def bytes(self) -> int:
        """Bytes of the state."""
        return sum(layout.nbytes for layout in self.layouts.values())

    @cached_property
    def state(self) -> State:
        """What this rank holds where all ranks do."""
        return self.held(self.world.size)

    def held(self, count: int) -> State:
        """What this rank holds where the first ``count`` ranks share the state; nothing where it is none of them."""
        rank, mesh = self.world.rank, Mesh((("dp", count),))
        if rank >= count:
            return {}
        return {name: Held(layout, _piece(layout, mesh, rank)) for name, layout in self.layouts.items()}

    def members(self, count: int) -> Group | None:
        """The group of the first ``count`` ranks; None on the others. Collective over all ranks."""
        if count not in self._groups:
            self._groups[count] = _group(self.world, count)
        return self._groups[count]

    def way(self, name: str, count: int) -> Way | None:
        """A way to save and load among the first ``count`` ranks; None on the others. Collective over all ranks."""
        if name not in PEERS:
            group = self.members(count)
            return group and (NearBy(group) if name == "near" else Ours(name, group))
        from hpctrain.bench.dcp import Dcp, processes

        if count not in self._peers:
            self._peers[count] = processes(self.world, count)
        return Dcp(self._peers[count], *PEERS[name]) if self.world.rank < count else None


def run(folder: Path, world: World | None = None, plan: Plan | None = None) -> list[Row]:
    """Time saves and loads in ``folder``. Collective; every rank gets the rows."""
    if world is None:
        with World.join() as joined:
            return run(folder, joined, plan)
    scene = Scene(plan or Plan(), world)
    mpio = shared_file.available() and world.comm is not None
    ours = [name for name in scene.plan.writers if mpio or name != "mpio"]
    with _Place(folder, scene.group) as place:
        speeds = scene.group.share(
            fio.speeds(place, scene.bytes, scene.plan.rounds) if scene.plan.fio and scene.group.leads else None
        )
        found = [
            (operation, name, seconds)
            for name in (*ours, *scene.plan.against)
            for operation, seconds in (_times(scene, name, place / name) | _onto(scene, name, place / name)).items()
        ]
    rows = [_row(operation, name, scene.bytes, seconds, speeds) for operation, name, seconds in found]
    return rows + [
        _row(kind, "fio", scene.bytes, scene.bytes / speed, speeds) for kind, speed in (speeds or {}).items()
    ]


def layouts(plan: Plan, unit: int) -> dict[str, Layout]:
    """The state's tensors; every dim that is cut is a multiple of ``unit``, so that all ways cut it alike."""
    rows = unit * max(1, ROWS // unit)
    columns = unit * max(1, int(plan.gib * GIB) // LARGE // 4 // rows // unit)
    most = max(1, SMALL_NUMEL // unit)
    shapes = {f"model/large.{number}": (rows, columns) for number in range(LARGE)}
    shapes |= {f"model/small.{number}": (unit * (1 + number % most),) for number in range(plan.small)}
    return CUTS[plan.cut]({name: Layout(shape, "float32") for name, shape in shapes.items()})


def _flat(plain: Mapping[str, Layout]) -> dict[str, Layout]:
    total, offset, made = sum(layout.size for layout in plain.values()), 0, {}
    for name, layout in plain.items():
        made[name] = Layout(layout.shape, layout.dtype, (), Flat(("dp",), offset, total))
        offset += layout.size
    return made


def _rows(plain: Mapping[str, Layout]) -> dict[str, Layout]:
    return {name: Layout(layout.shape, layout.dtype, (Cut(0, ("dp",)),)) for name, layout in plain.items()}


def _columns(plain: Mapping[str, Layout]) -> dict[str, Layout]:
    return {
        name: Layout(layout.shape, layout.dtype, (Cut(len(layout.shape) - 1, ("dp",)),))
        for name, layout in plain.items()
    }


CUTS: dict[str, Callable[[Mapping[str, Layout]], dict[str, Layout]]] = {
    "flat": _flat,
    "rows": _rows,
    "columns": _columns,
}


def check(plan: Plan, ranks: int) -> None:
    """Raise UsageError where so many ranks cannot do what is planned."""
    strange = [name for name in plan.writers if name not in WRITERS]
    if strange:
        raise UsageError(f"--writers {strange[0]}: not a known writer", f"take some of {', '.join(WRITERS)}, apart")
    unknown = [name for name in plan.against if name not in PEERS]
    if unknown:
        raise UsageError(f"--against {unknown[0]}: not a known peer", f"take some of {', '.join(PEERS)}, apart")
    if plan.cut not in CUTS:
        raise UsageError(f"--cut {plan.cut}: not a known cut", f"take one of {', '.join(CUTS)}")
    if plan.against and plan.cut == "flat":
        raise UsageError(
            f"--cut flat does not go with --against {plan.against[0]}",
            "DTensor has no pieces of a flat buffer",
            "give --cut rows or --cut columns",
        )
    few = [pair for pair in plan.onto if max(pair) > ranks or min(pair) < 1]
    if few:
        raise UsageError(f"--onto {few[0][0]}:{few[0][1]}: there are {ranks} ranks", mend="start as many as the most")


def _group(world: World, count: int) -> Group | None:
    if world.comm is None:
        return SoloGroup()
    from mpi4py import MPI

    from hpctrain.comm.mpi import MpiGroup

    comm = world.comm.Split(0 if world.rank < count else MPI.UNDEFINED, world.rank)
    return None if comm == MPI.COMM_NULL else MpiGroup(comm, f"first {count}")


def _piece(layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    start, stop = layout.interval(mesh, rank)
    values = torch.rand(stop - start, generator=torch.Generator().manual_seed(rank))
    return values if layout.flat else values.view(layout.box(mesh, rank).shape)


class _Place:
    """A fresh folder of this benchmark on the disk that is measured; rank 0 makes and removes it."""

    def __init__(self, folder: Path, group: Group) -> None:
        self.folder, self.group = folder, group

    def __enter__(self) -> Path:
        self._made = TemporaryDirectory(prefix="bench-", dir=self._parent()) if self.group.leads else None
        return Path(self.group.share(self._made and self._made.name))

    def __exit__(self, *error: Any) -> None:
        if self._made:
            self._made.cleanup()

    def _parent(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder.absolute()


def _times(scene: Scene, name: str, folder: Path) -> dict[str, float]:
    """Median seconds of a save, of a load from the disk, and of one from the page cache."""
    way, group = scene.way(name, scene.world.size), scene.group
    rounds: list[dict[str, float]] = []
    for _ in range(scene.plan.rounds + 1):
        stopped, saved = _timed(group, lambda: way.save(folder, scene.state))
        _forget(folder, group)
        load, cached = (_timed(group, lambda: way.load(folder, scene.state))[1] for _ in range(2))
        rounds.append(
            ({"stopped": stopped} if way.later else {}) | {"save": saved, "load": load, "load cached": cached}
        )
        _remove(folder, group)
    return {operation: median(one[operation] for one in rounds[1:]) for operation in rounds[0]}


def _onto(scene: Scene, name: str, folder: Path) -> dict[str, float]:
    """Median seconds of loads by another number of ranks than saved."""
    found: dict[str, float] = {}
    for few, many in () if scene.way(name, scene.world.size).later else scene.plan.onto:
        writer, reader = scene.way(name, few), scene.way(name, many)
        _timed(scene.group, lambda writer=writer, few=few: writer and writer.save(folder, scene.held(few)))
        state, times = scene.held(many), []
        for _ in range(scene.plan.rounds + 1):
            _forget(folder, scene.group)
            times += [_timed(scene.group, lambda: reader and reader.load(folder, state))[1]]  # noqa: B023 - called at once
        found[f"load {few} to {many}"] = median(times[1:])
        _remove(folder, scene.group)
    return found


def _timed(group: Group, act: Callable[[], Wait | None]) -> tuple[float, float]:
    """Seconds of a call, and until what it began is done, on the slowest rank."""
    group.barrier()
    start = time.perf_counter()
    wait = act()
    stopped = time.perf_counter() - start
    if wait:
        wait()
    taken = torch.tensor([stopped, time.perf_counter() - start], dtype=torch.float64)
    group.all_reduce(taken, "max")
    return float(taken[0]), float(taken[1])


def _forget(folder: Path, group: Group) -> None:
    """Have every node drop the folder's files from its page cache."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        opened = os.open(path, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)
    group.barrier()


def _remove(folder: Path, group: Group) -> None:
    group.barrier()
    if group.leads:
        shutil.rmtree(folder)
    group.barrier()


def _row(operation: str, writer: str, count: int, seconds: float, speeds: dict[str, float] | None) -> Row:
    speed, kind = count / seconds, "load" if operation.startswith("load") else "save"
    return Row(operation, writer, count, seconds, speed / 1e9, speed / speeds[kind] if speeds else None)
