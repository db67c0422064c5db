"""Machine: the facts of a supercomputer that decisions need, read from a file of ``configs/machines/``.

Rates are those of one direction, decimal: 1 GB is 10^9 bytes. Each figure has its source beside it in the file, as a
comment such as ``# [olcf] both ways, halved`` (``sourced.py`` reads them). What a file does not say is unknown, None or
empty, and then nothing is decided by it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hpctrain.config.section import Section


class Device(Section):
    """One accelerator as a rank sees it: a GPU, or the part of one that has a number of its own."""

    name: str
    """What it is called: ``A100 40GB``."""
    kind: Literal["cuda", "rocm", "xpu", "cpu"]
    """``cuda`` (NVIDIA), ``rocm`` (AMD), ``xpu`` (Intel), or ``cpu`` where there is none."""
    memory_gib: float = Field(gt=0)
    """As its maker says; what makers call GB of a GPU's memory are GiB."""
    memory_gb_per_second: float | None = Field(None, gt=0)
    """How fast the device reads its own memory."""
    tflops: dict[str, float] = {}
    """Peak of dense products, by dtype: ``bf16``, ``fp16``, ``fp8``, ``fp32``."""
    host_gb_per_second: float | None = Field(None, gt=0)
    """Between the device and its host's memory."""


class Seat(Section):
    """What is near one device of a node, in the order of the devices' own numbers."""

    numa: int | None = Field(None, ge=0)
    """The NUMA domain that its cores are in."""
    cores: str = Field("", pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")
    """Cores to use with it, such as ``49-55`` or ``24-31,56-63``; threads of a core that have numbers count."""
    nic: str | None = None
    """The network interface beside it."""

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """The numbers that ``cores`` stands for, as they are listed."""
        spans = [part.partition("-") for part in self.cores.split(",") if part]
        return tuple(core for first, _, last in spans for core in range(int(first), int(last or first) + 1))


class Node(Section):
    """One node."""

    devices: int = Field(ge=1)
    """Devices that ranks may have; on a machine without accelerators, sockets or NUMA domains that a rank gets."""
    cores: int = Field(ge=1)
    """Physical cores."""
    usable_cores: int | None = Field(None, ge=1)
    """Those that jobs get, where the site keeps some."""
    threads_per_core: int = Field(1, ge=1)
    """Threads that the hardware runs on each core at once."""
    memory_gib: float = Field(gt=0)
    """Of the host, beside that of the devices."""
    seats: tuple[Seat, ...] = Field((), strict=False)
    """Of each device; empty where that is not known."""


class Link(Section):
    """What joins the ranks of a domain: its size, and how fast a device sends to others there that are no nearer."""

    name: str
    """``module``, ``nvlink``, ``node``, ``switch``, ``group``, ``machine``."""
    devices: int | None = Field(None, ge=2)
    """Devices in a domain, where it is a node or smaller."""
    nodes: int | None = Field(None, ge=2)
    """Nodes in a domain, where it is larger; left out, with ``devices``, for all of them."""
    gb_per_second: float = Field(gt=0)
    """Of one device that sends while all others of its node do too."""
    pair_gb_per_second: float | None = Field(None, gt=0)
    """To one other device alone, where that is less: where each pair has wires of its own."""
    microseconds: float | None = Field(None, ge=0)
    """Latency."""


class Scratch(Section):
    """A node's own disk."""

    path: str
    """Where jobs find it; variables are filled in on the node."""
    gib: float | None = Field(None, gt=0)
    """Its size."""
    read_gb_per_second: float | None = Field(None, gt=0)
    """Of the whole node, from the start of large files to their end."""
    write_gb_per_second: float | None = Field(None, gt=0)
    """The same of writing."""
    constraint: str | None = None
    """The feature that a job names to have it, such as ``nvme``; left out where all nodes have it."""


class Storage(Section):
    """The shared file system that runs write to."""

    kind: Literal["lustre", "gpfs", "vast", "nfs", "daos", "local"]
    """The file system, which decides what striping is, and whether there is any."""
    gb_per_second: float | None = Field(None, gt=0)
    """What the whole system writes."""
    advice: str = ""
    """What the site says of striping and the like, in a sentence."""
    hints: dict[str, str | int] = {}
    """For MPI-IO, where the run's own ``checkpoint.hints`` do not say otherwise."""


class Batch(Section):
    """How jobs are asked for and ranks are started."""

    system: Literal["slurm", "pbs", "flux", "none"]
    """What takes jobs."""
    launcher: str = "srun"
    """``srun``, ``mpirun``, ``mpiexec``, ``ibrun``, ``flux run``."""
    cpus_per_task: int | None = Field(None, ge=1)
    """What a rank with one device asks for, as the batch system counts: threads where it counts those. Left out where
    it is the usable cores over the devices."""
    partition: str | None = None
    """Partition or queue for jobs on devices; left out where it is the default one."""
    account: bool = True
    """Whether a job must name an account."""
    memory: str | None = None
    """What to ask for when a run does not say; left out where the site wants none."""
    options: tuple[str, ...] = Field((), strict=False)
    """Lines for the batch system that each job needs; ``{devices}`` stands for the devices of a node."""
    launch: tuple[str, ...] = Field((), strict=False)
    """Options of the launcher: binding of devices and cores, for a rank on each device."""
    mpi: str | None = None
    """Value of ``srun --mpi``."""
    modules: tuple[str, ...] = Field((), strict=False)
    """Environment modules to load."""
    setup: tuple[str, ...] = Field((), strict=False)
    """Lines of shell after the modules, such as those that lengthen a path."""
    environment: dict[str, str] = {}
    """Variables that the site advises, where nobody has set them; a shell fills in variables in them."""
    environment_across: dict[str, str] = {}
    """Those that are right only where a job has several nodes."""


class Container(Section):
    """How an Apptainer image runs here."""

    command: str = "apptainer"
    """What starts it."""
    options: tuple[str, ...] = Field((), strict=False)
    """Such as ``--nv`` or ``--rocm``."""
    binds: tuple[str, ...] = Field((), strict=False)
    """Folders of the host that MPI, the network and the devices need in it."""
    environment: dict[str, str] = {}
    """Variables for it; a shell fills in variables in them."""


class Machine(Section):
    """A supercomputer, or a workstation."""

    name: str
    """What it is called."""
    site: str = ""
    """Where it stands."""
    nodes: int | None = Field(None, ge=1)
    """Nodes that have such devices; left out where it is as many as one buys."""
    node: Node
    """One of its nodes."""
    device: Device
    """One device of a node."""
    links: tuple[Link, ...] = Field((), strict=False)
    """From the nearest to the farthest, each wider than the one before."""
    scratch: Scratch | None = None
    """Left out where nodes have no disk that jobs may use."""
    storage: Storage | None = None
    """Where checkpoints go."""
    batch: Batch = Batch(system="none", launcher="mpirun", account=False)
    """How to have nodes."""
    container: Container = Container()
    """How to run in an image."""
    sources: dict[str, str] = {}
    """What the tags beside the figures mean: a title, where it is, and of when the copy was that was read."""
