"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.errors import UsageError

ConfigPath = Annotated[Path, typer.Argument(help="The run's configuration, a TOML file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Lay a value over the file, e.g. train.steps=100. Repeatable.", metavar="KEY=VALUE"),
]
Vocabulary = Annotated[
    int | None, typer.Option(help="The tokenizer's tokens, where the data does not tell them.", min=1)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def three_times(words: str) -> tuple[float, float, float]:
    """What F, I and W take, of ``--costs F,I,W``; UsageError for anything else."""
    try:
        forward, input, weight = map(float, words.split(","))
    except ValueError:
        why = "these are the times of a forward, of the gradient of its input and of that of its weights"
        raise UsageError(f"--costs {words}", why, "give three numbers with commas, such as 1,1,1") from None
    return forward, input, weight
