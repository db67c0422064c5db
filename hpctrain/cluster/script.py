"""Script: a request written down as a batch script that a person would write, and can keep.

It is bash, and trains by a configuration that was fixed before; a template by the one that is its first argument. Its
own exit status is that of the launcher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hpctrain.cluster.request import Request, Variable, clock
from hpctrain.cluster.shell import command, export, joined, paragraph, value, word
from hpctrain.errors import EXIT_DONE, EXIT_REQUEUE, EXIT_USAGE

UNBOUND = ("--bind-to", "none")  # else Open MPI binds each rank to one core; MPICH takes the words too
_GPUS = ("--gpus", "--gres", "-G")  # a machine that asks for its devices in another way
ANSWER_SECONDS = 120  # for every node of a job to start a program
AGAIN_AT_MOST = 3
"""How often in a row a job goes back into the queue because too few of its nodes were good."""


def batch_script(request: Request) -> str:
    """The script for Slurm."""
    return _text(request, "#SBATCH", slurm_options(request), _slurm_warning(request), _SLURM)


def pbs_script(request: Request) -> str:
    """The script for PBS."""
    return _text(request, "#PBS", pbs_options(request), "", _PBS)


def flux_script(request: Request) -> str:
    """The script for Flux."""
    return _text(request, "# flux:", flux_options(request), "", _FLUX)


SCRIPTS: dict[str, Callable[[Request], str]] = {"slurm": batch_script, "pbs": pbs_script, "flux": flux_script}
ENDINGS = {"slurm": "sbatch", "pbs": "pbs", "flux": "flux"}
HAND_IN = {"slurm": "sbatch", "pbs": "qsub", "flux": "flux batch"}


@dataclass(frozen=True)
class System:
    """What differs between batch systems inside a script."""

    element: str | None
    """Where the shell finds the number of an element of an array."""
    hand_in: str
    """What hands a script in, from a shell at the login."""
    again: Callable[[Request], str]
    """What puts the job back into the queue, from inside it."""
    warns: bool
    """Whether the job's shell gets a signal before the time limit."""


_SLURM = System("SLURM_ARRAY_TASK_ID", HAND_IN["slurm"], lambda r: 'scontrol requeue "$SLURM_JOB_ID"', True)
_PBS = System("PBS_ARRAY_INDEX", HAND_IN["pbs"], lambda r: f"qsub {word(r.place.script)}", False)
_FLUX = System(None, HAND_IN["flux"], lambda r: f"flux --parent batch {word(r.place.script)}", False)


# ---- lines for the batch system ------------------------------------------------------------------------------------


def slurm_options(r: Request) -> Iterator[str]:
    """What stands after ``#SBATCH``, a line each."""
    logs = "%A_%a" if r.elements else "%j"
    yield from _given("--job-name", r.name)
    if not r.place.is_template:
        yield from _given("--chdir", r.place.folder)
        yield from _given("--output", f"{r.place.run.replace('%', '%%')}/job-{logs}.out")
    yield from ("--open-mode=append", f"--nodes={r.nodes + r.spares}", f"--ntasks-per-node={r.tasks_per_node}")
    yield from _given("--cpus-per-task", r.cpus_per_task)
    if r.gpus_per_node and not any(text.startswith(_GPUS) for text in (*r.options, *r.launch)):
        yield f"--gpus-per-node={r.gpus_per_node}"
    names = ("account", "partition", "qos", "constraint", "reservation")
    for name, told in (("mem", r.memory), *((name, getattr(r, name)) for name in names)):
        yield from _given(f"--{name}", told)
    yield f"--time={clock(r.seconds)}"
    if r.warning:
        yield f"--signal=B:{r.warning}@{r.warning_seconds}"
    if r.requeue:
        yield "--requeue"
    if r.elements:
        yield f"--array=0-{len(r.elements) - 1}"
    yield from r.options


