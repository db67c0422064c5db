"""Templates: the scripts of ``slurm/``, for any configuration, written by the code that writes those of ``submit``.

    python -m hpctrain.cluster.templates slurm

writes them anew; a test compares.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster.request import Image, Place, Request, request
from hpctrain.cluster.script import SCRIPTS
from hpctrain.cluster.variables import words
from hpctrain.config import parse
from hpctrain.plan.machines import describe

OPTIONS = "Options of sbatch win over these lines:  sbatch --nodes=8 --time=12:00:00 slurm/train.sbatch ..."
AGAIN = "Status 75: the run was stopped in good order before its last step. Hand it in again, and it goes on."
SUBMIT = "hpctrain submit CONFIG --machine NAME writes such a script for a machine, with its modules and variables."
GENERIC = Request(
    system="slurm",
    machine=None,
    place=Place("", "", "", "slurm/train.sbatch"),
    name="train",
    nodes=2,
    spares=0,
    tasks_per_node=4,
    cpus_per_task=4,
    gpus_per_node=4,
    memory=None,
    seconds=3600,
    account=None,
    partition=None,
    qos=None,
    constraint=None,
    reservation=None,
    options=(),
    warning="USR1",
    warning_seconds=120,
    requeue=True,
    check=False,
    modules=(),
    setup=(),
    advised=(),
    own=(),
    launcher="srun",
    launch=(),
    mpi="pmix",
    image=None,
)


def templates() -> dict[str, str]:
    """Each template by the name of its file."""
    requests = {"train.sbatch": _srun(), "train-mpirun.sbatch": _mpirun(), "train-apptainer.sbatch": _apptainer()}
    requests |= {"train.pbs": _pbs(), "train.flux": _flux()}
    return {name: SCRIPTS[request.system](request) for name, request in requests.items()}


def _srun() -> Request:
    about = (
        "One rank for each GPU, started by srun:  sbatch slurm/train.sbatch CONFIG [--set KEY=VALUE ...]",
        OPTIONS,
        "--mpi=pmix is for Open MPI; MPICH and Intel MPI want pmi2.",
        SUBMIT,
    )
    return replace(GENERIC, place=replace(GENERIC.place, about=about))


def _mpirun() -> Request:
    about = (
        "The same with the mpirun of your MPI:  sbatch slurm/train-mpirun.sbatch CONFIG [--set KEY=VALUE ...]",
        "For sites where srun and the MPI library do not know each other.",
    )
    place = Place("", "", "", "slurm/train-mpirun.sbatch", about=about)
    return replace(GENERIC, place=place, launcher="mpirun", mpi=None)


def _apptainer() -> Request:
    about = (
        "The same in a container:  IMAGE=hpctrain.sif sbatch slurm/train-apptainer.sbatch CONFIG [--set KEY=VALUE ...]",
        "--nv brings the driver of NVIDIA's GPUs into it, --rocm that of AMD's. The image's MPI must know --mpi's PMI.",
    )
    place = Place("", "", "", "slurm/train-apptainer.sbatch", about=about)
    return replace(GENERIC, place=place, image=Image("apptainer", ("--nv",), (), ""))


def _pbs() -> Request:
    about = (
        "One rank for each GPU with PBS and PALS, as on Polaris:",
        "    qsub -A PROJECT -v CONFIG=configs/x.toml slurm/train.pbs",
        "For Aurora, and for another number of nodes: hpctrain submit CONFIG --machine aurora --dry-run",
        AGAIN,
        SUBMIT,
    )
    place = Place("", "", "", "slurm/train.pbs", about=about)
    found, config = describe("polaris"), parse({"run": {"name": "train"}, "job": {"nodes": 2, "account": "PROJECT"}})
    return replace(request(config, found.machine, place, words(found.values)), account=None, requeue=False)


def _flux() -> Request:
    about = (
        "One rank for each GPU with Flux:  flux batch slurm/train.flux CONFIG [--set KEY=VALUE ...]",
        AGAIN,
        SUBMIT,
    )
    place = Place("", "", "", "slurm/train.flux", about=about)
    return replace(GENERIC, system="flux", place=place, launcher="flux run", mpi=None, requeue=False)


if __name__ == "__main__":
    for name, text in templates().items():
        Path(sys.argv[1], name).write_text(text)
