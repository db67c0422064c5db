"""``hpctrain submit``: from a configuration to a job in the queue, by a batch script that stays."""

from __future__ import annotations

import json
import sys
import time as clock
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.options import AsJson, ConfigPath, Overrides, Vocabulary
from hpctrain.errors import UsageError

if TYPE_CHECKING:
    from hpctrain.cluster.queue import Expected
    from hpctrain.cluster.request import Element, Request
    from hpctrain.cluster.submission import Submission
    from hpctrain.config import Config

Machine = Annotated[str | None, typer.Option(help="A machine's name, or a machine file; sets job.machine.")]
Nodes = Annotated[int | None, typer.Option(help="Nodes that train; sets job.nodes.")]
Spares = Annotated[int | None, typer.Option(help="Nodes beyond those, in case some are slow or broken; job.spares.")]
Time = Annotated[str | None, typer.Option(help="Time limit, such as 12:00:00; sets job.time.")]
Account = Annotated[str | None, typer.Option(help="Who pays; sets job.account.")]
Partition = Annotated[str | None, typer.Option(help="Partition or queue; sets job.partition.")]
Qos = Annotated[str | None, typer.Option(help="Quality of service; sets job.qos.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the script; write nothing and ask nobody.")]
TestOnly = Annotated[bool, typer.Option("--test-only", help="Ask Slurm when it would start; hand nothing in.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before the job is handed in.")]
Chain = Annotated[int, typer.Option(help="So many jobs, each going on where the one before ended.", min=1)]
Array = Annotated[
    list[str] | None,
    typer.Option(help="A run for each value, as one array of jobs. Repeatable: several multiply.", metavar="KEY=V1,V2"),
]


