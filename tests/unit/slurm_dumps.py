"""Environments that a real Slurm (22.05.8, four nodes of 16 processors) gave to the processes of its jobs.

Each file of ``slurm_env/`` is one scenario: variables that all its processes share, then those of each process:
``batch`` is the batch script, ``alloc`` the shell under salloc, ``taskNN`` the task of rank NN.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent / "slurm_env"
SCENARIOS = sorted(path.stem for path in FOLDER.glob("*.txt"))


def dump(scenario: str) -> dict[str, dict[str, str]]:
    """Every process of a scenario with its environment."""
    parts: dict[str, dict[str, str]] = {}
    for line in (FOLDER / f"{scenario}.txt").read_text().splitlines():
        if line.startswith("["):
            current = parts.setdefault(line.strip("[]"), {})
        else:
            name, _, value = line.partition("=")
            current[name] = value
    common = parts.pop("all")
    return {process: common | own for process, own in parts.items()}


def tasks(scenario: str) -> list[tuple[int, dict[str, str]]]:
    """Rank and environment of every task; a het job's groups count their ranks apart."""
    return [(int(name[-2:]), own) for name, own in dump(scenario).items() if "task" in name]


def shells(scenario: str) -> list[dict[str, str]]:
    """The environments of a scenario's shells."""
    return [own for name, own in dump(scenario).items() if "task" not in name]
