"""``hpctrain ckpt export`` and ``import``: weights to and from model folders of Hugging Face, and torch DCP."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hpctrain.cli.bar import bar
from hpctrain.cli.ckpt_files import File, ranks
from hpctrain.cli.options import AsJson
from hpctrain.errors import UsageError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
Dtype = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="The numbers' format there; as they are where not given."),
]


def export(
    checkpoint: File,
    out_dir: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    to: Annotated[
        Literal["hf", "dcp"],
        typer.Option(help="hf: config.json and safetensors of Hugging Face; dcp: torch.distributed.checkpoint."),
    ] = "hf",
    shard_size: Annotated[str, typer.Option(help="The most bytes of a file of safetensors, e.g. 500MB, 2GiB.")] = "5GB",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights for Hugging Face or torch DCP, on all ranks: start it alone, or with mpirun or srun.

    A rank has one tensor in memory at a time, of dcp some 256 MiB.
    """
    limit = _size(shard_size)
    with ranks() as group, bar("export", group.leads, group.size, lasting=True) as tell:
        from hpctrain.checkpoint import dcp_write, hub

        if to == "dcp":
            made = dcp_write.export(checkpoint, out_dir, group, dtype, tell)
        else:
            made = hub.export(checkpoint, out_dir, group, limit, dtype, tell)
        if group.leads:
            _print(made, as_json, _exported(made))


def bring(
    folder: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors, or one of torch DCP.")],
    out: Annotated[Path, typer.Argument(help="The checkpoint to make, NAME.h5; its [model] is put into NAME.toml.")],
    sequence: Annotated[
        int | None, typer.Option(help="Tokens in a sample, where not the longest that the model tells.", min=1)
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Take these alone, a shell pattern of names there. Repeatable.")
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(help="What names there become, * being any text: app.*=*. Repeatable.", metavar="THERE=HERE"),
    ] = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write a model of Hugging Face, or tensors of torch DCP, as a checkpoint of weights, on all ranks.

    A folder of DCP is known by its .metadata. With a config.json beside, its tensors are those of that model, by the
    names of transformers, Megatron-Core or Llama's own code; without one they are taken as they are. No pickle is run.
    """
    names = dict(map(_renaming, rename or ()))
    with ranks() as group, bar("import", group.leads, group.size, lasting=True) as tell:
        from hpctrain.checkpoint import adopt, hub

        patterns = tuple(only or ("*",))
        if adopt.alone(folder, group):
            _check_sequence(sequence, folder)
            made = adopt.adopt(folder, out, group, patterns, names, dtype, tell)
        else:
            made = hub.bring(folder, out, group, sequence, dtype, tell, patterns, names)
        if group.leads:
            _print(made, as_json, _brought(made))


def _exported(made: dict[str, Any]) -> str:
    if "architecture" not in made:
        return f"{made['files']} files of torch DCP"
    return f"{len(made['files'])} files of {made['architecture']}"


def _brought(made: dict[str, Any]) -> str:
    if "family" in made:
        return f"a model of the family {made['family']}, as {made['config']} tells"
    left = len(made["left_out"])
    return "taken as they are" + f", without {left} that are no tensors" * bool(left)


def _check_sequence(sequence: int | None, folder: Path) -> None:
    if sequence is not None:
        what = f"--sequence {sequence}, and {folder} has no config.json"
        raise UsageError(what, "tensors that are taken as they are make no [model]", "leave it out")


def _renaming(text: str) -> tuple[str, str]:
    there, is_one, here = text.partition("=")
    if not (there and is_one and here):
        raise UsageError(f"--rename {text} is no pair of names", "", "give the name there and the name here: app.*=*")
    return there, here


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if found and found[2].upper() in UNITS and (size := int(float(found[1]) * UNITS[found[2].upper()])) > 0:
        return size
    raise UsageError(f"--shard-size {text} is no size", "", "give bytes, or a unit as in 500MB or 2GiB")


def _print(made: dict[str, Any], as_json: bool, what: str) -> None:
    if as_json:
        print(json.dumps(made, indent=2))
    else:
        print(f"{made['to']}: {what}; {made['tensors']} tensors, {made['bytes']:,} bytes")
