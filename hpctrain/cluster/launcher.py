"""What each launcher says about this process, read from its variables: which rank, of how many.

Several launchers may speak at once: ``mpirun`` inside a Slurm job leaves each rank the variables of the step that
carries mpirun's daemons. The order of ``LAUNCHERS`` says who is believed; MPI itself has the last word.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster import slurm
from hpctrain.cluster.fact import Fact
from hpctrain.errors import LaunchError


@dataclass(frozen=True)
class Launch:
    """What one launcher says; None where it says nothing. ``sources`` names the variables of rank and size."""

    launcher: str
    version: str | None = None
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    sources: tuple[str, str] = ("", "")

    @property
    def facts(self) -> tuple[Fact, ...]:
        """Rank and size as this launcher gives them."""
        values = (("rank", self.rank), ("size", self.size))
        found = zip(values, self.sources, strict=True)
        return tuple(Fact(f"{self.launcher}: {name}", value, source) for (name, value), source in found if source)


@dataclass(frozen=True)
class Names:
    """The variables in which a launcher says rank, size, local rank, local size and its version."""

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    version: tuple[str, ...] = ()


LAUNCHERS = (
    Names(
        "mpirun of Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("OMPI_VERSION",),
    ),
    Names(
        "mpiexec of PALS",
        ("PALS_RANKID",),
        ("PALS_SIZE", "PMI_SIZE"),
        ("PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        ("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    ),
    Names("flux", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",)),
    Names(
        "mpirun of MVAPICH2",
        ("MV2_COMM_WORLD_RANK",),
        ("MV2_COMM_WORLD_SIZE",),
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Names(
        "jsrun",
        ("JSM_NAMESPACE_RANK",),
        ("JSM_NAMESPACE_SIZE",),
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    Names(
        "mpiexec of MPICH or Intel MPI",
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)
ALONE = Launch("none")


def launch(environ: Mapping[str, str]) -> Launch:
    """The launcher to believe, and what it says; ``ALONE`` when none speaks."""
    return claims(environ)[0]


def claims(environ: Mapping[str, str]) -> tuple[Launch, ...]:
    """All launchers that speak here, the one to believe first; never empty."""
    spoken = [said for names in LAUNCHERS if (said := _said(environ, names))]
    step = _step(environ)
    if step and _from_srun(environ):
        return (step, *spoken)
    return (*spoken, *((step,) if step else ())) or (ALONE,)


def first_rank() -> bool:
    """Whether this process speaks for the others before they have met, as far as its launcher says."""
    return launch(os.environ).rank in (None, 0)


def _said(environ: Mapping[str, str], names: Names) -> Launch | None:
    rank, size = _first(environ, names.rank), _first(environ, names.size)
    if not rank or not size:
        return None
    version = _first(environ, names.version)
    return Launch(
        names.launcher,
        environ[version] if version else None,
        _number(environ, rank),
        _number(environ, size),
        _number(environ, _first(environ, names.local_rank)),
        _number(environ, _first(environ, names.local_size)),
        (rank, size),
    )


def _step(environ: Mapping[str, str]) -> Launch | None:
    """What ``srun`` says to a task; None in a shell of the job."""
    if not slurm.in_step(environ) or not (job := slurm.job(environ)):
        return None
    here = job.tasks_per_node[job.node] if job.node is not None and job.node < len(job.tasks_per_node) else None
    sources = {fact.name: fact.source for fact in job.facts}
    said = (sources["slurm.rank"], sources.get("slurm.tasks", ""))
    return Launch("srun", None, job.rank, job.tasks, job.local_rank, here, said)


def _from_srun(environ: Mapping[str, str]) -> bool:
    """Whether the PMI variables are srun's own, and not those of an mpirun inside a step."""
    if "OMPI_COMM_WORLD_SIZE" in environ and not environ.get("PMIX_NAMESPACE", "").startswith("slurm."):
        return False
    return environ.get("PMI_JOBID") == f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}" or environ.get(
        "PMIX_NAMESPACE", ""
    ).startswith("slurm.")


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if environ.get(name)), None)


def _number(environ: Mapping[str, str], name: str | None) -> int | None:
    if name is None:
        return None
    try:
        return int(environ[name])
    except ValueError:
        what = f"{name} = {environ[name]!r} is not a number"
        raise LaunchError(what, "a launcher sets it to one", f"unset {name}") from None
