"""``hpctrain train``: what mpirun, srun or python starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpctrain.cli.options import ConfigPath, Overrides

if TYPE_CHECKING:
    from hpctrain.cluster.world import World
    from hpctrain.config import Config


def train(config: ConfigPath, set: Overrides = None) -> None:  # noqa: A002 - the option's name
    """Train, from the newest checkpoint of the run or from nothing.

    Exit status: 0 when all steps are done, 75 when stopped in good order and to be started again.
    """
    with _meeting(config, tuple(set or ())) as (chosen, world):
        from hpctrain.train import train as run  # after MPI has started: some MPI libraries fail when torch came first

        status = run(chosen, world)
        if status:  # srun ends the step when the first rank leaves with it, and what TERM ends has another status
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise typer.Exit(status)


@contextmanager
def _meeting(path: Path, overrides: tuple[str, ...]) -> Iterator[tuple[Config, World]]:
    """Read the configuration and meet the other ranks, who refuse one that cannot be together.

    So it is told once when it is wrong for all, and by the rank that fails when it is wrong, or not there, for one.
    """
    from hpctrain.cluster.world import World
    from hpctrain.config import CommConfig, load
    from hpctrain.errors import ConfigError

    try:
        config = load(path, overrides)
    except ConfigError as error:
        with World.join(CommConfig(check_master_addr=False)):
            raise error from None
    with World.join(config.comm) as world:
        yield config, world
