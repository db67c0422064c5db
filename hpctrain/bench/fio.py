"""What ``fio`` gets of a disk for what a checkpoint does: a new file is written and synced, and then read.

fio is tried in several ways, and the one with the best median counts. Each save makes a new file: blocks that are there
already are written quicker by some disks, and no save ever finds them. What fio gets there is told as ``overwrite``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median

MIB = 1 << 20
TRIAL_BYTES = 1 << 30  # at most, to find the fastest setting
KINDS = {"save": "write", "load": "read", "overwrite": "write"}  # what is done to a file, one after another


@dataclass(frozen=True)
class Setting:
    """A way to ask fio: ``jobs`` processes, each with its own part of one file.

    Where it is not ``direct`` it goes through the page cache, and with ``early`` the disk is told after each block to
    begin with it.
    """

    engine: str
    block_mib: int
    jobs: int = 1
    depth: int = 1
    direct: bool = True
    early: bool = False

    def command(self, path: Path, count: int, kind: str) -> list[str]:
        """The command that writes (``write``) or reads (``read``) ``count`` bytes, as many as are whole blocks."""
        step = self.block_mib * MIB
        part = max(step, count // self.jobs // step * step)
        return [
            "fio", "--name=checkpoint", f"--filename={path}", f"--rw={kind}", f"--direct={int(self.direct)}",
            "--end_fsync=1", "--fallocate=native", "--group_reporting",
            f"--size={part}", f"--offset_increment={part}", f"--numjobs={self.jobs}", f"--ioengine={self.engine}",
            f"--bs={self.block_mib}M", f"--iodepth={self.depth}", "--output-format=json",
            *(["--sync_file_range=write:1"] if self.early and kind == "write" else []),
        ]  # fmt: skip


SETTINGS = (
    Setting("psync", 1, jobs=4),
    Setting("io_uring", 4, depth=8),
    Setting("psync", 1, jobs=4, direct=False),
    Setting("psync", 4, jobs=4, direct=False),
    Setting("psync", 1, jobs=4, direct=False, early=True),
    Setting("psync", 4, jobs=4, direct=False, early=True),
    Setting("psync", 4, direct=False, early=True),
)


def speeds(folder: Path, count: int, rounds: int) -> dict[str, float] | None:
    """Bytes a second of fio's fastest setting for ``save``, ``load`` and ``overwrite``; None where fio is missing.

    Each setting's figure is the median of ``rounds``, with 1 GiB at most; the fastest ones are asked again for all of a
    larger ``count``. One process calls it.
    """
    if not shutil.which("fio"):
        return None
    path = folder / "fio"
    tried = {setting: _medians(path, min(count, TRIAL_BYTES), setting, rounds) for setting in SETTINGS}
    best = {kind: max(SETTINGS, key=lambda one, kind=kind: tried[one].get(kind, 0.0)) for kind in KINDS}
    if count <= TRIAL_BYTES:
        return {kind: tried[setting][kind] for kind, setting in best.items()}
    return {kind: _medians(path, count, setting, rounds, kind)[kind] for kind, setting in best.items()}


def _medians(path: Path, count: int, setting: Setting, rounds: int, last: str = "overwrite") -> dict[str, float]:
    found = [_speeds(path, count, setting, last) for _ in range(rounds)]
    return {kind: median(one[kind] for one in found) for kind in found[0]}


def _speeds(path: Path, count: int, setting: Setting, last: str) -> dict[str, float]:
    """Of one file, which is written, read and written again as far as ``last``; none where fio has no such engine."""
    path.unlink(missing_ok=True)
    found: dict[str, float] = {}
    try:
        for name, kind in list(KINDS.items())[: list(KINDS).index(last) + 1]:
            found[name] = _speed(setting.command(path, count, kind), kind)
    except subprocess.CalledProcessError:
        return {}
    finally:
        path.unlink(missing_ok=True)
    return found


def _speed(command: list[str], kind: str) -> float:
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][kind]
    return float(told["bw_bytes"])
