"""Checkpoints near ranks that are threads, on nodes that are folders: ``hosts`` says which rank is on which."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states, threads


class Cluster:
    """A run's folder, and a folder for the disk of each node."""

    def __init__(self, folder: Path, layouts: dict[str, Layout], hosts: str, **config: Any) -> None:
        self.run, self.disks, self.layouts, self.hosts = folder / "run", folder / "disks", layouts, hosts
        self.config = {"sync": False, "near": str(self.disks / "{host}"), "near_every": 1} | config

    def point(self, group: Group, mesh: Mesh, hosts: str = "", **config: Any) -> Checkpoint:
        """The checkpoint of a rank, its node's name being its letter in ``hosts``."""
        knobs = CheckpointConfig(**self.config | config)
        return Checkpoint(knobs, self.run, mesh, group, (hosts or self.hosts)[group.rank])

    def each(self, act: Callable[[Checkpoint, int], Any], hosts: str = "", **config: Any) -> list[Any]:
        """What ``act`` gives on each rank, for its checkpoint and the rank."""
        mesh = Mesh((("dp", len(hosts or self.hosts)),))
        return threads.run(mesh.ranks_total, lambda group: act(self.point(group, mesh, hosts, **config), group.rank))

    def save(self, *steps: int, whole: Iterable[int] = (), hosts: str = "", **config: Any) -> list[bool]:
        """Save steps near, or in the run's folder where ``whole`` has them; whether each rank says that it did."""

        def act(point: Checkpoint, rank: int) -> bool:
            done = []
            for step in steps:
                state = states.filled(self.layouts, point.mesh, rank, step)
                whole_ = step in whole
                done.append(bool(point.save(step, state, {}) if whole_ else point.near.save_if_room(step, state)))
            return all(done)

        return self.each(act, hosts, **config)

    def resume(self, hosts: str = "", **config: Any) -> int:
        """The step that was gone on from, once every element on every rank was found to be right."""

        def act(point: Checkpoint, rank: int) -> int:
            state = states.blank(self.layouts, point.mesh, rank)
            step = point.resume(state)
            assert step == 0 or states.wrong(state, point.mesh, rank, step) == []
            return step

        (step,) = set(self.each(act, hosts, **config))
        return step

    def files(self, host: str) -> list[Path]:
        """The parts, and what else is in the run's folder, on a node."""
        return sorted(path for path in (self.disks / host).rglob("*") if path.is_file())

    def names(self) -> dict[str, list[str]]:
        """Of each node, which rank's part it has, and whether as its own or as a copy."""
        return {
            host: [".".join(path.name.split(".")[2:]) for path in self.files(host)] for host in sorted(set(self.hosts))
        }


def flip(path: Path, at: int) -> None:
    """Change a bit of a file; ``at`` counts from its end where it is negative."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
