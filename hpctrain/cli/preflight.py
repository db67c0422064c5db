"""``hpctrain preflight``: which nodes of the job are to train."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import AsJson, ConfigPath, Overrides


def preflight(
    config: ConfigPath,
    nodes: Annotated[int | None, typer.Option(help="Nodes that are to train; job.nodes when not given.", min=1)] = None,
    out: Annotated[Path | None, typer.Option(help="Write their names here, a line each, for srun --nodelist.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds that each of the two steps may take.", min=1)] = 180.0,
    mpi: Annotated[str | None, typer.Option(help="Value of srun --mpi; job.mpi when not given.")] = None,
    within: Annotated[str, typer.Option(help="What each task runs in, e.g. 'apptainer exec image.sif'.")] = "",
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Check nodes, links and disks, and choose the nodes that are to train. Called once, in the job's own shell.

    Exit status: 0 when enough nodes can train, 1 when too few can.
    """
    from hpctrain.cluster.preflight import Start, record, write
    from hpctrain.cluster.preflight import preflight as check
    from hpctrain.config import load

    chosen = load(config, tuple(set or ()))
    in_slurm = "SLURM_JOB_ID" in os.environ
    launcher = "mpirun" if chosen.job.launcher == "mpirun" else "srun"
    start = Start(in_slurm, mpi or chosen.job.mpi, launcher, tuple(shlex.split(within)))
    if not in_slurm:
        print("no Slurm job: checking this machine alone", file=sys.stderr)
    outcome = check(chosen, nodes, limit, start)
    told = outcome.to_json()
    record(chosen.run.folder, told)
    print(json.dumps(told) if as_json else outcome.show())
    if outcome.error:
        raise outcome.error
    if out and outcome.choice:
        write(out, outcome.choice.nodes)
