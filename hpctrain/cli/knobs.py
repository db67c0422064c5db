"""``hpctrain knobs``: what can be set, as a table, as JSON, or as the page of the documentation."""

from __future__ import annotations

import json
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from hpctrain.cli.options import AsJson

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from hpctrain.config import Section


def knobs(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of the documentation.")] = False,
) -> None:
    """List every key of a configuration with what it means."""
    from rich.console import Console
    from rich.table import Table

    from hpctrain.config import Config

    rows = rows_of(Config)
    if as_json:
        print(json.dumps(rows, indent=2))
    elif markdown:
        print(page(rows), end="")
    else:
        table = Table("key", "value", "default", "meaning")
        for row in rows:
            table.add_row(row["key"], row["value"], _default(row), row["meaning"])
        Console().print(table)


def rows_of(model: type[Section]) -> list[dict[str, Any]]:
    """What can be set in a file of this kind: keys with what they take, their defaults and meanings."""
    from hpctrain.config import defaults, fields
    from hpctrain.config import knobs as meanings

    values, texts = defaults(model), meanings(model)
    return [
        {"key": key, "value": kind(field), "default": values[key], "meaning": texts[key]}
        for key, field in fields(model)
    ]


KINDS = {int: "whole number", float: "number", str: "text", bool: "true or false", NoneType: "left out"}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def kind(field: FieldInfo) -> str:
    """What the value of a key may be, in words."""
    return ", ".join((_kind(field.annotation), *_bounds(field)))


def _kind(annotation: Any) -> str:
    from hpctrain.config import is_section

    if annotation in KINDS:
        return KINDS[annotation]
    if is_section(annotation):
        return "tables"
    parts = [part for part in get_args(annotation) if part is not Ellipsis]
    if get_origin(annotation) in (tuple, dict):
        return f"{'list' if get_origin(annotation) is tuple else 'table'} of {_kind(parts[-1])}"
    return " or ".join(f'"{part}"' if isinstance(part, str) else _kind(part) for part in parts)


def _bounds(field: FieldInfo) -> list[str]:
    limits = [(BOUNDS[name], getattr(one, name)) for one in field.metadata for name in BOUNDS if hasattr(one, name)]
    return [f"{words} {number:g}" for words, number in limits]


def _default(row: dict[str, Any]) -> str:
    return "" if row["default"] is None else json.dumps(row["default"])


HEAD = """# Configuration

A run is described by a TOML file. Every key has a default, so a file says only what differs; `--set section.key=value`
lays a value over the file, the last one winning. A value is written as in TOML, and a bare word is text. A key that
does not exist is refused, with the nearest one that does. `[]` stands for each table of a list.

This page is what `hpctrain knobs --markdown` prints.
"""


def page(rows: list[dict[str, Any]]) -> str:
    """The reference page of all keys: a table for each section."""
    from hpctrain.config import Config

    sections = []
    for name, field in Config.model_fields.items():
        own = [row for row in rows if row["key"].startswith(f"{name}.")]
        table = "".join(map(line, own))
        about = " ".join((field.annotation.__doc__ or "").split())
        sections.append(f"\n## {name}\n\n{about}\n\n| key | value | default | meaning |\n|---|---|---|---|\n{table}")
    return HEAD + "".join(sections)


def line(row: dict[str, Any]) -> str:
    """A key as a line of a table in a page."""
    default = f"`{_default(row)}`" if _default(row) else ""
    meaning = row["meaning"].replace("``", "`")
    return f"| `{row['key']}` | {row['value']} | {default} | {meaning} |\n"
