"""Where the time of a start goes, phase by phase, for several numbers of ranks. Run it by itself: it starts the ranks.

Wall seconds are those of the slowest rank. Processor seconds are a rank's mean: where more ranks than cores start on
one machine, a phase whose processor time does not grow takes longer only because ranks wait for a core.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from hpctrain.bench.play import PHASES
from hpctrain.bench.start import finish
from hpctrain.comm.group import SoloGroup
from hpctrain.config import load
from hpctrain.data.prepare import ready


@dataclass(frozen=True)
class Row:
    """Seconds of each phase, as medians over the starts."""

    ranks: int
    of: str
    """``wall``, or ``processor``: the mean of the ranks."""
    launcher: float
    """From the launcher's start to the process."""
    python: float
    """The interpreter and the command line."""
    mpi: float
    """MPI_Init, and the ranks tell each other where they are."""
    torch: float
    """Importing torch and the rest."""
    groups: float
    """Device, mesh, communicators."""
    data: float
    """Opening token files."""
    model: float
    """The plan, and this rank's part of the model and of the optimizer."""
    step: float
    """The first step."""


def run(config: Path, counts: Sequence[int], launcher: str, turns: int) -> list[Row]:
    """Start each number of ranks ``turns`` times. ``launcher`` is the command, with ``{ranks}`` in it."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="hpctrain-phases-") as folder:
        prefix = ready(load(config).data, Path(folder), SoloGroup())[0].path
        for ranks in counts:
            told = [_start(config, prefix, ranks, launcher) for _ in range(turns)]
            for of in ("wall", "processor"):
                rows.append(Row(ranks, of, *(median(one[of][phase] for one in told) for phase in PHASES)))
    return rows


def _start(config: Path, prefix: str, ranks: int, launcher: str) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(prefix="hpctrain-phases-") as folder:
        program = [sys.executable, "-m", "hpctrain.bench.play", str(config), prefix, folder, str(time.time())]
        return json.loads(finish([*shlex.split(launcher.format(ranks=ranks)), *program]).splitlines()[-1])
