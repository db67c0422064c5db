"""``hpctrain ckpt``: look into checkpoints, check, compare and convert them, and bring weights in and out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli import ckpt_files, hub
from hpctrain.cli.bar import bar
from hpctrain.cli.options import AsJson

if TYPE_CHECKING:
    from rich.table import Table

    from hpctrain.checkpoint.format import Slot
    from hpctrain.comm.group import Group

app = typer.Typer(no_args_is_help=True)
app.command("export")(hub.export)
app.command("import")(hub.bring)

LINE = 100
WIDE = 1000


app.command("verify")(ckpt_files.verify)
app.command("diff")(ckpt_files.diff)
app.command("convert")(ckpt_files.convert)
app.command("reshard", help=ckpt_files.RESHARD)(ckpt_files.convert)  # what people look for under that name


@app.callback()
def _ckpt() -> None:
    """Look into checkpoints, check, compare and convert them, and bring weights in and out."""


@app.command("inspect")
def inspect(
    file: ckpt_files.File,
    tensor: Annotated[
        str | None, typer.Option(help="Show this tensor only; a shell pattern shows several, e.g. 'optim/*/norm.*'.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Read the tensors shown; say how they are spread.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what is inside a checkpoint: step, attributes, and each tensor's name, dtype, shape and size."""
    from hpctrain.checkpoint import inspect as inside

    with ckpt_files.ranks() as group:
        path, index = ckpt_files.file_of(file, group)
        slots = inside.select(path, index, tensor)
        rows = [asdict(slot) | {"bytes": slot.nbytes} for slot in slots]
        if stats:
            found = _stats(path, slots, index.table, group)
            rows = [row | one for row, one in zip(rows, found, strict=True)]
        report = {"file": str(path), "step": index.step, "attributes": index.attributes, "tensors": rows}
        ckpt_files.say(group, report, as_json, lambda: _shown(report))


def _stats(path: Path, slots: Sequence[Slot], table: int | None, group: Group) -> list[dict[str, Any]]:
    """How the numbers of tensors are spread; the ranks of ``group`` take them in turn."""
    from hpctrain.checkpoint.inspect import all_stats
    from hpctrain.checkpoint.together import together

    mine = slots[group.rank :: group.size]
    with bar("read", group.leads, group.size) as tell:
        found = together(group, lambda: all_stats(path, mine, table, tell), f"reading {path}")
    told = group.collect([asdict(one) for one in found])
    return [told[number % group.size][number // group.size] for number in range(len(slots))]


def _shown(report: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.markup import escape

    rows = report["tensors"]
    total = sum(row["bytes"] for row in rows)
    # Names are for copying: none is ever cut short. No colors: to ranks of mpirun any file looks like a terminal.
    console = Console(width=WIDE, color_system=None)
    with console.capture() as told:
        for key, value in report["attributes"].items():
            console.print(f"  {escape(key)}: {escape(_short(json.dumps(value)))}", highlight=False)
        if rows:
            console.print(_table(rows))
    return f"{report['file']}: step {report['step']}, {len(rows)} tensors, {_bytes(total)}\n{told.get()}".rstrip("\n")


def _table(rows: list[dict[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table

    stats = [key for key in rows[0] if key not in ("name", "dtype", "shape", "bytes", "offset", "first")]
    table = Table("name", "dtype", "shape", box=box.SIMPLE_HEAD)
    for key in ("size", *(key.replace("_", " ") for key in stats)):
        table.add_column(key, justify="right")
    for row in rows:
        shape = " x ".join(map(str, row["shape"])) or "scalar"
        table.add_row(row["name"], row["dtype"], shape, _bytes(row["bytes"]), *(_number(row[key]) for key in stats))
    return table


def _short(text: str) -> str:
    return text if len(text) <= LINE else text[: LINE - 3] + "..."


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _bytes(count: int) -> str:
    """In the largest unit of which there is at least one."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
