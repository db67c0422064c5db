"""``hpctrain machines``: the machines that are known, and the source of each figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.knobs import line, rows_of
from hpctrain.cli.options import AsJson

if TYPE_CHECKING:
    from hpctrain.plan.machines import Described


def machines(
    name: Annotated[str | None, typer.Argument(help="A machine's name, or the path of a machine file.")] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the tables of the documentation.")] = False,
) -> None:
    """List the machines that are known, or all that is known of one, with its sources."""
    from hpctrain.plan.machines import describe, names

    if name is not None:
        found = describe(name)
        print(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(_sourced(found)))
        return
    rows = [row(known, describe(known)) for known in names()]
    if as_json:
        print(json.dumps(rows, indent=2))
    elif markdown:
        print(page(rows), end="")
    else:
        print("\n".join(_aligned(list(map(_words, rows)))))


def row(name: str, found: Described) -> dict[str, Any]:
    """What the list says of a machine, as plain values."""
    machine = found.machine
    return {
        "name": name,
        "machine": machine.name,
        "nodes": machine.nodes,
        "devices": machine.node.devices,
        "device": machine.device.name,
        "memory_gib": machine.device.memory_gib,
        "tflops": machine.device.tflops.get("bf16"),
        "links": {link.name: link.gb_per_second for link in machine.links},
        "batch": machine.batch.system,
        "values": len(found.values),
        "unchecked": len(found.unchecked),
    }


HEADS = ("name", "nodes", "devices of a node", "bf16 TFLOPS", "GB/s of a device", "batch", "unchecked")


def _words(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the list, as ``HEADS`` names its columns."""
    return (
        row["name"],
        "any" if row["nodes"] is None else f"{row['nodes']:,}",
        f"{row['devices']} x {row['device']}, {row['memory_gib']:g} GiB",
        "" if row["tflops"] is None else f"{row['tflops']:g}",
        ", ".join(f"{name} {rate:g}" for name, rate in row["links"].items()),
        row["batch"],
        f"{row['unchecked']} of {row['values']}",
    )


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
    for words in (HEADS, *rows):
        yield "  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True)).rstrip()


def _sourced(found: Described) -> Iterator[str]:
    """A machine for a person: its file, each value with what stands beside it, and what the tags mean."""
    yield f"{found.path}"
    values = [value for value in found.values if not value.key.startswith("sources.")]
    wide = max(len(value.key) for value in values)
    for value in values:
        beside = " ".join((*(f"[{tag}]" for tag in value.tags), value.word)).strip()
        text = value.value if isinstance(value.value, str) else json.dumps(value.value)
        yield f"{value.key:<{wide}}  {text:<12}  {beside}".rstrip()
    yield ""
    yield from (f"[{tag}] {meaning}" for tag, meaning in found.machine.sources.items())


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The tables of the reference page: all machines, and all keys of a machine file."""
    from hpctrain.plan.machine import Machine

    table = "".join(f"| {' | '.join((f'`{name}`', *words))} |\n" for name, *words in map(_words, rows))
    keys = "".join(map(line, rows_of(Machine)))
    return (
        f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|\n{table}\n"
        f"| key | value | default | meaning |\n|---|---|---|---|\n{keys}"
    )