def pbs_options(r: Request) -> Iterator[str]:
    """What stands after ``#PBS``, a line each."""
    name = "".join(c if c.isalnum() or c in "._-" else "_" for c in r.name)[:230]
    yield f"-N {name if name[:1].isalpha() else 'run_' + name}"
    for flag, told in (("-A", r.account), ("-q", r.reservation or r.partition)):
        if told:
            yield f"{flag} {value(told)}"
    if not any("select=" in text for text in r.options):
        yield f"-l select={r.nodes}"
    yield f"-l walltime={clock(r.seconds)}"
    if r.elements:
        yield f"-J 0-{len(r.elements) - 1}"
    yield from ("-j oe", f"-r {'y' if r.requeue else 'n'}")
    if not r.place.is_template:
        yield f"-o {value(r.place.folder + '/' + r.place.run + '/')}"
    yield from r.options


def flux_options(r: Request) -> Iterator[str]:
    """What stands after ``# flux:``, a line each."""
    yield from _given("--job-name", r.name)
    if not r.place.is_template:
        yield from _given("--cwd", r.place.folder)
        yield from _given("--output", f"{r.place.run}/job-{{{{id}}}}.out")
    yield from (f"--nodes={r.nodes}", "--exclusive", f"--time-limit={r.seconds}s")
    yield from _given("--queue", r.partition)
    yield from _given("--bank", r.account)
    yield from _given("--requires", r.constraint)
    yield from r.options


def _given(option: str, told: str | int | None) -> Iterator[str]:
    if told is not None:
        yield f"{option}={value(str(told))}"


# ---- the script ----------------------------------------------------------------------------------------------------


def _text(r: Request, prefix: str, options: Iterator[str], warning: str, system: System) -> str:
    """All paragraphs, those that have something to say."""
    head = "\n".join(("#!/bin/bash", *_about(r, system), *(f"{prefix} {text}" for text in options))) + "\n"
    parts = (
        head,
        _start(r, system),
        _modules(r),
        _programs(r),
        _advice(r),
        paragraph("Of the configuration (job.environment).", *(export(v.name, v.value) for v in r.own)),
        _cores(r, system),
        _elements(r, system),
        _finished(r),
        warning,
        _again(r, system),
        _check(r, system),
        _launch(r, system),
        _end(r, system),
    )
    return "\n".join(part for part in parts if part)


def _about(r: Request, system: System) -> Iterator[str]:
    where = f" on {r.machine}" if r.machine else ""
    if r.place.is_template:
        yield from (f"# {line}" for line in r.place.about)
        return
    yield f"# {r.name}: {r.place.source or r.place.config}{where}. Written by hpctrain submit."
    yield f"# By hand: {system.hand_in} {word(r.place.script)}"


def _start(r: Request, system: System) -> str:
    """PBS starts a job in the home folder, and has no arguments for it."""
    if system is not _PBS:
        return ""
    if r.place.is_template:
        return 'cd "$PBS_O_WORKDIR" || exit\nset -- "${CONFIG:?}"\n'
    return f"cd {word(r.place.folder)} || exit\n"


def _modules(r: Request) -> str:
    """Modules, and the lines of shell that the machine and the configuration have."""
    load = (command(("module load", *map(word, r.modules))),) if r.modules else ()
    return paragraph(
        "Modules, and what the configuration says to do first." if r.setup else "Modules.", *load, *r.setup
    )


def _programs(r: Request) -> str:
    if r.place.programs is None:
        return ""
    return paragraph("Where hpctrain and its Python are.", export("PATH", f"{r.place.programs}:$PATH"))


def _advice(r: Request) -> str:
    """The machine's variables, each under what it is for."""
    return paragraph(f"Advised on {r.machine}; what your shell has already stays.", *map(_advised, r.advised))


def _advised(variable: Variable) -> str:
    line = export(variable.name, variable.value, stays=True)
    return f"{line}  # {variable.why}" if variable.why else line


def _cores(r: Request, system: System) -> str:
    if system is not _SLURM or r.cpus_per_task is None:
        return ""
    return paragraph(
        "srun of Slurm 22.05 to 23.02 gives each task one core without it.",
        'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"',
    )


