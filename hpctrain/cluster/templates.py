"""Templates: the scripts of ``slurm/``, for any configuration, written by the code that writes those of ``submit``.

    python -m hpctrain.cluster.templates slurm

writes them anew; a test compares.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hpctrain.cluster.request import Image, Place, Request, Variable
from hpctrain.cluster.script import SCRIPTS

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
POLARIS = (
    Variable("NCCL_NET", "AWS Libfabric", "the network plugin; unset these where it hangs"),
    Variable("NCCL_NET_GDR_LEVEL", "PHB"),
    Variable("NCCL_CROSS_NIC", "1"),
    Variable("NCCL_COLLNET_ENABLE", "1"),
    Variable("FI_CXI_DISABLE_HOST_REGISTER", "1"),
    Variable("FI_MR_CACHE_MONITOR", "userfaultfd"),
    Variable("FI_CXI_DEFAULT_CQ_SIZE", "131072"),
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
    return replace(GENERIC, place=place, launcher="mpirun", launch=("--bind-to", "none"), mpi=None)


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
        "On Aurora: select=2, filesystems=home:flare, --ppn 12 with -n 24, and module load frameworks.",
        AGAIN,
        SUBMIT,
    )
    options = ("-l place=scatter", "-l filesystems=home:eagle")
    launch = ("--depth=8", "--cpu-bind=depth")
    return replace(
        GENERIC, system="pbs", place=Place("", "", "", "slurm/train.pbs", about=about), mpi=None, launcher="mpiexec",
        options=("-l select=2:system=polaris", *options), launch=launch, advised=POLARIS, machine="Polaris",
        requeue=False,
    )  # fmt: skip


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
