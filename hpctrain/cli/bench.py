"""``hpctrain bench``: what training does, timed with the code that trains. Start it as a run is started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.cli.options import AsJson, ConfigPath, Overrides, Vocabulary, three_times
from hpctrain.errors import UsageError

app = typer.Typer(no_args_is_help=True)

PEERS = "zero-0 to zero-3 (ours), ddp, ddp-mpi4py, fsdp2, fsdp2-mpi4py, deepspeed-1 to deepspeed-3"
Launcher = Annotated[str, typer.Option(help="The command that starts ranks, {ranks} of them.")]
MPIRUN = "mpirun -n {ranks} --oversubscribe --bind-to none"


@app.command("step")
def step(
    config: ConfigPath,
    against: Annotated[str, typer.Option(help=f"What to time beside, with commas: {PEERS}.")] = "ddp",
    turns: Annotated[int, typer.Option(help="Timed steps of each; the median is shown.", min=1)] = 7,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Time one training step beside other frameworks and beside no communication at all."""
    from hpctrain.cluster.world import World
    from hpctrain.config import load

    # A peer's schedule of rates is not the matter here: equal work needs one rate.
    chosen = load(config, (*(set or ()), "optim.shape=constant", "optim.warmup=0"))
    with World.join(chosen.comm) as world:
        from hpctrain.bench.step import Scene, run

        rows = run(Scene.open(chosen, world), _names(against), turns)
        _print(rows, world, as_json, f"{world.size} ranks, median of {turns} steps")


