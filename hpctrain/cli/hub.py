"""``hpctrain ckpt export`` and ``import``: weights to and from model folders of Hugging Face."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hpctrain.cli.bar import bar
from hpctrain.cli.ckpt_files import ranks
from hpctrain.cli.options import AsJson
from hpctrain.errors import UsageError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
Dtype = Annotated[
    Literal["float64", "float32", "bfloat16", "float16"] | None,
    typer.Option(help="The numbers' format there; as they are where not given."),
]


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint file, or a folder, whose newest one is taken.")],
    out_dir: Annotated[Path, typer.Argument(help="A new or empty folder for config.json and safetensors.")],
    shard_size: Annotated[str, typer.Option(help="The most bytes of a file, e.g. 500MB or 2GiB.")] = "5GB",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as a Hugging Face model, on all ranks: start it alone, or with mpirun or srun."""
    limit = _size(shard_size)
    with ranks() as group, bar("export", group.leads, group.size, lasting=True) as tell:
        from hpctrain.checkpoint.hub import export as run

        made = run(checkpoint, out_dir, group, limit, dtype, tell)
        if group.leads:
            _print(made, as_json, f"{len(made['files'])} files of {made['architecture']}")


def bring(
    hf_dir: Annotated[Path, typer.Argument(help="A folder with config.json and safetensors.")],
    out: Annotated[Path, typer.Argument(help="The checkpoint to make, NAME.h5; its [model] is put into NAME.toml.")],
    sequence: Annotated[
        int | None, typer.Option(help="Tokens in a sample, where not the longest that the model tells.", min=1)
    ] = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Write a Hugging Face model as a checkpoint of weights, on all ranks: alone, or with mpirun or srun."""
    with ranks() as group, bar("import", group.leads, group.size, lasting=True) as tell:
        from hpctrain.checkpoint.hub import bring as run

        made = run(hf_dir, out, group, sequence, dtype, tell)
        if group.leads:
            _print(made, as_json, f"a model of the family {made['family']}, as {made['config']} tells")


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
