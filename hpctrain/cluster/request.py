"""Request: what a batch job is asked for and how its ranks are started, with nothing left to decide.

``request`` makes it of a configuration and of the facts of a machine; ``script`` writes it down for a batch system.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config import Config
from hpctrain.config.job import JobConfig
from hpctrain.errors import ConfigError, UsageError
from hpctrain.plan.machine import Batch, Machine

NO_MACHINE = Batch(system="slurm", launcher="srun", account=False)
"""What holds where no machine is named: Slurm, without a word about its habits."""
UNKNOWN = {"pbs": ("memory", "qos", "constraint"), "flux": ("memory", "qos", "reservation")}
"""Keys of ``[job]`` that a batch system has no line for."""
WARNINGS = ("USR1", "USR2")  # the signal before the time limit; not TERM, with which a job is cancelled


@dataclass(frozen=True)
class Variable:
    """A variable of the environment; ``$NAME`` in its value is filled in by the job's shell."""

    name: str
    value: str
    why: str = ""


@dataclass(frozen=True)
class Image:
    """A container that the ranks run in."""

    command: str
    options: tuple[str, ...]
    binds: tuple[str, ...]
    path: str


@dataclass(frozen=True)
class Element:
    """One run of a sweep: what it is called, where its files go, and what it has of its own, as ``key=value``."""

    name: str
    run: str
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a job finds its files: ``folder`` is where it starts, the others are paths from there."""

    folder: str
    run: str
    """The run's folder."""
    config: str
    """The configuration that the job reads."""
    script: str
    """The script itself, to be handed in again."""
    source: str = ""
    """The file that the configuration was made of."""
    programs: str | None = None
    """The folder that has the program hpctrain; None where the job's shell finds it by itself."""
    about: tuple[str, ...] = ()
    """What a template says of itself. Configuration and settings are then the arguments of the script."""

    @property
    def is_template(self) -> bool:
        """Whether the script is for any configuration."""
        return bool(self.about)


@dataclass(frozen=True)
class Request:
    """A job, as a batch system is asked for it."""

    system: str
    """``slurm``, ``pbs`` or ``flux``."""
    machine: str | None
    place: Place
    name: str
    nodes: int
    spares: int
    tasks_per_node: int
    cpus_per_task: int | None
    gpus_per_node: int
    memory: str | None
    seconds: int
    """Longest time of one life."""
    account: str | None
    partition: str | None
    qos: str | None
    constraint: str | None
    reservation: str | None
    options: tuple[str, ...]
    """Further lines for the batch system."""
    warning: str | None
    """The signal that comes before the time limit; None for none."""
    warning_seconds: int
    requeue: bool
    check: bool
    modules: tuple[str, ...]
    setup: tuple[str, ...]
    advised: tuple[Variable, ...]
    """Of the machine: what the user's shell has already stays."""
    own: tuple[Variable, ...]
    """Of the configuration: these win."""
    launcher: str
    launch: tuple[str, ...]
    """Options of the launcher."""
    mpi: str | None
    image: Image | None
    elements: tuple[Element, ...] = ()
    """The runs of a sweep; empty for one run."""
    finished: str | None = None
    """The checkpoint after which nothing is left to do, for a job of a chain."""

    @property
    def tasks(self) -> int:
        """Ranks of the run."""
        return self.nodes * self.tasks_per_node


