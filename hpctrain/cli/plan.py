"""``hpctrain plan``: what a run would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.options import AsJson, ConfigPath, Overrides, Vocabulary

if TYPE_CHECKING:
    from hpctrain.config import Config


Machine = Annotated[
    str | None, typer.Option(help="A machine's name, or the path of a machine file; job.machine where left out.")
]
Ranks = Annotated[int | None, typer.Option(help="How many ranks the run would have.", min=1)]
Nodes = Annotated[int | None, typer.Option(help="Nodes of the machine; job.nodes where left out.", min=1)]
Gpus = Annotated[int | None, typer.Option(help="Devices of the machine, instead of its nodes.", min=1)]


def plan(
    config: ConfigPath,
    ranks: Ranks = None,
    machine: Machine = None,
    nodes: Nodes = None,
    gpus: Gpus = None,
    vocabulary: Vocabulary = None,
    show_placement: Annotated[bool, typer.Option(help="Say which rank is where, and what crosses nodes.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Draw the placement: FILE.svg.", metavar="FILE")] = None,
    set: Overrides = None,  # noqa: A002 - the option's name
    as_json: AsJson = False,
) -> None:
    """Decide and show; needs neither torch nor MPI nor the machine."""
    from hpctrain.config import load
    from hpctrain.plan.fit import fit
    from hpctrain.plan.machines import ask, named
    from hpctrain.plan.plan import decide

    chosen = load(config, tuple(set or ()))
    there = named(machine or chosen.job.machine)
    topology = ask(there, chosen.job, nodes, gpus, ranks)
    found = fit(decide(chosen, topology, vocabulary or tokens(chosen)), chosen, there)
    if svg:
        from hpctrain.plan.placement_picture import save

        save(svg, topology, found.placement, f"{chosen.run.name}: {found.mesh} on {topology.describe()}")
    if as_json:
        print(json.dumps(found.to_json(), indent=2))
        return
    print(found.show())
    if show_placement:
        from hpctrain.plan.placement_text import text

        print(text(topology, found.placement))


def tokens(config: Config) -> int:
    """The tokenizer's number of tokens, as far as it is known before the text is prepared."""
    from hpctrain.data.tokens import describe
    from hpctrain.errors import ConfigError

    if config.model.vocabulary != "auto":
        return config.model.vocabulary
    if not config.data.sources and config.data.text:
        return _tokens_of_text(config)
    described = [found.vocabulary for source in config.data.sources if (found := describe(source.path))]
    if not described:
        what = 'model.vocabulary = "auto", and no data tells how many tokens its tokenizer has'
        why = "a PREFIX.json beside a token file would"
        raise ConfigError(what, why, "give --vocabulary N, or set model.vocabulary to a number")
    return max(described)


def _tokens_of_text(config: Config) -> int:
    """The tokens of the tokenizer that text will be prepared with: of ``bpe:N``, at most N."""
    from hpctrain.data.tokenizer import bpe_size, load

    return bpe_size(config.data.tokenizer) or load(config.data.tokenizer).vocabulary
