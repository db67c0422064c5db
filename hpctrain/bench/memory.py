"""How much memory each contestant of the step benchmark takes, alone in its own launch. Start it without a launcher.

``footprint.py`` is what runs in the launches. It looks at a process through the kernel's accounts of it, so that every
framework's buffers, and what its allocator keeps, count alike:

    resident  the most resident memory (VmHWM); memory that ranks of a node share counts fully for each of them
    shared    memory that n processes share counts an n-th for each (PSS), so that a sum over ranks counts it once;
              sampled, so a peak between two looks is missed, and ranks' peaks may be at different moments

Both begin at a baseline, when modules are loaded, groups are open and data is at hand, and no model is made yet.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.bench.deepspeed import check_installed
from hpctrain.bench.start import finish
from hpctrain.bench.step import contestant
from hpctrain.comm.group import SoloGroup
from hpctrain.config import load
from hpctrain.data.prepare import ready
from hpctrain.errors import UsageError

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One measure of one contestant. MiB of the rank that has most, where it does not say otherwise."""

    name: str
    measure: str
    tokens_per_second: float
    plan: int | None
    """What our plan says that a rank holds."""
    baseline: int
    building: int
    """The peak while the model and the optimizer were made."""
    training: int
    """The peak during steps."""
    cost: int
    """What training took beyond the baseline."""
    cost_of_all: int
    """The same, summed over ranks."""


def run(
    config: Path, ranks: int, launcher: str, against: Sequence[str], turns: int, settings: Sequence[str] = ()
) -> tuple[list[Row], list[UsageError]]:
    """Start every contestant once: the rows of those that trained, and the errors of those that did not.

    ``launcher`` is the command before the program, with ``{ranks}`` in it. Raises UsageError for unknown contestants,
    and ConfigError where a package is missing, before any is started.
    """
    for name in against:
        contestant(name)
        if name.startswith("deepspeed"):
            check_installed()
    with tempfile.TemporaryDirectory(prefix="hpctrain-memory-") as folder:
        chosen = load(config, settings)
        prefix = ready(chosen.data, Path(folder), SoloGroup())[0].path
        settings = (*settings, f"run.dir={folder}", f'data.sources=[{{path="{prefix}"}}]')
        rows, failed = [], []
        for name in against:
            told = Path(folder) / f"{name}.json"
            program = [sys.executable, "-m", "hpctrain.bench.footprint", name, str(turns), str(told), str(config)]
            try:
                finish([*shlex.split(launcher.format(ranks=ranks)), *program, *settings])
                rows += table(name, json.loads(told.read_text()))
            except UsageError as error:
                failed.append(error)
    return rows, failed


def table(name: str, found: dict[str, Any]) -> Iterator[Row]:
    """The rows of what a launch found."""
    for measure, ranks in found["bytes"].items():
        costs = [training - baseline for baseline, _, training in ranks]
        peaks = (round(max(column) / MIB) for column in zip(*ranks, strict=True))
        plan = found["plan"] and round(found["plan"] / MIB)
        cost, all_costs = round(max(costs) / MIB), round(sum(costs) / MIB)
        yield Row(name, measure, found["tokens_per_second"], plan, *peaks, cost, all_costs)