def request(
    config: Config,
    machine: Machine | None,
    place: Place,
    words: Mapping[str, str] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Request:
    """Decide what to ask for. ``words`` says why the machine's variables are as they are, by name.

    Raises ConfigError where the machine cannot give it, and UsageError where it has no batch system.
    """
    job, batch = config.job, machine.batch if machine else NO_MACHINE
    if batch.system == "none":
        raise _no_batch_system(machine)
    tasks = _tasks(job, machine)
    launcher = batch.launcher if job.launcher == "auto" else job.launcher
    found = Request(
        system=batch.system,
        machine=machine.name if machine else None,
        place=place,
        name=config.run.name,
        nodes=job.nodes,
        spares=job.spares,
        tasks_per_node=tasks,
        cpus_per_task=_cpus(job, machine, tasks),
        gpus_per_node=_gpus(machine),
        memory=job.memory or batch.memory,
        seconds=seconds(job.time),
        account=job.account,
        partition=job.partition or batch.partition,
        qos=job.qos,
        constraint=job.constraint,
        reservation=job.reservation,
        options=(*_filled(batch.options, job.nodes + job.spares, machine), *job.options),
        warning=_warning(config),
        warning_seconds=job.signal_seconds,
        requeue=job.requeue,
        check=(job.check or job.spares > 0) and batch.system == "slurm",
        modules=batch.modules if job.modules is None else job.modules,
        setup=(*batch.setup, *job.setup),
        advised=_advised(job, batch, machine, words or {}),
        own=tuple(Variable(name, value) for name, value in job.environment.items()),
        launcher=launcher,
        launch=_filled(batch.launch, job.nodes, machine) if launcher == batch.launcher else (),
        mpi=job.mpi or batch.mpi,
        image=_image(config, machine, place.folder),
    )
    _check_system(found, job)
    _check(found, machine, environ)
    return found


def seconds(time: str) -> int:
    """The time limit of ``job.time``: ``90`` minutes, ``1:30:00``, ``2-12`` days and hours, ``2-12:30:00``."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    hours, minutes, more = parts if len(parts) == 3 else (*parts, 0, 0) if dash else (0, *parts, 0)
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + more


def clock(seconds: int) -> str:
    """``h:mm:ss``, which every batch system reads the same way."""
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


# ---- what is decided -----------------------------------------------------------------------------------------------


def _tasks(job: JobConfig, machine: Machine | None) -> int:
    if job.tasks_per_node != "auto":
        return job.tasks_per_node
    if machine is None:
        what = 'job.tasks_per_node = "auto", and no machine says how many devices a node has'
        raise ConfigError(what, "one rank is started for each of them", "set job.machine, or job.tasks_per_node")
    return machine.node.devices


def _cpus(job: JobConfig, machine: Machine | None, tasks: int) -> int | None:
    if job.cpus_per_task != "auto" or machine is None:
        return None if job.cpus_per_task == "auto" else job.cpus_per_task
    return max(1, _processors(machine) // tasks)


def _processors(machine: Machine) -> int:
    """Processors that a node gives to jobs, as its batch system counts them."""
    if machine.batch.cpus_per_task is not None:
        return machine.batch.cpus_per_task * machine.node.devices
    return machine.node.usable_cores or machine.node.cores


def _gpus(machine: Machine | None) -> int:
    """Of a node; those that ranks compute on."""
    return machine.node.devices if machine and machine.device.kind != "cpu" else 0


def _filled(options: Iterable[str], nodes: int, machine: Machine | None) -> tuple[str, ...]:
    devices = machine.node.devices if machine else 1
    return tuple(text.replace("{devices}", str(devices)).replace("{nodes}", str(nodes)) for text in options)


def _warning(config: Config) -> str | None:
    """A signal that the run listens to."""
    listened = {name.upper().removeprefix("SIG") for name in config.run.stop_signals}
    return next((name for name in WARNINGS if name in listened), None) if config.job.signal_seconds else None


def _advised(job: JobConfig, batch: Batch, machine: Machine | None, words: Mapping[str, str]) -> tuple[Variable, ...]:
    found = {**batch.environment, **(batch.environment_across if job.nodes > 1 else {})}
    if job.container and machine:
        found |= machine.container.environment
    return tuple(Variable(n, value, words.get(n, "")) for n, value in found.items() if n not in job.environment)


def _image(config: Config, machine: Machine | None, folder: str) -> Image | None:
    """The container, which sees the folder that the job starts in, the run's, and those of the data."""
    if config.job.container is None:
        return None
    data = [str(Path(source.path).parent) for source in config.data.sources]
    needed = [str(Path(folder, path)) for path in (str(config.run.folder), *data)]
    outside = [path for path in dict.fromkeys(needed) if not Path(path).is_relative_to(folder)]
    binds = (folder, *outside, *(machine.container.binds if machine else ()), *config.job.binds)
    command = machine.container.command if machine else "apptainer"
    options = machine.container.options if machine else ()
    return Image(command, options, binds, config.job.container)


# ---- what is refused -----------------------------------------------------------------------------------------------


def _check(found: Request, machine: Machine | None, environ: Mapping[str, str]) -> None:
    _check_lines(found)
    if found.warning and found.warning_seconds >= found.seconds:
        what = f"job.signal_seconds = {found.warning_seconds} is not less than job.time, {clock(found.seconds)}"
        raise ConfigError(what, "the job would be told to stop as it starts", "set job.signal_seconds lower, or to 0")
    if found.spares and (found.system, found.launcher) != ("slurm", "srun"):
        what = f"job.spares = {found.spares}, and {found.launcher} of {found.system} starts the ranks"
        raise ConfigError(what, "only srun is told which of a job's nodes to use", "set job.spares to 0")
    if machine:
        _check_machine(found, machine, environ)


def _check_system(found: Request, job: JobConfig) -> None:
    """What the batch system cannot be asked for is not passed over."""
    for name in UNKNOWN.get(found.system, ()):
        if getattr(job, name) is not None:
            what = f"job.{name} = {getattr(job, name)!r}, and {found.system} has no option of that meaning"
            raise ConfigError(what, "it would be passed over", "write it as the site wants it, into job.options")
    if found.launcher == "srun" and found.system != "slurm":
        what = f'job.launcher = "srun" on {found.machine}, which has {found.system}'
        raise ConfigError(what, "srun starts ranks in jobs of Slurm", 'set job.launcher to "auto"')


def _check_machine(found: Request, machine: Machine, environ: Mapping[str, str]) -> None:
    if machine.batch.account and not found.account and not environ.get("SBATCH_ACCOUNT"):
        what = f"job.account is not given, and {machine.name} wants to know who pays"
        raise ConfigError(what, "a job without an account is refused there", "give --account NAME, or set job.account")
    if machine.nodes is not None and found.nodes + found.spares > machine.nodes:
        asked = f"job.nodes = {found.nodes}" + f" and job.spares = {found.spares}" * bool(found.spares)
        raise ConfigError(f"{asked}: {machine.name} has {machine.nodes} nodes", "", "ask for no more than that")
    if found.gpus_per_node and found.tasks_per_node > found.gpus_per_node:
        what = (
            f"job.tasks_per_node = {found.tasks_per_node}: a node of {machine.name} has {found.gpus_per_node} devices"
        )
        raise ConfigError(what, "each rank computes on a device of its own", f"at most {found.gpus_per_node}")
    asked, there = found.tasks_per_node * (found.cpus_per_task or 1), _processors(machine)
    if asked > there:
        what = f"{found.tasks_per_node} ranks with {found.cpus_per_task} cores each are {asked} on a node"
        raise ConfigError(what, f"a node of {machine.name} gives a job {there}", 'set job.cpus_per_task to "auto"')


def _check_lines(found: Request) -> None:
    """A line break in a value would begin a line of its own in the script."""
    named = ("name", "memory", "account", "partition", "qos", "constraint", "reservation", "mpi")
    values = {f"job.{name}": [getattr(found, name) or ""] for name in named}
    values = {"run.name": values.pop("job.name"), **values, "job.options": found.options, "job.modules": found.modules}
    for key, texts in values.items():
        if bad := next((text for text in texts if not text.isprintable()), None):
            why = "each is a word on one line of the batch script"
            raise ConfigError(f"{key} = {bad!r} has a character that cannot be printed", why, "take it out")


def _no_batch_system(machine: Machine) -> UsageError:
    return UsageError(
        f"{machine.name} has no batch system",
        "there is no queue to hand a job to",
        "start it yourself: mpirun -n RANKS hpctrain train CONFIG; or name another --machine",
    )
