"""The command line: one file a command family. Each command reads, calls one function, and prints.

Nothing heavy is imported until a command runs, so that ``hpctrain --help`` answers at once.
"""

from __future__ import annotations

import sys

import typer

from hpctrain import __version__
from hpctrain.cli import bench, ckpt, data, doctor, knobs, plan, train
from hpctrain.errors import HpctrainError

app = typer.Typer(
    name="hpctrain",
    help="Train large language models on supercomputers.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("knobs")(knobs.knobs)
app.command("doctor")(doctor.doctor)
app.add_typer(data.app, name="data", help="Text to tokens.")
app.add_typer(ckpt.app, name="ckpt", help="Look into checkpoints.")
app.add_typer(bench.app, name="bench", help="Time what training does: collectives, a step, checkpoints.")


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        print(f"hpctrain {__version__}")
        raise typer.Exit()


def main() -> None:
    """Run the command line; errors that a user can mend are told without a traceback, once for all ranks."""
    try:
        app(prog_name="hpctrain")
    except HpctrainError as error:
        _tell(error)
        sys.exit(error.exit_code)


def _tell(error: HpctrainError) -> None:
    from hpctrain.cluster.launcher import first_rank

    if first_rank():
        print(f"hpctrain: {error}", file=sys.stderr, flush=True)
