"""``hpctrain train``: what mpirun, srun or python starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpctrain.cli.options import ConfigPath, Overrides

if TYPE_CHECKING:
    from hpctrain.cluster.stop import Stop
    from hpctrain.cluster.world import World
    from hpctrain.config import Config


def train(config: ConfigPath, set: Overrides = None) -> None:  # noqa: A002 - the option's name
    """Train, from the newest checkpoint of the run or from nothing.

    Exit status: 0 when all steps are done, 75 when stopped in good order and to be started again.
    """
    with _meeting(config, tuple(set or ())) as (chosen, world, stop):
        from hpctrain.train import train as run  # after MPI has started: some MPI libraries fail when torch came first

        status = run(chosen, world, stop)
    raise typer.Exit(status)


@contextmanager
def _meeting(path: Path, overrides: tuple[str, ...]) -> Iterator[tuple[Config, World, Stop]]:
    """Read the configuration and meet the other ranks, who refuse one that cannot be together.

    So it is told once when it is wrong for all, and by the rank that fails when it is wrong, or not there, for one.
    Signals are noted from before the meeting until the process ends, for both take their time.
    """
    from hpctrain.cluster.deadline import deadline
    from hpctrain.cluster.stop import Flag, listening
    from hpctrain.cluster.world import World
    from hpctrain.config import CommConfig, load
    from hpctrain.errors import ConfigError

    try:
        config = load(path, overrides)
        flag = Flag(config.run.stop_signals)
    except ConfigError as error:
        with World.join(CommConfig(check_master_addr=False)):
            raise error from None
    with World.join(config.comm) as world:
        with listening(config.run, world, flag, deadline(config.run, os.environ) if world.leads else None) as stop:
            yield config, world, stop
        flag.ignore()
