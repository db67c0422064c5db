"""``hpctrain doctor``: can this node, this job, train?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import AsJson


def doctor(
    folder: Annotated[Path, typer.Option(help="The folder that runs would write to.")] = Path("runs"),
    speed: Annotated[bool, typer.Option("--speed", help="Measure nodes, links and disks too, in a minute.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what was detected and where each value came from, and warn of what would hurt. All ranks may call it."""
    from hpctrain.cluster.doctor import diagnose, show
    from hpctrain.cluster.speed import measured
    from hpctrain.cluster.world import World

    with World.join() as world:
        report = diagnose(world, folder)
        speeds = measured(world, folder) if speed else None
        if not world.leads:
            return
        if as_json:
            print(json.dumps(report.to_json() | ({"speed": speeds.to_json()} if speeds else {}), indent=2))
        else:
            print(show(report), *(["", speeds.show()] if speeds else []), sep="\n")
