"""``hpctrain train``: what mpirun, srun or python starts."""

from __future__ import annotations

import typer

from hpctrain.cli.options import ConfigPath, Overrides


def train(config: ConfigPath, set: Overrides = None) -> None:  # noqa: A002 - the option's name
    """Train, from the newest checkpoint of the run or from nothing.

    Exit status: 0 when all steps are done, 75 when stopped in good order and to be started again.
    """
    from hpctrain.cluster.world import World
    from hpctrain.config import load

    chosen = load(config, tuple(set or ()))
    with World.join(chosen.comm) as world:
        from hpctrain.train import train as run  # after MPI has started: some MPI libraries fail when torch came first

        status = run(chosen, world)
    raise typer.Exit(status)
