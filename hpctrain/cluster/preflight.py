"""The check before a start: which nodes of the job are to train. Called once in the job's own shell, not in a step.

It starts two steps itself: one of a task on each node, without MPI, in which each node checks itself; then one with
MPI over those that passed, in which they exchange. Neither may hang the start: each has a limit, and once half of the
nodes have answered, the others get three times as long as those took. What is decided from the answers is in ``judge``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpctrain.cluster import judge, slurm
from hpctrain.cluster.checks import CHECKS, Asked
from hpctrain.cluster.hear import Heard, Line, hear
from hpctrain.cluster.judge import Answer, Choice, Finding, Limits
from hpctrain.cluster.launcher import launch
from hpctrain.cluster.links import Pair
from hpctrain.config import Config
from hpctrain.errors import HpctrainError, LaunchError, NodesError
from hpctrain.plan.formats import Format

RECORD = "preflight.jsonl"
ATTEMPTS = 3
OWN_END_SECONDS = 10.0  # a task ends by itself so long after nobody listens any more
# What a batch job's shell has of options for its tasks; srun would take them for these steps too.
OPTIONS_OF_JOB = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK", "SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND",
    "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_DISTRIBUTION", "SLURM_HOSTFILE",
)  # fmt: skip


# How srun speaks of a node that it cannot reach or has lost, and of a task that ended by itself.
REACHED_NOT = ("failed on node", "Node failure on")
FAILED = ("Exited with exit code",)


@dataclass(frozen=True)
class Start:
    """How the steps are started."""

    in_slurm: bool
    mpi: str | None = None
    """Value of ``srun --mpi`` for the ranks; Slurm's own default when None."""
    launcher: str = "srun"
    """What starts the ranks, ``srun`` or ``mpirun``."""
    within: tuple[str, ...] = ()
    """What each task runs in, such as ``apptainer exec image.sif``."""

    def alone(self, names: Sequence[str], *program: str) -> list[str]:
        """The command that runs a program once on each node, without MPI; on this machine where Slurm is not."""
        if not self.in_slurm:
            return self._python(*program)
        return ["srun", "--mpi=none", "--kill-on-bad-exit=0", *_layout(names, 1), *self._python(*program)]

    def together(self, names: Sequence[str], each: int, *program: str) -> list[str]:
        """The command that runs a program as so many ranks of MPI on each node."""
        if self.launcher == "mpirun":
            hosts = ",".join(f"{name}:{each}" for name in names)
            return ["mpirun", "-n", str(each * len(names)), "--host", hosts, *self._python(*program)]
        mpi = [f"--mpi={self.mpi}"] if self.mpi else []
        return ["srun", *mpi, "--kill-on-bad-exit=1", *_layout(names, each), *self._python(*program)]

    def environment(self, launcher: str) -> dict[str, str]:
        """What a step gets of this process's variables; mpirun needs those that mislead srun."""
        hidden = OPTIONS_OF_JOB if launcher == "srun" else ()
        return {name: value for name, value in os.environ.items() if name not in hidden}

    def _python(self, *program: str) -> list[str]:
        return [*self.within, "python3" if self.within else sys.executable, "-m", *program]


