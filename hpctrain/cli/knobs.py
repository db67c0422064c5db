"""``hpctrain knobs``: what can be set, as a table, as JSON, or as the page of the documentation."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from hpctrain.cli.options import AsJson


def knobs(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the page of the documentation.")] = False,
) -> None:
    """List every key of a configuration with what it means."""
    from rich.console import Console
    from rich.table import Table

    rows = _rows()
    if as_json:
        print(json.dumps(rows, indent=2))
    elif markdown:
        print(page(rows), end="")
    else:
        table = Table("key", "value", "default", "meaning")
        for row in rows:
            table.add_row(row["key"], row["value"], _default(row), row["meaning"])
        Console().print(table)


def _rows() -> list[dict[str, Any]]:
    from hpctrain.config import defaults, kinds
    from hpctrain.config import knobs as meanings

    values, words = defaults(), kinds()
    return [
        {"key": key, "value": words[key], "default": values[key], "meaning": text} for key, text in meanings().items()
    ]


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
        table = "".join(map(_line, own))
        about = " ".join((field.annotation.__doc__ or "").split())
        sections.append(f"\n## {name}\n\n{about}\n\n| key | value | default | meaning |\n|---|---|---|---|\n{table}")
    return HEAD + "".join(sections)


def _line(row: dict[str, Any]) -> str:
    default = f"`{_default(row)}`" if _default(row) else ""
    meaning = row["meaning"].replace("``", "`")
    return f"| `{row['key']}` | {row['value']} | {default} | {meaning} |\n"
