"""Ranks that are processes, forked from one that has loaded everything: quick to start, and killed as real ones are.

They go on from the newest checkpoint of a folder, check every element of it, and save, until one of them comes to its
last moment. Moments are counted in calls that the code of checkpoints makes, of Python and of C, on whatever thread.

As a program it is that one process: it reads lives from its input, a line each, and tells how the first victim ended.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist

from hpctrain import checkpoint
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.comm.group import Group
from hpctrain.comm.store import LOOPBACK
from hpctrain.comm.torch import TorchGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.saving import SAVES

ROOT = Path(__file__).parents[2]
SECONDS = 60
CODE = str(Path(checkpoint.__file__).parent)
LAYOUTS = {
    "model/rows": Layout((600, 301), "float32", (Cut(0, ("dp",)),)),
    "model/columns": Layout((30, 301), "float32", (Cut(1, ("dp",)),)),
    "model/copied": Layout((300_000,), "bfloat16"),
    **{f"model/small.{number}": Layout((number,), "float32") for number in range(5)},
    "optim/exp_avg/rows": Layout((600, 301), "float32", (), Flat(("dp",), 5, 600 * 301 + 7)),
}


@dataclass(frozen=True)
class Life:
    """What ranks are started for: where they save and how, what they tell, which ones die, and at which part of a save.

    ``part`` is 0 for the first call of the save that comes after the first whole one, and 1 for its last.
    """

    folder: str
    told: str
    save: str
    ranks: int
    victims: tuple[int, ...]
    part: float


class Lives:
    """The process that ranks are forked from. Not pytest itself: a fork would have the locks of its threads."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def live(self, life: Life) -> int:
        """Live a life to its end, and give the status of the first victim: minus the signal that ended it."""
        print(json.dumps(asdict(life)), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        self._process.wait(SECONDS)


def serve() -> None:
    """Fork the ranks of each life that is asked for; when the first victim is dead, end what a launcher would end."""
    for line in sys.stdin:
        life = Life(**json.loads(line))
        ranks = [_forked(life, rank) for rank in range(life.ranks)]
        status = _status(ranks[life.victims[0]])
        for number, process in enumerate(ranks):
            if number != life.victims[0]:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        print(status, flush=True)


def _forked(life: Life, rank: int) -> int:
    process = os.fork()
    if not process:
        try:
            live(life, rank)
        finally:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    return process


def _status(process: int) -> int:
    """How a process ended, once it did; one that does not is ended, and that is no status of a victim."""
    limit = time.monotonic() + SECONDS
    while time.monotonic() < limit:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGABRT)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def live(life: Life, rank: int) -> None:
    """Be one rank until it is killed."""
    group = _group(life, rank)
    mesh = Mesh((("dp", life.ranks),))
    point = Checkpoint(CheckpointConfig(keep=2, sync=False), Path(life.folder), mesh, group)
    state = states.blank(LAYOUTS, mesh, rank)
    start = point.resume(state)
    assert start == 0 or states.wrong(state, mesh, rank, start) == []
    _tell(group, life.told, f"resumed {start}")
    doomed = [group.collect(os.getpid())[victim] for victim in life.victims]
    calls = _Calls(life.part, doomed if rank == life.victims[0] else [])
    for step in count(start + 1):
        for name, held in states.filled(LAYOUTS, mesh, rank, step).items():
            state[name].tensor.copy_(held.tensor)
        with calls:
            SAVES[life.save](point, step, state)
            _tell(group, life.told, f"saved {step}")


class _Calls:
    """Counts the calls of a save, and in the second one ends the ``doomed`` before the call that its part comes to."""

    def __init__(self, part: float, doomed: list[int]) -> None:
        self.part, self.doomed = part, doomed
        self.made, self.last = 0, sys.maxsize

    def __enter__(self) -> None:
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
        self.made, self.last = 0, int(self.part * self.made)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call") or not frame.f_code.co_filename.startswith(CODE):
            return
        self.made += 1
        if self.made > self.last:
            for process in sorted(self.doomed, key=lambda process: process == os.getpid()):
                os.kill(process, signal.SIGKILL)


def _group(life: Life, rank: int) -> Group:
    store = dist.FileStore(life.told + ".store", life.ranks)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=SECONDS)
    made = dist.ProcessGroupGloo(store, rank, life.ranks, options)
    return TorchGroup(made, range(life.ranks), rank, "lives", torch.device("cpu"))


def _tell(group: Group, told: str, line: str) -> None:
    if group.leads:
        with open(told, "a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    serve()
