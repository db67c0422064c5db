"""``hpctrain doctor``: can this node, this job, train?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import AsJson


def doctor(
    folder: Annotated[Path, typer.Option(help="The folder that runs would write to.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Say what was detected and where each value came from, and warn of what would hurt. All ranks may call it."""
    from hpctrain.cluster.doctor import diagnose, show
    from hpctrain.cluster.world import World

    with World.join() as world:
        report = diagnose(world, folder)
        if world.leads:
            print(json.dumps(report.to_json(), indent=2) if as_json else show(report))