def submit(
    config: ConfigPath,
    machine: Machine = None,
    nodes: Nodes = None,
    spares: Spares = None,
    time: Time = None,
    account: Account = None,
    partition: Partition = None,
    qos: Qos = None,
    chain: Chain = 1,
    array: Array = None,
    vocabulary: Vocabulary = None,
    set: Overrides = None,  # noqa: A002 - the option's name
    dry_run: DryRun = False,
    test_only: TestOnly = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Write the batch script of a run, show it, and hand it to Slurm.

    It is written to the run's folder, with the configuration that the job will read, and can be handed in again.
    """
    job = {"machine": machine, "nodes": nodes, "spares": spares, "time": time, "account": account}
    job |= {"partition": partition, "qos": qos, "requeue": False if chain > 1 else None}
    own = tuple(f"job.{key}={json.dumps(value)}" for key, value in job.items() if value is not None)
    submission = _prepared(config, (*(set or ()), *own), tuple(array or ()), chain, vocabulary)
    found: dict[str, Any] = {"script": submission.request.place.script, "config": submission.request.place.config}
    if not as_json:
        _show(submission)
    if dry_run:
        _end(found | {"text": submission.script}, as_json, "nothing was written, and nobody was asked")
    elif submission.request.system != "slurm":
        _by_hand(submission, found, as_json)
    else:
        _slurm(submission, found, chain, test_only, yes, as_json)


def _prepared(
    path: Path, overrides: tuple[str, ...], arrays: tuple[str, ...], chain: int, vocabulary: int | None
) -> Submission:
    """Everything decided and checked that can be without Slurm."""
    from hpctrain.cluster.request import request
    from hpctrain.cluster.submission import place, prepare
    from hpctrain.cluster.sweep import elements
    from hpctrain.cluster.variables import words
    from hpctrain.config import load
    from hpctrain.plan.machines import describe

    chosen = load(path, overrides)
    runs = elements(arrays, chosen.run)
    there = describe(chosen.job.machine) if chosen.job.machine else None
    system = there.machine.batch.system if there else "slurm"
    where = place(Path.cwd(), chosen.run.folder, system, str(path), _programs())
    asked = request(chosen, there and there.machine, where, words(there.values) if there else {})
    for run in runs or (None,):
        _check(load(path, (*overrides, *(run.settings if run else ()))), asked, vocabulary)
    return prepare(_several(asked, chosen, runs, chain), chosen)


def _several(asked: Request, chosen: Config, runs: tuple[Element, ...], chain: int) -> Request:
    """The request for an array, or for a job of a chain."""
    from dataclasses import replace

    if runs and chain > 1:
        mend = "hand in the array alone: each of its jobs is put back into the queue until its run is done"
        raise UsageError("--chain and --array", "a job of a chain waits for one job, and an array is several", mend)
    if chain == 1:
        return replace(asked, elements=runs)
    last = f"{asked.place.run}/checkpoints/step-{chosen.train.steps:08d}.h5"
    return replace(asked, finished=last)


def _programs() -> str | None:
    """The folder of this Python, where hpctrain is in it."""
    folder = Path(sys.executable).parent
    return str(folder) if (folder / "hpctrain").exists() else None


def _check(chosen: Config, asked: Request, vocabulary: int | None) -> None:
    """Refuse what the ranks would refuse when they have waited in the queue."""
    from hpctrain.cli.plan import tokens
    from hpctrain.plan.fit import fit
    from hpctrain.plan.machines import named
    from hpctrain.plan.plan import decide
    from hpctrain.plan.topology import Topology

    _check_data(chosen)
    hosts = tuple(f"node{node}" for node in range(asked.nodes) for _ in range(asked.tasks_per_node))
    plan = fit(decide(chosen, Topology(hosts), vocabulary or tokens(chosen)), chosen, named(chosen.job.machine))
    for reason in plan.reasons:
        if "does not fit" in reason:
            _say(f"hpctrain: warning: {reason}")


def _check_data(chosen: Config) -> None:
    from hpctrain.data.text import expand
    from hpctrain.errors import ConfigError

    if not chosen.data.sources and not chosen.data.text:
        raise ConfigError("data.sources and data.text are empty", "there is nothing to train on", "name one of them")
    files = [f"{source.path.removesuffix('.bin').removesuffix('.idx')}.bin" for source in chosen.data.sources]
    key, paths = ("data.sources", files) if files else ("data.text", [expand(text) for text in chosen.data.text])
    for path in paths:
        if not Path(path).exists():
            why = "the job would start to find nothing to train on"
            mend = "hpctrain data prepare makes token files" if files else "name a file or folder of this machine"
            raise ConfigError(f"{key}: {path} is not there", why, mend)


# ---- what is done


def _slurm(submission: Submission, found: dict, chain: int, test_only: bool, yes: bool, as_json: bool) -> None:
    from hpctrain.cluster.queue import find_queue
    from hpctrain.cluster.submission import hand_in, write

    queue = find_queue()
    expected = queue.expect(submission.script, submission.folder)
    found |= {"starts_at": expected.starts_at, "nodes": list(expected.nodes)}
    _say(_forecast(expected))
    if test_only:
        return _end(found, as_json, "nothing was written or handed in")
    if not yes and sys.stdin.isatty() and not typer.confirm("hand it in?", default=True, err=True):
        return _end(found, as_json, "nothing was written or handed in")
    write(submission)
    ids = []
    for id in hand_in(submission, queue, chain):
        ids.append(id)
        _say(f"job {id}{' after the one before' * (len(ids) > 1)}: {submission.output.replace('%j', id)}")
    _end(found | {"ids": ids, "output": submission.output}, as_json, _next(submission))


def _by_hand(submission: Submission, found: dict, as_json: bool) -> None:
    """PBS and Flux: the files are written, and the command is told."""
    from hpctrain.cluster.script import HAND_IN
    from hpctrain.cluster.submission import write

    write(submission)
    command = f"{HAND_IN[submission.request.system]} {submission.request.place.script}"
    _end(found | {"hand_in": command}, as_json, f"written; hand it in with\n  {command}")


def _show(submission: Submission) -> None:
    """The script, in colours on a terminal."""
    if not sys.stdout.isatty():
        print(submission.script)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(submission.script, "bash", theme="ansi_dark", background_color="default", word_wrap=True))


def _forecast(expected: Expected) -> str:
    if expected.starts_at is None:
        return f"Slurm takes it: {expected.said}"
    when = clock.strftime("%a %d %b %H:%M", clock.localtime(expected.starts_at))
    return f"Slurm takes it; as things stand it starts {when} on {', '.join(expected.nodes[:8])}" + (
        f" and {len(expected.nodes) - 8} more" if len(expected.nodes) > 8 else ""
    )


def _next(submission: Submission) -> str:
    """What to type next; of an array, for its first run."""
    request = submission.request
    run = request.elements[0].run if request.elements else request.place.run
    return f"next: hpctrain status {run}\n      hpctrain logs {run} --follow\n      hpctrain cancel {run}"


def _end(found: dict[str, Any], as_json: bool, words: str) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _say(words)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)