def _elements(r: Request, system: System) -> str:
    """The run's folder, where it is known only in the job, and what each element of a sweep has of its own."""
    if r.place.is_template:
        folder = 'run=${RUN:-runs/$(basename "$1" .toml)}'
        return paragraph("The run's folder. Say RUN=FOLDER where it has another name than the configuration.", folder)
    if not r.elements:
        return ""
    lines = [f'case "${system.element}" in']
    for number, element in enumerate(r.elements):
        own = " ".join(f"--set {word(setting)}" for setting in (f"run.name={element.name}", *element.settings))
        lines.append(f"{number}) run={word(element.run)} settings=({own}) ;;")
    return paragraph("What each job of the array has of its own.", *lines, "esac")


def _finished(r: Request) -> str:
    if r.finished is None:
        return ""
    return paragraph(
        "A job of a chain has nothing to do when one before it came to the end.",
        f"if [[ -e {word(r.finished)} ]]; then",
        f"    echo {word(r.finished + ' is there: nothing is left to do')}",
        "    exit 0",
        "fi",
    )


def _slurm_warning(r: Request) -> str:
    if r.warning is None:
        return ""
    return paragraph(
        f"{r.warning_seconds} s before the time limit, or up to a minute earlier, Slurm signals this shell.\n"
        "The launcher hands the signal on to the ranks: they save, and end with status 75.",
        "launcher=",
        f"trap 'warned=1; [[ -z $launcher ]] || kill -{r.warning} \"$launcher\"' {r.warning}",
    )


def _run(r: Request) -> str:
    """The run's folder, as the shell writes it."""
    return '"$run"' if r.elements or r.place.is_template else word(r.place.run)


def _again(r: Request, system: System) -> str:
    if not r.requeue:
        return ""
    return paragraph(
        f"Puts this job back into the queue, unless {r.place.run}/no-requeue says no."
        if not (r.elements or r.place.is_template)
        else "Puts this job back into the queue, unless a file no-requeue in the run's folder says no.",
        "again() {",
        f"    if [[ -e {_run(r)}/no-requeue ]]; then",
        f"        echo {_run(r)}/no-requeue: not handed in again >&2",
        f"    elif ! {system.again(r)}; then",
        f"        echo {word(f'not put back into the queue; by hand: {system.hand_in} {r.place.script}')} >&2",
        "    fi",
        "}",
    )


def _check(r: Request, system: System) -> str:
    """The check before each start, which also chooses the nodes that train."""
    if not r.check:
        return ""
    within = (f"--within {word(' '.join(_contained(r)))}",) if r.image else ()
    mpi = (f"--mpi={word(r.mpi)}",) if r.mpi else ()
    check = ("if hpctrain preflight", *_config(r), f"--nodes {r.nodes}", '--out "$nodes"', *mpi, *within)
    about = f"; it chooses {r.nodes} of the job's {r.nodes + r.spares} nodes." if r.spares else "."
    few = (
        f'    if [[ $status == 1 && $(wc -l < "$few") -le {AGAIN_AT_MOST} ]]; then',
        "        again",
        "    fi",
    )
    return paragraph(
        f"Nodes, links and disk are checked before each start{about}\nStatus 1: too few of them are good.",
        f'nodes={_run(r)}/nodes-"$SLURM_JOB_ID" few={_run(r)}/too-few-nodes',
        command(check, end="; then"),
        '    rm -f "$few"',
        "else",
        "    status=$?",
        '    date >> "$few"',
        *(few if r.requeue else ()),
        '    exit "$status"',
        "fi",
    )


def _launch(r: Request, system: System) -> str:
    ranks = joined(command((*LAUNCHERS[r.launcher](r), *_contained(r))), command(("hpctrain train", *_config(r))))
    if system.warns:
        wait = ("launcher=$!", "warned=1", "while [[ $warned ]]; do  # a signal ends wait, and not the launcher")
        wait += ("    warned=", '    wait "$launcher"', "    status=$?", "done")
        return paragraph("The ranks.", f"{ranks} &", *wait)
    return paragraph("The ranks.", *_timer(r), ranks, "status=$?", *_timer_ends(r))


def _timer(r: Request) -> tuple[str, ...]:
    return (f"(sleep {r.seconds - r.warning_seconds} && touch {_run(r)}/stop) &", "timer=$!") if r.warning else ()


