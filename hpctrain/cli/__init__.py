"""The command line: one file a command family. Each command reads, calls one function, and prints.

Nothing heavy is imported until a command runs, so that ``hpctrain --help`` answers at once.
"""

from __future__ import annotations

import sys
import time
from typing import NoReturn

import typer

from hpctrain import __version__
from hpctrain.cli import bench, ckpt, data, doctor, draw, knobs, machines, plan, preflight, queue, submit, train
from hpctrain.errors import HpctrainError

GRACE_SECONDS = 2.0
WRONG_USE = typer.BadParameter.__base__  # click's UsageError: of click, or of the copy in newer releases of typer

app = typer.Typer(
    name="hpctrain",
    help="Train large language models on supercomputers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("submit")(submit.submit)
app.command("knobs")(knobs.knobs)
app.command("machines")(machines.machines)
app.command("doctor")(doctor.doctor)
app.command("preflight")(preflight.preflight)
app.command("draw")(draw.draw)
app.command("status")(queue.status)
app.command("logs")(queue.logs)
app.command("cancel")(queue.cancel)
app.add_typer(data.app, name="data", help="Text to tokens.")
app.add_typer(ckpt.app, name="ckpt", help="Look into checkpoints, check and convert them, bring weights in and out.")
app.add_typer(bench.app, name="bench", help="Time what training does: collectives, a step, checkpoints.")


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        print(f"hpctrain {__version__}")
        raise typer.Exit()


def main() -> None:
    """Run the command line; errors that a user can mend are told without a traceback, once for all ranks."""
    from hpctrain.cluster.launcher import first_rank

    speaks = True
    try:
        speaks = first_rank()
        sys.exit(app(prog_name="hpctrain", standalone_mode=speaks))  # else a wrong option is raised, and not told
    except HpctrainError as error:
        if speaks:
            print(f"hpctrain: {error}", file=sys.stderr, flush=True)
        _leave(error.exit_code, speaks)
    except WRONG_USE as error:
        _leave(error.exit_code, speaks)


def _leave(code: int, speaks: bool) -> NoReturn:
    """Exit, but not before the rank that speaks has spoken: launchers end all ranks when one fails."""
    if not speaks:
        time.sleep(GRACE_SECONDS)
    sys.exit(code)
