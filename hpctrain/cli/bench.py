"""``hpctrain bench``: what training does, timed with the code that trains. Start it as a run is started."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from hpctrain.cli.options import AsJson, ConfigPath, Overrides

app = typer.Typer(no_args_is_help=True)


@app.command("step")
def step(
    config: ConfigPath,
    against: Annotated[str, typer.Option(help="Peers to time beside, with commas: ddp, ddp-mpi4py.")] = "ddp",
    turns: Annotated[int, typer.Option(help="Timed steps of each; the median is shown.", min=1)] = 7,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Time one training step beside torch's DDP and beside no communication at all."""
    from hpctrain.cluster.world import World
    from hpctrain.config import load

    # A peer's schedule of rates is not the matter here: equal work needs one rate.
    chosen = load(config, (*(set or ()), "optim.shape=constant", "optim.warmup=0"))
    with World.join(chosen.comm) as world:
        from hpctrain.bench.step import Scene, run

        peers = tuple(name for name in against.split(",") if name)
        rows = run(Scene.open(chosen, world), peers, turns)
        _print(rows, world, as_json, f"{world.size} ranks, median of {turns} steps")


def _print(rows: list[Any], world: Any, as_json: bool, title: str) -> None:
    """Show rows of one dataclass as a table or as JSON, once for all ranks."""
    if not world.leads:
        return
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*(name.replace("_", " ") for name in asdict(rows[0])), title=title)
    for row in rows:
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in asdict(row).values()))
    Console().print(table)