@app.command("tensor")
def tensor(
    config: ConfigPath,
    turns: Annotated[int, typer.Option(help="Timed micro-batches of each; the median is shown.", min=1)] = 7,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Time the gradients of a micro-batch by ranks that share the model, beside torch's DTensor and one rank alone."""
    from hpctrain.cluster.world import World
    from hpctrain.config import load

    chosen = load(config, tuple(set or ()))
    with World.join(chosen.comm) as world:
        from hpctrain.bench.tensor import Scene, run

        _print(run(Scene.open(chosen, world), turns), world, as_json, f"{world.size} ranks, median of {turns} turns")


@app.command("pipeline")
def pipeline(
    config: Annotated[
        Path | None, typer.Argument(help="A run's configuration: its model computes. Without one, stages sleep.")
    ] = None,
    schedules: Annotated[
        str, typer.Option(help="Which, with commas.", show_default="where stages sleep, all; else some")
    ] = "",
    costs: Annotated[
        str, typer.Option(help="Milliseconds that F, I and W of a rank sleep.", metavar="F,I,W")
    ] = "20,20,20",
    microbatches: Annotated[int, typer.Option(help="Micro-batches of stages that sleep.", min=1)] = 8,
    turns: Annotated[int, typer.Option(help="Timed steps of each; the median is shown.", min=1)] = 7,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Time pipelines of all ranks, schedule by schedule, beside the simulator and torch's pipelining."""
    from hpctrain.cluster.world import World
    from hpctrain.config import Config, load

    forward, input, weight = (milliseconds / 1000 for milliseconds in three_times(costs))
    chosen = load(config, tuple(set or ())) if config else Config()
    with World.join(chosen.comm) as world:
        from hpctrain.bench.pipeline import Scene, run

        scene = Scene.open(chosen, world) if config else Scene.sleeping((forward, input, weight), microbatches, world)
        rows = run(scene, turns, _names(schedules))
        count = len(scene.tokens)
        _print(rows, world, as_json, f"{world.size} ranks, {count} micro-batches, median of {turns} turns")


@app.command("comm")
def comm(
    against: Annotated[str, typer.Option(help="What to time beside: gloo, or messages (no shared memory).")] = "gloo",
    rounds: Annotated[int, typer.Option(help="Rounds of each call; the median is shown.", min=1)] = 7,
    as_json: AsJson = False,
) -> None:
    """Time collectives of several sizes, from ordinary tensors and from shared memory."""
    from hpctrain.cluster.world import World

    with World.join() as world:
        from hpctrain.bench.comm import run

        rows = run(against, world, rounds=rounds)
        _print(rows, world, as_json, f"{world.size} ranks, median of {rounds} rounds")


@app.command("ckpt")
def ckpt(
    folder: Annotated[Path, typer.Argument(help="A folder on the disk to be measured.")] = Path("runs"),
    gib: Annotated[float, typer.Option(help="Size of the state in GiB.", min=0.001)] = 1.0,
    rounds: Annotated[int, typer.Option(help="Saves and loads of each writer; the median is shown.", min=1)] = 3,
    against: Annotated[str, typer.Option(help="What to time beside, with commas: dcp, dcp-4, dcp-async.")] = "",
    cut: Annotated[str, typer.Option(help="How tensors lie on ranks: flat, rows or columns.")] = "flat",
    small: Annotated[int, typer.Option(help="Small tensors, beside 16 large ones.", min=0)] = 200,
    onto: Annotated[str, typer.Option(help="Ranks that save and ranks that load, with commas.", metavar="A:B")] = "",
    writers: Annotated[str, typer.Option(help="Our own, with commas.")] = "direct,mpio,background",
    fio: Annotated[bool, typer.Option(help="Whether to ask fio, which takes some two minutes for 1 GiB.")] = True,
    as_json: AsJson = False,
) -> None:
    """Time saves and loads of a checkpoint by each writer, beside fio on the same disk where it is installed."""
    from hpctrain.cluster.world import World

    with World.join() as world:
        from hpctrain.bench.ckpt import Plan, run

        plan = Plan(gib, rounds, _names(against), cut, small, _pairs(onto), _names(writers), fio)
        title = f"{world.size} ranks, {gib} GiB, {small} small tensors, cut {cut}, median of {rounds}"
        _print(run(folder, world, plan), world, as_json, title)


@app.command("scale")
def scale(
    config: ConfigPath,
    ranks: Annotated[int, typer.Option(help="Ranks that the run would have.", min=1)] = 16384,
    rank: Annotated[
        list[int] | None, typer.Option(help="Play this rank too, beside the leading one. Repeatable.", min=0)
    ] = None,
    vocabulary: Vocabulary = None,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Measure what a checkpoint costs beside its data, in one process that plays a rank of any number of them.

    Seconds, and the most resident memory of the process, torch included. Needs no launcher and no machine.
    """
    from hpctrain.bench.scale import run
    from hpctrain.cli.plan import tokens
    from hpctrain.config import load

    chosen = load(config, tuple(set or ()))
    rows = run(chosen, ranks, vocabulary or tokens(chosen), tuple(rank or ()))
    _show(rows, as_json, f"{ranks} ranks, one process that plays them")


@app.command("place")
def place(
    config: ConfigPath,
    machine: Annotated[str, typer.Option(help="A machine whose file tells of groups of nodes.")] = "frontier",
    ranks: Annotated[int, typer.Option(help="Ranks of the large job of which one is played.", min=1)] = 131072,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Count the bytes that cross nodes and switches, as ranks are numbered and as they are placed, and time placing.

    A pure calculation, of the model that CONFIG tells; needs no launcher and no machine.
    """
    from hpctrain.bench.place import run, scale
    from hpctrain.config import load

    chosen = load(config, tuple(set or ()))
    rows, parts = run(chosen, machine), scale(chosen, machine, ranks)
    if as_json:
        print(json.dumps({"orders": [asdict(row) for row in rows], "parts": [asdict(one) for one in parts]}, indent=2))
        return
    _show(rows, False, "GiB a step, all ranks together")
    _show(parts, False, "one rank of a large job, in a process of its own")


@app.command("start")
def start(
    config: ConfigPath,
    ranks: Annotated[int, typer.Option(help="Ranks to start.", min=1)] = 4,
    launcher: Launcher = MPIRUN,
    turns: Annotated[int, typer.Option(help="Starts of each side.", min=1)] = 5,
    as_json: AsJson = False,
) -> None:
    """Time from the launcher to the end of the first step, beside torchrun with DDP. Start it without a launcher."""
    from hpctrain.bench.start import run

    _show(run(config, ranks, launcher, turns), as_json, f"{ranks} ranks, {turns} starts of each")


@app.command("phases")
def phases(
    config: ConfigPath,
    ranks: Annotated[str, typer.Option(help="Numbers of ranks to start, with commas.")] = "2,4,8",
    launcher: Launcher = MPIRUN,
    turns: Annotated[int, typer.Option(help="Starts of each number.", min=1)] = 3,
    as_json: AsJson = False,
) -> None:
    """Time each phase of a start, for several numbers of ranks. Start it without a launcher."""
    from hpctrain.bench.phases import run

    _show(run(config, _numbers(ranks), launcher, turns), as_json, f"seconds, median of {turns} starts")


@app.command("memory")
def memory(
    config: ConfigPath,
    ranks: Annotated[int, typer.Option(help="Ranks to start.", min=1)] = 4,
    against: Annotated[str, typer.Option(help=f"What to measure beside, with commas: {PEERS}.")] = "ddp",
    launcher: Launcher = MPIRUN,
    turns: Annotated[int, typer.Option(help="Timed steps of each, after the watched ones.", min=1)] = 5,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Measure what training takes of memory, in MiB, beside other frameworks. Start it without a launcher."""
    from hpctrain.bench.memory import run

    names = ("hpctrain", *_names(against))
    rows, failed = run(config, ranks, launcher, names, turns, set or ())
    if rows:
        _show(rows, as_json, f"{ranks} ranks, MiB, {turns} timed steps")
    if failed:
        raise failed[0]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _numbers(text: str) -> tuple[int, ...]:
    """``2,4,8`` as numbers, each at least 1."""
    if not all(name.isdigit() and int(name) for name in _names(text)) or not _names(text):
        raise UsageError(f"--ranks {text}: not numbers of ranks", "each is 1 or more, as in 2,4,8")
    return tuple(map(int, _names(text)))


def _pairs(text: str) -> tuple[tuple[int, int], ...]:
    """``4:3,2:4`` as pairs of numbers."""
    try:
        return tuple((int(few), int(many)) for few, many in (pair.split(":") for pair in _names(text)))
    except ValueError:
        raise UsageError(f"--onto {text}: not pairs of ranks", "each is two numbers, as in 4:3,2:4") from None


def _print(rows: Sequence[Any], world: Any, as_json: bool, title: str) -> None:
    """Show rows once for all ranks."""
    if world.leads:
        _show(rows, as_json, title)


def _show(rows: Sequence[Any], as_json: bool, title: str) -> None:
    """Rows of one dataclass as a table or as JSON."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*(name.replace("_", " ") for name in asdict(rows[0])), title=title)
    for row in rows:
        table.add_row(*map(_cell, asdict(row).values()))
    console = Console()
    console = console if console.is_terminal else Console(width=200)  # a file has no edge to fold a row at
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)