@dataclass(frozen=True)
class Outcome:
    """What was found and what was chosen; ``choice`` is None where too few nodes can train, for the reason told."""

    names: tuple[str, ...]
    wanted: int
    answers: tuple[Answer, ...]
    pairs: tuple[Pair, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    choice: Choice | None
    error: NodesError | None
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The outcome as plain lists and dicts: a line of ``preflight.jsonl``."""
        bad: dict[str, list[str]] = {}
        for one in self.findings:
            bad.setdefault(one.node, []).append(one.says)
        return {
            "time": time.time(), "job": os.environ.get("SLURM_JOB_ID"), "seconds": round(self.seconds, 1),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT", 0)), "wanted": self.wanted,
            "nodes": self.names, "chosen": self.choice.nodes if self.choice else None,
            "findings": bad, "notes": self.notes, "figures": {a.node: a.found for a in self.answers},
            "links": [[p.round, p.one, p.other, p.bytes_per_second] for p in self.pairs],
        }  # fmt: skip

    def show(self) -> str:
        """A table of the figures, then a sentence for each finding, then what was chosen."""
        chosen = self.choice.nodes if self.choice else ()
        said = [*(self.choice.sentences if self.choice else ()), *self.notes]
        words = {name: "trains" if name in chosen else "spare" if chosen else "good" for name in self.names}
        words |= {one.node: "slow" for one in self.findings if one.node not in chosen}
        words |= {one.node: "broken" for one in self.findings if one.broken}
        table = judge.table(self.answers, self.pairs, self.findings, words)
        return "\n".join([table, *said, *([self._summary(chosen)] if chosen else [])])

    def _summary(self, chosen: Sequence[str]) -> str:
        spare = f"; spare: {', '.join(left)}" if (left := self._spare(chosen)) else ""
        listed = ", ".join(chosen) if len(chosen) <= 8 else f"{chosen[0]} to {chosen[-1]}"
        checked = f"checked {judge.number(len(self.names), 'node')} in {self.seconds:.0f} s"
        return f"{checked}; {len(chosen)} train: {listed}{spare}"

    def _spare(self, chosen: Sequence[str]) -> list[str]:
        bad = {one.node for one in self.findings}
        return [name for name in self.names if name not in chosen and name not in bad]


def preflight(config: Config, wanted: int | None, limit: float, start: Start) -> Outcome:
    """Check the nodes of the job and choose ``wanted`` of them (``job.nodes`` when None; this machine without Slurm).

    Raises LaunchError in a step of the job: it starts steps itself.
    """
    _not_in_a_step()
    began = time.monotonic()
    names, gone = members(os.environ)
    wanted = wanted or (config.job.nodes if start.in_slurm else 1)
    with _folder_for_all(config.run.folder) as shared:
        asked = Asked(shared, config.checkpoint.near, Format.of(config.precision).compute, limit + OWN_END_SECONDS)
        heard = {answer.node: answer for answer in ask([n for n in names if n not in gone], asked, limit, start)}
    lost = Answer("", errors={"here": "was taken out of the job by Slurm"})
    answers = [heard.get(name) or replace(lost, node=name) for name in names]
    bad = {one.node for one in (*judge.failed(answers), *judge.others_differ(answers))}
    linked = exchange([answer for answer in answers if answer.node not in bad], limit, start)
    answers = [linked.answers.get(answer.node, answer) for answer in answers]
    limits = Limits(config.job.slow_compute, config.job.slow_links, config.job.slow_disks)
    found = judge.findings(answers, linked.pairs, limits)
    notes = (*linked.notes, *judge.blamed(linked.pairs, limits.links)[1])
    choice, error = _chosen(names, found, wanted)
    taken = time.monotonic() - began
    return Outcome(names, wanted, tuple(answers), linked.pairs, tuple(found), notes, choice, error, taken)


def members(environ: Mapping[str, str]) -> tuple[tuple[str, ...], frozenset[str]]:
    """The nodes that the job began with, in Slurm's order, and those that Slurm has taken away from it since."""
    job = slurm.job(environ)
    if job is None:
        return (socket.gethostname(),), frozenset()
    began = slurm.expand_nodes(job.nodes)
    return began, frozenset(began) - set(slurm.nodes_now(job.id) or began)


def ask(names: Sequence[str], asked: Asked, limit: float, start: Start) -> list[Answer]:
    """What each node found of itself, in the order of ``names``.

    Where one node cannot be reached, srun ends the tasks of all, some before they could say a word: then all that are
    not known to be the reason are asked again.
    """
    lines: dict[str, list[Line]] = {name: [] for name in names}
    left, said = list(names), ""
    for _ in range(ATTEMPTS):
        command = start.alone(left, "hpctrain.cluster.checks", asked.to_text())
        heard = hear(command, start.environment("srun"), _all_done(len(left)), limit)
        said += heard.errors
        for name in left:
            lines[name] = [line for line in heard.lines if line["node"] == name]
        reasons = {name for name in left if not lines[name] and _about(name, heard.errors, REACHED_NOT + FAILED)}
        left = [name for name in left if not _ended(lines[name]) and name not in reasons]
        if heard.late or not left:
            break
    return [answer_of(name, lines[name], said) for name in names]


def answer_of(name: str, lines: Sequence[Line], said: str) -> Answer:
    """A node's answer from its lines; ``said`` is the error stream of all, which may tell why it has none."""
    found = {line["check"]: {k: v for k, v in line.items() if k not in ("node", "check")} for line in lines}
    errors = {check: value["error"] for check, value in found.items() if "error" in value}
    if not _ended(lines):
        missing = next((check for check in CHECKS if check not in found), "shared")
        reason = _about(name, said)
        why = f"did not answer{f' ({reason[0]})' if reason else ''}"
        errors["here"] = f"stopped answering while {judge.DOING[missing]}" if found else why
    return Answer(name, {check: value for check, value in found.items() if "error" not in value}, errors)


@dataclass(frozen=True)
class Linked:
    """What the step with MPI gave: answers that changed, pairs, and what is to be said."""

    answers: dict[str, Answer]
    pairs: tuple[Pair, ...] = ()
    notes: tuple[str, ...] = ()


def exchange(answers: Sequence[Answer], limit: float, start: Start) -> Linked:
    """Measure the links between nodes that passed, with a rank for each device; nothing where there is one node."""
    if len(answers) < 2:
        return Linked({})
    each = max(1, min(answer.found.get("devices", {}).get("count", 1) for answer in answers))
    names = [answer.node for answer in answers]
    command = start.together(names, each, "hpctrain.cluster.links", str(limit))
    return linked(answers, hear(command, start.environment(start.launcher), _told, limit + 5))


def linked(answers: Sequence[Answer], heard: Heard) -> Linked:
    """What the lines of the step with MPI mean."""
    if _ended(heard.lines):
        ahead = {line["of"]: line["ahead_seconds"] for line in heard.lines if line["check"] == "clock"}
        pairs = [line for line in heard.lines if line["check"] == "link"]
        timed = {a.node: replace(a, clock_ahead_seconds=ahead.get(a.node, 0.0)) for a in answers}
        return Linked(timed, tuple(Pair(p["round"], p["one"], p["other"], p["bytes_per_second"]) for p in pairs))
    gone, pairs = _stuck([line for line in heard.lines if line["check"] == "hangs" and line["partner"]])
    came = {line["node"] for line in heard.lines}
    for answer in answers:
        if answer.node not in came and (said := _about(answer.node, heard.errors, REACHED_NOT)):
            gone[answer.node] = f"did not come to meet the others through MPI ({said[0]})"
    if heard.late and came:  # a step that ends early ends ranks that were still on their way
        gone |= {a.node: "did not come to meet the others through MPI" for a in answers if a.node not in came}
    changed = {a.node: replace(a, errors={"here": gone[a.node]}) for a in answers if a.node in gone}
    return Linked(changed, pairs, (f"the links between nodes were not measured: {_reason(heard)}",))


def _reason(heard: Heard) -> str:
    """Why the step with MPI failed: what a rank told, or the first line with words that is not srun's own."""
    told = [line["error"] for line in heard.lines if line["check"] == "mpi"]
    said = [line for line in heard.errors.splitlines() if any(letter.isalpha() for letter in line)]
    own = [line for line in said if not line.startswith("srun: ")]
    return (told or own or said or ["the ranks did not end in time"])[0]


def _stuck(hung: Sequence[Line]) -> tuple[dict[str, str], tuple[Pair, ...]]:
    """Of nodes that hang with each other: those that went away, and the pairs that both wait."""
    first = [line for line in hung if line["round"] == min(other["round"] for other in hung)]
    waits = {line["node"]: line["partner"] for line in first}
    gone = {b: f"stopped answering while exchanging with {a}" for a, b in waits.items() if b not in waits}
    both = {(first[0]["round"], *sorted((a, b))) for a, b in waits.items() if waits.get(b) == a}
    return gone, tuple(Pair(number, one, other, 0.0) for number, one, other in sorted(both))


def write(path: Path, names: Sequence[str]) -> None:
    """The names, a line each, as srun --nodelist reads them; the file is whole or not there."""
    path = Path(path)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
        file.write("".join(f"{name}\n" for name in names))
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o644)
    os.replace(file.name, path)


