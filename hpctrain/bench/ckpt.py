"""How fast checkpoints are saved and loaded, beside what ``fio`` gets on the same disk.

The state is what ZeRO leaves: every tensor lies on one rank or is cut between neighbours, so each byte is written once
and read once. A save is timed from a barrier to the moment when the slowest rank has it, the disk included (fsync); a
load finds nothing of the file in the page cache. The times are medians; fio's figure is its best.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hpctrain.checkpoint import format
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import Held, State
from hpctrain.cluster.world import World
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Flat, Layout
from hpctrain.plan.mesh import Mesh

GIB = 1 << 30
ROWS = 1000
SMALL, SMALL_NUMEL = 200, 300  # norms and biases: there are many, and they weigh nothing

# What fio is asked for, beside direct=1: the settings that were fastest on virtual disks and on NVMe drives.
FIO = ("--ioengine=psync --bs=1M", "--ioengine=psync --bs=1M --numjobs=4", "--ioengine=libaio --bs=1M --iodepth=8")


@dataclass(frozen=True)
class Row:
    """A way to move a checkpoint to or from the disk; ``of_fio`` is its speed as a part of fio's, None without fio."""

    operation: str
    writer: str
    bytes: int
    seconds: float
    gb_per_second: float
    of_fio: float | None


def run(folder: Path, world: World | None = None, gib: float = 1.0, rounds: int = 3) -> list[Row]:
    """Time saves and loads of ``gib`` GiB in ``folder``. Collective; every rank gets the rows."""
    if world is None:
        with World.join() as joined:
            return run(folder, joined, gib, rounds)
    group = _group(world)
    layouts = _layouts(int(gib * GIB))
    mesh = Mesh((("dp", group.size),))
    state = {name: Held(layout, _piece(layout, mesh, group.rank)) for name, layout in layouts.items()}
    count = sum(layout.nbytes for layout in layouts.values())
    with _Place(folder, group) as place:
        fio = group.share(_fio(place, count) if group.leads else None)
        rows = [
            _row(operation, writer, count, seconds, fio)
            for writer in ("direct", "mpio")[: 2 if format.parallel() and world.comm else 1]
            for operation, seconds in _times(place / writer, writer, mesh, group, state, rounds).items()
        ]
    fios = [_row(operation, "fio", count, count / speed, fio) for operation, speed in (fio or {}).items()]
    return rows + fios


def _group(world: World) -> Group:
    if world.comm is None:
        return SoloGroup()
    from hpctrain.comm.mpi import MpiGroup

    return MpiGroup(world.comm)


def _layouts(count: int) -> dict[str, Layout]:
    """Sixteen large tensors, and many small ones, in one flat buffer that is cut over the ranks."""
    shapes = {f"model/large.{number}": (ROWS, max(1, count // 16 // 4 // ROWS)) for number in range(16)}
    shapes |= {f"model/small.{number}": (SMALL_NUMEL,) for number in range(SMALL)}
    plain = {name: Layout(shape, "float32") for name, shape in shapes.items()}
    total, offset, made = sum(layout.size for layout in plain.values()), 0, {}
    for name, layout in plain.items():
        made[name] = Layout(layout.shape, layout.dtype, (), Flat(("dp",), offset, total))
        offset += layout.size
    return made


def _piece(layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    start, stop = layout.interval(mesh, rank)
    return torch.rand(stop - start, generator=torch.Generator().manual_seed(rank))


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


def _times(folder: Path, writer: str, mesh: Mesh, group: Group, state: State, rounds: int) -> dict[str, float]:
    """Median seconds of a save and of a load; a first round warms up."""
    checkpoint = Checkpoint(CheckpointConfig(writer=writer, keep=1), folder, mesh, group)
    saves, loads = [], []
    for step in range(1, rounds + 2):
        saves.append(_timed(group, lambda step=step: checkpoint.save(step, state, {})))
        _forget(checkpoint.newest(), group)
        loads.append(_timed(group, lambda: checkpoint.resume(state)))
        _remove(folder, group)
    return {"save": median(saves[1:]), "load": median(loads[1:])}


def _timed(group: Group, act: Callable[[], Any]) -> float:
    """Seconds on the slowest rank."""
    group.barrier()
    start = time.perf_counter()
    act()
    taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    group.all_reduce(taken, "max")
    return float(taken)


def _forget(path: Path, group: Group) -> None:
    """Have every node drop the file from its page cache."""
    opened = os.open(path, os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(opened)
    group.barrier()


def _remove(folder: Path, group: Group) -> None:
    group.barrier()
    if group.leads:
        shutil.rmtree(folder)
    group.barrier()


def _row(operation: str, writer: str, count: int, seconds: float, fio: dict[str, float] | None) -> Row:
    speed = count / seconds
    return Row(operation, writer, count, seconds, speed / 1e9, speed / fio[operation] if fio else None)


def _fio(folder: Path, count: int) -> dict[str, float] | None:
    """Bytes a second of fio's fastest write and read of as many bytes; None where fio is not installed."""
    if not shutil.which("fio"):
        return None
    speeds = {"save": 0.0, "load": 0.0}
    for options in FIO:
        for operation, kind in (("save", "write"), ("load", "read")):
            speeds[operation] = max(speeds[operation], _fio_speed(folder / "fio", count, kind, options.split()))
    (folder / "fio").unlink(missing_ok=True)
    return speeds


def _fio_speed(path: Path, count: int, kind: str, options: list[str]) -> float:
    """All jobs work on one file, each on its own part of it."""
    jobs = next((int(option.split("=")[1]) for option in options if option.startswith("--numjobs=")), 1)
    part = count // jobs // (1 << 20) << 20
    command = [
        "fio", "--name=checkpoint", f"--filename={path}", f"--rw={kind}", "--direct=1", "--end_fsync=1",
        f"--size={part}", f"--offset_increment={part}", "--group_reporting", "--output-format=json", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][kind]["bw_bytes"])
