"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigPath = Annotated[Path, typer.Argument(help="The run's configuration, a TOML file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Lay a value over the file, e.g. train.steps=100. Repeatable.", metavar="KEY=VALUE"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