def record(folder: Path, outcome: dict[str, Any]) -> None:
    """Add a line to the run's history of checks."""
    with (folder / RECORD).open("a") as file:
        file.write(json.dumps(outcome) + "\n")


def _chosen(names: Sequence[str], found: Sequence[Finding], wanted: int) -> tuple[Choice | None, NodesError | None]:
    try:
        return judge.choose(names, found, wanted), None
    except NodesError as error:
        return None, error


def _not_in_a_step() -> None:
    found = launch(os.environ)
    if found.size is not None and (found.size > 1 or slurm.in_step(os.environ)):
        raise LaunchError(
            f"hpctrain preflight was started by {found.launcher} as {found.size} ranks",
            "it starts a task on each node itself",
            "call it once, in the batch script or in the shell of salloc, without a launcher before it",
        )


@contextmanager
def _folder_for_all(folder: Path) -> Iterator[str]:
    """A fresh folder in the run's, by which nodes see that they share it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix="preflight-", dir=folder.resolve())
    except OSError as error:
        why = "checkpoints and the log go there"
        raise HpctrainError(f"{folder}: {error.strerror}", why, "set run.dir to a folder that can be written") from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _layout(names: Sequence[str], each: int) -> list[str]:
    count = len(names)
    return [f"--nodes={count}", f"--ntasks={count * each}", f"--ntasks-per-node={each}", "--overlap", "--no-kill",
            f"--nodelist={','.join(names)}"]  # fmt: skip


def _all_done(count: int) -> Callable[[Sequence[Line]], float]:
    return lambda lines: sum(line["check"] == "done" for line in lines) / count


def _about(name: str, said: str, phrases: tuple[str, ...] = ("",)) -> list[str]:
    """The lines of an error stream that name a node, and have one of these phrases."""
    own = [line for line in said.splitlines() if name in line.replace(":", " ").split()]
    return [line for line in own if any(phrase in line for phrase in phrases)]


def _told(lines: Sequence[Line]) -> float:
    return float(_ended(lines))


def _ended(lines: Sequence[Line]) -> bool:
    return any(line["check"] == "done" for line in lines)
