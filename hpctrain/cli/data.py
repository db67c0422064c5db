"""``hpctrain data``: text to tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hpctrain.cli.options import AsJson

if TYPE_CHECKING:
    from hpctrain.cluster.world import World
    from hpctrain.comm.group import Group
    from hpctrain.data.tokens import Description

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _data() -> None:
    """Text to tokens."""


@app.command()
def prepare(
    source: Annotated[list[str], typer.Argument(help="Text files, folders or JSONL; {stdlib} is Python's own.")],
    out: Annotated[Path, typer.Option(help="Where OUT.bin, OUT.idx and OUT.json go.", metavar="PREFIX")],
    tokenizer: Annotated[str, typer.Option(help="bytes, bpe:N, or a Hugging Face tokenizer.json.")] = "bytes",
    pattern: Annotated[str, typer.Option(help="Which files of a folder are read.")] = "*.txt",
    json_key: Annotated[str, typer.Option(help="Where the text lies in the objects of JSONL.")] = "text",
    eod: Annotated[str | None, typer.Option(help="The token that ends a document, where its name is unusual.")] = None,
    on_error: Annotated[
        Literal["fail", "skip"], typer.Option(help="What becomes of a document that cannot be read.")
    ] = "fail",
    json: AsJson = False,
) -> None:
    """Turn text into a token file pair, on all ranks: start it alone, or with mpirun or srun."""
    from hpctrain.cluster.world import World
    from hpctrain.data.prepare import Request, prepare_shown

    request = Request(tuple(source), tokenizer, pattern, json_key, eod, on_error)
    with World.join() as world:
        group = group_of(world)
        made = prepare_shown(request, out, group, sys.stderr)
        group.close()
        if world.leads:
            print(made.text() if json else _told(made, out), end="")


def group_of(world: World) -> Group:
    """All ranks as a group; one alone needs no MPI."""
    from hpctrain.comm.group import SoloGroup

    if world.comm is None:
        return SoloGroup()
    from hpctrain.comm.mpi import MpiGroup

    return MpiGroup(world.comm)


def _told(made: Description, out: Path) -> str:
    left_out = f"; left out: {made.empty} empty, {made.skipped} not readable" if made.empty + made.skipped else ""
    return (
        f"{out}.bin: {made.tokens:,} tokens in {made.documents:,} documents of {made.files:,} files{left_out}\n"
        f'train on it with  --set \'data.sources=[{{path="{out}"}}]\'  (vocabulary {made.vocabulary})\n'
    )