def _timer_ends(r: Request) -> tuple[str, ...]:
    return ('kill "$timer"',) if r.warning else ()


def _config(r: Request) -> tuple[str, ...]:
    """The arguments of ``hpctrain train``."""
    if r.place.is_template:
        return ('"$@"',)
    return (word(r.place.config), *(('"${settings[@]}"',) if r.elements else ()))


def _contained(r: Request) -> tuple[str, ...]:
    if r.image is None:
        return ()
    if r.place.is_template:
        return (f"{r.image.command} exec", *r.image.options, '--bind "$PWD"', '"${IMAGE:-hpctrain.sif}"')
    if r.image.command == "shifter":
        binds = (f"--volume={word(f'{path}:{path}')}" for path in r.image.binds)
        return ("shifter", f"--image={word(r.image.path)}", *map(word, r.image.options), *binds)
    binds = f"--bind {word(','.join(r.image.binds))}"
    return (f"{word(r.image.command)} exec", *map(word, r.image.options), binds, word(r.image.path))


def _end(r: Request, system: System) -> str:
    if not r.requeue:
        return 'exit "$status"\n'
    return paragraph(
        f"{EXIT_REQUEUE}: the run stopped in good order before its last step, to be started again.",
        *_lost(system),
        f"if [[ $status == {EXIT_REQUEUE} ]]; then",
        "    again",
        "fi",
        'exit "$status"',
    )


def _lost(system: System) -> tuple[str, ...]:
    """Ranks may fail because of a lost node long before Slurm misses it, and then the job would just have failed."""
    if system is not _SLURM:
        return ()
    every = ("timeout", str(ANSWER_SECONDS), "srun --mpi=none", '--nodes="$SLURM_JOB_NUM_NODES"')
    every += ('--ntasks="$SLURM_JOB_NUM_NODES"', "--ntasks-per-node=1 --cpus-per-task=1 true")
    known = " && ".join(f"$status != {code}" for code in (EXIT_DONE, EXIT_USAGE, EXIT_REQUEUE))
    return (
        "# So is one that failed while a node of the job does not answer any more, which Slurm may not know yet.",
        command((f"if [[ {known} ]] && !", *every), end="; then"),
        "    echo 'a node of the job does not answer' >&2",
        f"    status={EXIT_REQUEUE}",
        "fi",
    )


# ---- launchers -----------------------------------------------------------------------------------------------------


def _srun(r: Request) -> Iterator[str]:
    yield "srun"
    if r.spares:
        yield from (f"--nodes={r.nodes}", f"--ntasks={r.tasks}", '--nodelist="$(paste -sd, "$nodes")"')
    if r.cpus_per_task is not None:
        yield '--cpus-per-task="$SLURM_CPUS_PER_TASK"'
    if r.mpi:
        yield f"--mpi={word(r.mpi)}"
    yield "--kill-on-bad-exit=1"
    yield from map(word, r.launch)


def _mpirun(r: Request) -> Iterator[str]:
    yield 'mpirun -n "$SLURM_NTASKS"' if r.system == "slurm" else f"mpirun -n {r.tasks}"
    yield from map(word, r.launch or UNBOUND)


def _mpiexec(r: Request) -> Iterator[str]:
    yield f"mpiexec -n {r.tasks} --ppn {r.tasks_per_node}"
    yield from map(word, r.launch)


def _flux_run(r: Request) -> Iterator[str]:
    yield from ("flux run", f"--nodes={r.nodes}", f"--ntasks={r.tasks}")
    if r.cpus_per_task is not None:
        yield f"--cores-per-task={r.cpus_per_task}"
    if r.gpus_per_node:
        yield "--gpus-per-task=1"
    yield from map(word, r.launch)


def _ibrun(r: Request) -> Iterator[str]:
    yield "ibrun"
    yield from map(word, r.launch)


LAUNCHERS: dict[str, Callable[[Request], Iterator[str]]] = {
    "srun": _srun,
    "mpirun": _mpirun,
    "mpiexec": _mpiexec,
    "flux run": _flux_run,
    "ibrun": _ibrun,
}
