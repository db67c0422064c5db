"""``hpctrain plan`` shows what a run would do; ``hpctrain knobs`` lists what can be set."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hpctrain.cli.options import AsJson, ConfigPath, Overrides


def plan(
    config: ConfigPath,
    ranks: Annotated[int, typer.Option(help="How many ranks the run would have.", min=1)] = 1,
    vocabulary: Annotated[int, typer.Option(help="The tokenizer's tokens, where model.vocabulary is auto.")] = 0,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Decide and show; needs neither torch nor MPI nor the machine."""
    from hpctrain.config import load
    from hpctrain.plan.plan import decide
    from hpctrain.plan.topology import Topology

    found = decide(load(config, tuple(set or ())), Topology(("node",) * ranks), vocabulary)
    print(json.dumps(found.to_json(), indent=2) if as_json else found.show())


def knobs(as_json: AsJson = False) -> None:
    """List every key of a configuration with what it means."""
    from rich.console import Console
    from rich.table import Table

    from hpctrain.config import defaults
    from hpctrain.config import knobs as all_knobs

    rows = [{"key": key, "default": defaults()[key], "meaning": text} for key, text in all_knobs().items()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("key", "default", "meaning")
    for row in rows:
        table.add_row(row["key"], json.dumps(row["default"]), row["meaning"])
    Console().print(table)
