"""How long it takes from the launcher to the end of the first step, beside torchrun with DDP. Run it by itself.

Both sides train the same model on the same token files, which are made beforehand, and are started turn by turn.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hpctrain.comm.group import SoloGroup
from hpctrain.config import load
from hpctrain.data.prepare import ready
from hpctrain.errors import UsageError

Start = Callable[[Path, str, int, str], float]
"""Takes a configuration, token files, ranks and a launcher; gives seconds to the end of the first step."""


@dataclass(frozen=True)
class Row:
    """A contestant's figures."""

    name: str
    seconds: float
    """Median of the turns."""
    least: float
    most: float


def run(config: Path, ranks: int, launcher: str, turns: int) -> list[Row]:
    """Start each side ``turns`` times. ``launcher`` is the command before the program, with ``{ranks}`` in it."""
    with tempfile.TemporaryDirectory(prefix="hpctrain-start-") as folder:
        chosen = load(config)
        prefix = ready(chosen.data, Path(folder), SoloGroup())[0].path
        taken = {name: [] for name in CONTESTANTS}
        for _ in range(turns):
            for name, start in CONTESTANTS.items():
                taken[name].append(start(config, prefix, ranks, launcher))
    return [Row(name, median(seconds), min(seconds), max(seconds)) for name, seconds in taken.items()]


def _ours(config: Path, prefix: str, ranks: int, launcher: str) -> float:
    with tempfile.TemporaryDirectory(prefix="hpctrain-start-") as folder:
        settings = (f"run.dir={folder}", f'data.sources=[{{path="{prefix}"}}]', "train.steps=1")
        options = [word for setting in settings for word in ("--set", setting)]
        program = [sys.executable, "-m", "hpctrain", "train", str(config), *options]
        began = time.time()
        finish([*shlex.split(launcher.format(ranks=ranks)), *program])
        return json.loads((Path(folder) / "log.jsonl").read_text().splitlines()[0])["time"] - began


def _torchrun(config: Path, prefix: str, ranks: int, launcher: str) -> float:
    program = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    began = time.time()
    return float(finish([*program, "-m", "hpctrain.bench.ddp", str(config), prefix]).split()[-1]) - began


def finish(command: list[str]) -> str:
    """What a command printed. Raises UsageError, with the end of its errors, when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
    if done.returncode:
        raise UsageError(f"{shlex.join(command)} ended with {done.returncode}", done.stderr[-2000:])
    return done.stdout


CONTESTANTS: dict[str, Start] = {"hpctrain": _ours, "torchrun with DDP": _torchrun}
