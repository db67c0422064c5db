"""Machine: the facts of a supercomputer that decisions need, read from a file of ``configs/machines/``.

Rates are those of one direction, decimal: 1 GB is 10^9 bytes. Each figure has its source beside it in the file. What a
file does not say is unknown, None or empty, and then nothing is decided by it.
"""

from __future__ import annotations

from pydantic import Field

from hpctrain.config.section import Section


class Device(Section):
    """One accelerator as a rank sees it: a GPU, or the part of one that has a number of its own."""

    name: str
    kind: str = Field(pattern="^(cuda|rocm|xpu|cpu)$")
    """``cuda`` (NVIDIA), ``rocm`` (AMD), ``xpu`` (Intel), or ``cpu`` where there is none."""
    memory_gib: float = Field(gt=0)
    memory_gb_per_second: float | None = None
    tflops: dict[str, float] = {}
    """Peak of dense products, by dtype: ``bf16``, ``fp16``, ``fp8``, ``fp32``."""
    host_gb_per_second: float | None = None
    """Between the device and its host's memory."""


class Seat(Section):
    """What is near one device of a node, in the order of the devices' own numbers."""

    numa: int | None = None
    cores: str = ""
    """Cores to use with it, such as ``49-55`` or ``24-31,56-63``."""
    nic: str | None = None
    """The network interface beside it."""


class Node(Section):
    """One node."""

    devices: int = Field(ge=1)
    """Devices that ranks may have; on a machine without accelerators, sockets or NUMA domains that a rank gets."""
    cores: int = Field(ge=1)
    """Physical cores."""
    usable_cores: int | None = None
    """Those that jobs get, where the site keeps some."""
    threads_per_core: int = 1
    memory_gib: float = Field(gt=0)
    seats: tuple[Seat, ...] = Field((), strict=False)
    """Of each device; empty where that is not known."""


class Link(Section):
    """What joins the ranks of a domain: its size, and how fast a device sends to others there that are no nearer."""

    name: str
    """``module``, ``nvlink``, ``node``, ``switch``, ``group``, ``machine``."""
    devices: int | None = None
    """Devices in a domain, where it is a node or smaller."""
    nodes: int | None = None
    """Nodes in a domain, where it is larger; None for all of them."""
    gb_per_second: float = Field(gt=0)
    """Of one device that sends while all others of its node do too."""
    microseconds: float | None = None
    """Latency."""


class Scratch(Section):
    """A node's own disk."""

    path: str
    """Where jobs find it; variables are filled in on the node."""
    gib: float | None = None
    read_gb_per_second: float | None = None
    write_gb_per_second: float | None = None


class Storage(Section):
    """The shared file system that runs write to."""

    kind: str
    """``lustre``, ``gpfs``, ``vast``, ``nfs``, ``daos``, ``local``."""
    gb_per_second: float | None = None
    """What the whole system writes."""
    advice: str = ""
    """What the site says of striping and the like, in a sentence."""
    hints: dict[str, str | int] = {}
    """For MPI-IO, unless the run's own ``checkpoint.hints`` say otherwise."""


class Batch(Section):
    """How jobs are asked for and ranks are started."""

    system: str = Field(pattern="^(slurm|pbs|flux|none)$")
    launcher: str = "srun"
    """``srun``, ``mpirun``, ``mpiexec``, ``ibrun``, ``flux run``."""
    partition: str | None = None
    account: bool = True
    """Whether a job must name an account."""
    memory: str | None = None
    """What to ask for when a run does not say; None where the site wants none."""
    options: tuple[str, ...] = Field((), strict=False)
    """Lines for the batch system that each job needs; ``{devices}`` stands for the devices of a node."""
    launch: tuple[str, ...] = Field((), strict=False)
    """Options of the launcher: binding of devices and cores."""
    mpi: str | None = None
    """Value of ``srun --mpi``."""
    modules: tuple[str, ...] = Field((), strict=False)
    environment: dict[str, str] = {}
    """Variables that the site advises."""
    environment_across: dict[str, str] = {}
    """Those that are right only where a job has several nodes."""


class Container(Section):
    """How an Apptainer image runs here."""

    command: str = "apptainer"
    options: tuple[str, ...] = Field((), strict=False)
    """Such as ``--nv`` or ``--rocm``."""
    binds: tuple[str, ...] = Field((), strict=False)
    environment: dict[str, str] = {}


class Machine(Section):
    """A supercomputer, or a workstation."""

    name: str
    site: str = ""
    nodes: int = Field(ge=1)
    node: Node
    device: Device
    links: tuple[Link, ...] = Field((), strict=False)
    """From the nearest to the farthest, each wider than the one before."""
    scratch: Scratch | None = None
    storage: Storage | None = None
    batch: Batch = Batch(system="none", launcher="mpirun", account=False)
    container: Container = Container()
    sources: dict[str, str]
    """What the tags beside the figures mean."""
