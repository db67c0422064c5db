"""``hpctrain ckpt verify``, ``diff`` and ``convert``: commands that read whole files, alone or on many ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hpctrain.cli.bar import bar
from hpctrain.cli.options import AsJson
from hpctrain.errors import EXIT_FAILED, UsageError

if TYPE_CHECKING:
    from hpctrain.checkpoint.format import Index
    from hpctrain.comm.group import Group

File = Annotated[Path, typer.Argument(help="A checkpoint file, or a folder of them or of a run: its newest.")]


def verify(file: File, as_json: AsJson = False) -> None:
    """Read a whole checkpoint and compare it with its checksums. Exit status 1 where a byte is damaged."""
    from hpctrain.checkpoint.verify import verify as run

    with ranks() as group:
        path, index = file_of(file, group)
        with bar("verify", group.leads, group.size) as tell:
            damages = run(path, index, group, tell)
        report = {"file": str(path), "step": index.step, "whole": not damages, "damages": [asdict(d) for d in damages]}
        say(group, report, as_json, lambda: _verified(report, len(index.slots), index))
    raise typer.Exit(EXIT_FAILED if damages else 0)


def diff(
    one: File,
    other: File,
    tensor: Annotated[str | None, typer.Option(help="Compare these only, a shell pattern such as 'model/*'.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how two checkpoints differ, tensor by tensor. Exit status 1 where they do."""
    from hpctrain.checkpoint.diff import diff as run

    with ranks() as group:
        sides = file_of(one, group), file_of(other, group)
        with bar("diff", group.leads, group.size) as tell:
            found = run(*sides, group, tensor, tell)
        steps = {"one": _side(sides[0]), "other": _side(sides[1])}
        report = steps | {"equal": not found, "differences": [asdict(difference) for difference in found]}
        say(group, report, as_json, lambda: _differing(report))
    raise typer.Exit(EXIT_FAILED if found else 0)


RESHARD = """Write a checkpoint anew, as ckpt convert does: the two are one command.

A checkpoint holds whole tensors, so it needs no resharding: any number of ranks loads it, under any mesh, as it is.
"""


def convert(
    file: File,
    out: Annotated[Path, typer.Argument(help="The file to write; nothing may have that name.")],
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32", "fp64"] | None, typer.Option(help="What floating-point weights become.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Take these only: a shell pattern of new names, e.g. 'model/*'. Repeatable."),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(help="Give another name, e.g. 'model/h.*=model/blocks.*'. Repeatable.", metavar="OLD=NEW"),
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="The same as --only 'model/*'.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint anew: some of it, under other names, its weights in another dtype. Checked as it is read."""
    from hpctrain.checkpoint.convert import Change
    from hpctrain.checkpoint.convert import convert as run

    change = Change(dtype, (*(only or ()), *["model/*"] * weights_only) or ("*",), _renames(rename or ()))
    with ranks() as group:
        path, index = file_of(file, group)
        with bar("convert", group.leads, group.size) as tell:
            made = asdict(run(path, index, out, group, change, tell))
        lost = f"\n{made['overflowed']} numbers were too large for {dtype} and are infinite" * bool(made["overflowed"])
        told = f"made {out}: step {made['step']}, {made['tensors']} tensors, {made['bytes']:,} bytes{lost}"
        say(group, made, as_json, lambda: told)


def _renames(words: Sequence[str]) -> dict[str, str]:
    found = {old: new for old, _, new in (word.partition("=") for word in words)}
    if not all(found) or not all(found.values()):
        wrong = next(word for word in words if not all(word.partition("=")))
        mend = "give it as OLD=NEW, such as 'model/h.*=model/blocks.*'"
        raise UsageError(f"--rename {wrong} is not two names", "", mend)
    return found


@contextmanager
def ranks() -> Iterator[Group]:
    """All ranks that were started; one alone is a group too."""
    from hpctrain.cli.data import group_of
    from hpctrain.cluster.world import World

    with World.join() as world:
        group = group_of(world)
        yield group
        group.close()


def file_of(file: Path, group: Group) -> tuple[Path, Index]:
    """The file and what it says of itself, as the leading rank found it."""
    from hpctrain.checkpoint.format import Index
    from hpctrain.checkpoint.inspect import find
    from hpctrain.checkpoint.together import led

    def look() -> dict[str, Any]:
        path, index = find(file)
        return {"path": str(path), "index": index.to_json()}

    told = led(group, look, f"looking into {file}")
    return Path(told["path"]), Index.from_json(told["index"])


def say(group: Group, report: dict[str, Any], as_json: bool, text: Callable[[], str]) -> None:
    """Print it once; no rank goes on, and perhaps ends the job with a status, before that."""
    if group.leads:
        print(json.dumps(report, indent=2) if as_json else text(), flush=True)
    group.barrier()


def _verified(report: dict[str, Any], tensors: int, index: Index) -> str:
    lines = [
        f"{d['tensor']}: damaged in bytes {d['first_byte']} to {d['end_byte'] - 1}, elements {d['first_element']} to"
        f" {d['end_element'] - 1}, at byte {d['offset']} of the file"
        for d in report["damages"]
    ]
    total = sum(slot.nbytes for slot in index.slots)
    verdict = f"{len(lines)} damaged ranges" if lines else "every byte is as it was written"
    what = f"{report['file']}: step {report['step']}, {tensors} tensors, {total:,} bytes"
    return "\n".join([*lines, f"{what}: {verdict}"])


def _side(side: tuple[Path, Index]) -> dict[str, Any]:
    return {"file": str(side[0]), "step": side[1].step, "tensors": len(side[1].slots)}


def _differing(report: dict[str, Any]) -> str:
    one, other = report["one"], report["other"]
    lines = [_difference(difference) for difference in report["differences"]]
    verdict = f"{len(lines)} tensors differ" if lines else "equal"
    return "\n".join([*lines, f"{one['file']} (step {one['step']}), {other['file']} (step {other['step']}): {verdict}"])


def _difference(d: dict[str, Any]) -> str:
    if d["one"] is None or d["other"] is None:
        return f"{d['name']}: in the {'second' if d['one'] is None else 'first'} alone, {d['one'] or d['other']}"
    kinds = "" if d["one"] == d["other"] else f"{d['one']} and {d['other']}"
    if d["elements"] is None:
        return f"{d['name']}: {kinds}"
    largest = "" if d["largest"] is None else f", by at most {d['largest']:.6g}"
    values = f"{d['elements']} of {d['of']} elements differ{largest}" if d["elements"] else "equal values"
    return f"{d['name']}: {kinds}{'; ' if kinds else ''}{values}"
