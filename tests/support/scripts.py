"""Batch scripts to test with: requests for machines, their texts, and what bash makes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.request import Place, Request, request
from hpctrain.cluster.script import ENDINGS
from hpctrain.cluster.variables import words
from hpctrain.config import parse
from hpctrain.plan.machine import Batch, Device, Machine, Node
from hpctrain.plan.machines import describe

PLACE = Place(
    "/home/ada/project", "runs/tiny", "runs/tiny/job-1.toml", "runs/tiny/job-1.sbatch", "configs/tiny.toml",
    "/home/ada/project/.venv/bin",
)  # fmt: skip
# A made-up cluster with Flux.
REEF = Machine(
    name="Reef",
    nodes=16,
    node=Node(devices=4, cores=96, memory_gib=512),
    device=Device(name="MI300A", kind="rocm", memory_gib=128),
    batch=Batch(system="flux", launcher="flux run", account=False),
)
OWN = {"reef": REEF}


def asked(machine: str | None, *overrides: str, place: Place = PLACE, **environ: str) -> Request:
    """What a small run asks of a machine; None for none that is named."""
    config = parse({"run": {"name": "tiny"}}, overrides)
    found = None if machine is None or machine in OWN else describe(machine)
    facts = found.machine if found else OWN.get(machine)
    ending = ENDINGS.get(facts.batch.system if facts else "slurm", "sbatch")
    place = replace(place, script=f"runs/tiny/job-1.{ending}")
    return request(config, facts, place, words(found.values if found else ()), environ)


def launch_line(script: str) -> str:
    """The command that starts the ranks, as one line."""
    return re.search(r"# The ranks\.\n(?:\([^\n]*\n[^\n]*\n)?(.*?)(?: &)?\n(?:launcher=|status=)", script, re.DOTALL)[1]


def run_bash(text: str, *argv: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a script with nothing of this process's environment but the path."""
    env = {"PATH": "/usr/bin:/bin", **environ}
    return subprocess.run(["bash", "-c", text, "script", *argv], env=env, cwd=cwd, capture_output=True, text=True)


def shellcheck(script: str) -> str:
    """What shellcheck says of a script; the test is skipped where it is not installed."""
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck on PATH")
    return subprocess.run(["shellcheck", "-s", "bash", "-"], input=script, capture_output=True, text=True).stdout
