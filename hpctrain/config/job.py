"""The section ``[job]``: what a batch system is asked for, and on what machine a run takes place."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from hpctrain.config.section import Auto, Section


def _time(value: Any) -> Any:
    """What TOML makes of a time without quotes: a time of day where it has three parts, a number where it has one."""
    return str(value) if isinstance(value, datetime.time | int) and not isinstance(value, bool) else value


class JobConfig(Section):
    """The machine, and the job that ``hpctrain submit`` hands to its batch system."""

    machine: str | None = None
    """The machine: a name of ``configs/machines/``, such as ``frontier``, or the path of a machine file. Its facts fill
    in what is ``auto`` here, and tell the planner where links are slow."""
    nodes: int = Field(1, ge=1)
    """Nodes that train."""
    spares: int = Field(0, ge=0)
    """Nodes beyond those, which take the place of slow or broken ones that the check at the start finds; with srun."""
    tasks_per_node: int | Auto = "auto"
    """Ranks on each node; ``auto`` is one for each of the machine's devices."""
    cpus_per_task: int | Auto = "auto"
    """Processors of each rank, as the batch system counts them; ``auto`` shares the node's usable ones."""
    bind_cores: bool = True
    """Whether a rank with a device keeps to the cores nearest it, as far as the launcher lets it use them."""
    memory: str | None = None
    """Memory of a node, such as ``480G``; the machine's habit when not given."""
    time: Annotated[str, BeforeValidator(_time)] = Field("1:00:00", pattern=r"^(\d+-)?\d+(:\d\d:\d\d)?$")
    """Longest time of one life of the job: minutes, ``h:mm:ss``, ``days-hours`` or ``days-h:mm:ss``."""
    account: str | None = None
    """Who pays."""
    partition: str | None = None
    """Partition or queue; the machine's for GPU jobs when not given."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that nodes must have, such as ``nvme``."""
    reservation: str | None = None
    """A reservation to run in."""
    signal_seconds: int = Field(120, ge=0, le=65535)
    """How long before the time limit the job is warned, so that it saves and stops; 0 for not. Slurm may do so up to a
    minute earlier."""
    requeue: bool = True
    """Whether a job that stopped before its last step goes back into the queue. A file ``no-requeue`` in the run's
    folder keeps it out."""
    check: bool = True
    """Whether nodes, links and disk are checked before each start."""
    slow_compute: float = Field(0.8, ge=0, le=1)
    """In that check a node is slow that multiplies matrices at less than this part of the others' speed; 0 for none."""
    slow_links: float = Field(0.5, ge=0, le=1)
    """Likewise for what it exchanges with other nodes, and for copies in its memory and to its devices."""
    slow_disks: float = Field(0.2, ge=0, le=1)
    """Likewise for what it writes to the run's folder and to ``checkpoint.near``."""
    modules: tuple[str, ...] | None = Field(None, strict=False)
    """Environment modules to load; the machine's when not given."""
    setup: tuple[str, ...] = Field((), strict=False)
    """Lines of shell before the launch, such as the activation of a virtual environment."""
    environment: dict[str, str] = {}
    """Variables to export; they win over the machine's. ``$NAME`` in a value is filled in by the job."""
    launcher: Literal["auto", "srun", "mpirun"] = "auto"
    """What starts the ranks inside the job; ``auto`` is the machine's habit, or srun."""
    mpi: str | None = None
    """Value of ``srun --mpi``: ``pmix`` for Open MPI, ``pmi2`` for MPICH; the machine's when not given."""
    container: str | None = None
    """An Apptainer image (SIF) that the ranks run in."""
    binds: tuple[str, ...] = Field((), strict=False)
    """Folders of the host that the container sees beside the run's own."""
    options: tuple[str, ...] = Field((), strict=False)
    """Further options for the batch system, each as it would stand after ``#SBATCH``."""

    @field_validator("tasks_per_node", "cpus_per_task")
    @classmethod
    def _at_least_one(cls, value: int | Auto) -> int | Auto:
        if value != "auto" and value < 1:
            raise PydanticCustomError("at_least_one", "it should be at least 1")
        return value
