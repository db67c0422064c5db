"""Hub: weights to and from a model folder of Hugging Face (``config.json`` and safetensors), on all ranks.

Each rank takes its share of the tensors, neighbours in the files (``carry``). The leading rank alone looks at folders,
lays the files out aside and names them last, so that a folder or a checkpoint is there whole or not at all. No
optimizer state travels, and no pickle is read or written.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint import checksums, disk, format, inspect, keep, safetensors, sources, translate
from hpctrain.checkpoint.carry import Matrix, Move, Place, Source, carry
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.parts import Tell, quiet
from hpctrain.checkpoint.save import sync_file
from hpctrain.checkpoint.state import WEIGHTS
from hpctrain.checkpoint.together import led, together
from hpctrain.comm.group import Group
from hpctrain.config import ModelConfig, parse
from hpctrain.errors import CheckpointError
from hpctrain.plan import hub, hub_config
from hpctrain.plan.hub import Theirs
from hpctrain.plan.weights import ModelShape, weights

SHARD_BYTES = 5_000_000_000
EMBEDDING = WEIGHTS + "embed.tokens"
CONFIG = "config.json"
TOLD = 10  # faults that are told one by one


def export(
    source: Path,
    out: Path,
    group: Group,
    shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
    tell: Tell = quiet,
) -> dict[str, Any]:
    """Write the weights of a checkpoint (a file, or the newest of a folder) as a model folder; gives what was made.

    ``out`` is new, or an empty folder. A file has at most ``shard_bytes``, or one tensor. Numbers keep their dtype
    where none is given. What is read is checked. Collective: all ranks raise CheckpointError (DamagedError where the
    checkpoint is damaged) or ConfigError where it cannot be done, and then nothing is left.
    """
    told = led(group, lambda: _look(source, out), f"looking at {source}")
    path, index, model = Path(told["path"]), Index.from_json(told["index"]), parse({"model": told["model"]}).model
    slots = _ours(path, index, model)
    vocabulary = slots[EMBEDDING].shape[0]
    config = hub_config.theirs(model, vocabulary, dtype or slots[EMBEDDING].dtype)
    wanted = hub.tensors(hub_config.architecture(config).naming, ModelShape.of(model, vocabulary))
    files = _files(wanted, slots, shard_bytes, dtype)
    made = led(group, lambda: _lay_out(out, files), f"laying out {out}")
    aside = Path(made["aside"])
    try:
        places = {name: Place(path, slot, index.table) for name, slot in slots.items()}
        moves = [_outwards(one, places, aside, made["slots"][one.name]) for one in wanted]
        together(group, lambda: carry(moves, group.size, group.rank, tell), f"writing {out}")
        led(group, lambda: _publish_folder(aside, out, files, config), f"publishing {out}")
    except BaseException:
        if group.leads:  # without talking: after an error others may not answer
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return _report(path, out, config, wanted, moves) | {"step": index.step, "files": list(files)}


def bring(
    folder: Path,
    out: Path,
    group: Group,
    sequence: int | None = None,
    dtype: str | None = None,
    tell: Tell = quiet,
    only: Iterable[str] = ("*",),
    rename: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write the weights of a model folder as a checkpoint of step 0, and its ``[model]`` beside; gives what was made.

    The folder's tensors are in safetensors or in torch DCP; ``only`` and ``rename`` as in ``sources.opened``.
    ``out`` is a new file that ends in ``.h5``. ``sequence`` is the length of a sample, where it is not to be the
    longest that the model tells. Numbers keep their dtype where none is given. Collective; errors as in ``export``,
    and ConfigError for a model that ours cannot compute.
    """
    told = led(group, lambda: _look_there(folder, out), f"looking at {folder}")
    config, model = told["config"], hub_config.ours(told["config"], sequence)
    found = sources.opened(folder, told, only, rename)
    if told["kind"] == "dcp":
        found = translate.translated(found, _names(config, model), ModelShape.of(model, model.vocabulary))
    wanted = _theirs(folder, config, model, found)
    slots = _targets(wanted, found, dtype)
    begun = led(group, lambda: _begin(out, slots, model, config), f"laying out {out}")
    aside = Path(begun["aside"])
    try:
        laid = [_slot(slot) for slot in begun["slots"]]
        placed = {slot.name: Place(aside, slot) for slot in laid}
        moves = [_inwards(some, found, placed) for some in hub.stacks(wanted)]
        sums = np.zeros(sum(slot.blocks for slot in slots), np.uint64)
        together(group, lambda: carry(moves, group.size, group.rank, tell, sums), f"writing {out}")
        sums = checksums.joined(sums, group)
        led(group, lambda: _publish_file(aside, out, model, laid, sums), f"publishing {out}")
    except BaseException:
        if group.leads:
            aside.unlink(missing_ok=True)
        raise
    made = {"family": model.family, "config": str(out.with_suffix(".toml"))}
    return _report(folder, out, config, wanted, moves) | made


# ---- values ----------------------------------------------------------------------------------------------------------


def _ours(path: Path, index: Index, model: ModelConfig) -> dict[str, Slot]:
    """The weights in a checkpoint; CheckpointError where they are not those of its model."""
    slots = {slot.name: slot for slot in index.slots if slot.name.startswith(WEIGHTS)}
    if EMBEDDING not in slots:
        raise CheckpointError(f"{path} has no {EMBEDDING}", "it is no checkpoint of one of our models")
    shape = ModelShape.of(model, slots[EMBEDDING].shape[0])
    wanted = {WEIGHTS + weight.name: weight.shape for weight in weights(shape)}
    told = [
        f"{name}: {list(slots[name].shape) if name in slots else 'missing'}, its model makes it {list(size)}"
        for name, size in wanted.items()
        if name not in slots or slots[name].shape != size
    ]
    told += [f"{name}: no part of its model" for name in slots if name not in wanted]
    _raise_faults(path, told, "its attribute config tells of another model; hpctrain ckpt inspect shows it")
    return slots


def _theirs(
    folder: Path, config: dict[str, Any], model: ModelConfig, found: Mapping[str, Source]
) -> tuple[Theirs, ...]:
    """The tensors of a folder that are wanted; CheckpointError where they are not those of its config."""
    naming, shape = hub_config.architecture(config).naming, ModelShape.of(model, model.vocabulary)
    wanted = hub.headless(naming, hub.tensors(naming, shape), found)
    told = hub.faults(naming, shape, wanted, {name: one.slot.shape for name, one in found.items()})
    _raise_faults(folder, told, f"take the weights and the {CONFIG} of one model")
    return wanted


def _names(config: dict[str, Any], model: ModelConfig) -> list[str]:
    naming, shape = hub_config.architecture(config).naming, ModelShape.of(model, model.vocabulary)
    return [one.name for one in hub.tensors(naming, shape)]


def _raise_faults(path: Path, faults: Sequence[str], mend: str) -> None:
    if faults:
        more = [f"and {len(faults) - TOLD} more"] if len(faults) > TOLD else []
        told = "\n  ".join([*faults[:TOLD], *more])
        raise CheckpointError(f"{path}: {len(faults)} tensors are not those of its model", told, mend)


def _files(wanted: Sequence[Theirs], slots: Mapping[str, Slot], limit: int, dtype: str | None) -> dict[str, list[Slot]]:
    """The tensors of each file that is to be made; their offsets are still to be found."""
    made = [Slot(one.name, one.shape, dtype or slots[_name(one.parts[0])].dtype) for one in wanted]
    split = hub.shards([slot.nbytes for slot in made], limit)
    if len(split) == 1:
        return {safetensors.ONE_FILE: made}
    name = f"model-{{:05d}}-of-{len(split):05d}.safetensors"
    return {name.format(number): [made[one] for one in part] for number, part in enumerate(split, 1)}


def _targets(wanted: Sequence[Theirs], found: Mapping[str, Source], dtype: str | None) -> list[Slot]:
    """The tensors of the checkpoint that is to be made, in the order of its file."""
    made = {
        _name(part): Slot(_name(part), part.weight.shape, dtype or found[one.name].slot.dtype)
        for one in wanted
        for part in one.parts
    }
    return sorted(made.values(), key=lambda slot: (slot.nbytes >= format.ALIGN_FROM_BYTES, slot.name))


def _outwards(one: Theirs, places: Mapping[str, Place], aside: Path, target: Sequence[Any]) -> Move:
    file, slot = target
    sources = (_source(places[_name(part)], part) for part in one.parts)
    return Move(one.parts, tuple(sources), (Place(aside / file, _slot(slot)),))


def _source(place: Place, part: hub.Part) -> Source:
    return place if part.number is None else Matrix(place, part.number)


def _inwards(some: Sequence[Theirs], found: Mapping[str, Source], placed: Mapping[str, Place]) -> Move:
    """One tensor of theirs, or those of one of our stacks."""
    parts = tuple(part for one in some for part in one.parts)
    names = dict.fromkeys(_name(part) for part in parts)
    return Move(parts, tuple(found[one.name] for one in some), tuple(placed[name] for name in names))


def _name(part: hub.Part) -> str:
    return WEIGHTS + part.weight.name


def _slot(told: dict[str, Any]) -> Slot:
    return Slot(**told | {"shape": tuple(told["shape"])})


def _report(
    source: Path, out: Path, config: dict[str, Any], tensors: Sequence[Theirs], moves: Sequence[Move]
) -> dict[str, Any]:
    total = sum(move.nbytes for move in moves)
    name = (config.get("architectures") or [config.get("model_type")])[0]
    return {"from": str(source), "to": str(out), "architecture": name, "tensors": len(tensors), "bytes": total}


# ---- what the leading rank does alone --------------------------------------------------------------------------------


def check_new(out: Path) -> None:
    """Refuse a folder that has something in it."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(
            f"{out} is there already, and is not an empty folder",
            "files of two models in one folder would be taken for one",
            "give another folder, or empty this one",
        )


def _look(source: Path, out: Path) -> dict[str, Any]:
    check_new(out)
    path, index = inspect.find(source)
    model = index.attributes.get("config", {}).get("model")
    if model is None:
        raise CheckpointError(
            f"{path} does not say what its model is",
            "a checkpoint of hpctrain train has its configuration in the attribute config",
            'save it with attributes={"config": {"model": ...}}',
        )
    slots = tuple(slot for slot in index.slots if slot.name.startswith(WEIGHTS))
    return {"path": str(path), "index": replace(index, slots=slots, attributes={}).to_json(), "model": model}


def _look_there(folder: Path, out: Path) -> dict[str, Any]:
    if out.suffix != ".h5":
        raise CheckpointError(f"{out} does not end in .h5", "a checkpoint is one HDF5 file", "give a name that does")
    for path in (out, out.with_suffix(".toml")):
        if path.exists():
            raise CheckpointError(f"{path} is there already", "nothing is written over", "give another name")
    if not (folder / CONFIG).is_file():
        mend = "give a folder as save_pretrained of transformers makes it"
        raise CheckpointError(f"{folder} has no {CONFIG}", "only it says what the weights are", mend)
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} is not JSON", str(error), safetensors.AGAIN) from None
    hub_config.architecture(config)  # before its tensors are looked for, whose names may be of any kind
    return {"config": config} | sources.look(folder)


def place_aside(out: Path) -> Path:
    """A name to write ``out`` aside under, beside it; what killed runs left there is removed."""
    out = Path(os.path.abspath(out))
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in keep.abandoned(out.parent, out.name):
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return out.parent / keep.part_name(out.name)


def _lay_out(out: Path, files: Mapping[str, Sequence[Slot]]) -> dict[str, Any]:
    aside = place_aside(out)
    aside.mkdir()
    try:
        placed = {file: safetensors.lay_out(aside / file, slots) for file, slots in files.items()}
        for file in files:
            disk.reserve(aside / file)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    slots = {name: [file, asdict(slot)] for file, made in placed.items() for name, slot in made.items()}
    return {"aside": str(aside), "slots": slots}


def _publish_folder(aside: Path, out: Path, files: Mapping[str, Sequence[Slot]], config: dict[str, Any]) -> None:
    texts = {CONFIG: json.dumps(config, indent=2) + "\n"}
    if len(files) > 1:
        names = {slot.name: file for file, slots in files.items() for slot in slots}
        texts[safetensors.INDEX] = safetensors.index_text(names, sum(s.nbytes for made in files.values() for s in made))
    for name, text in texts.items():
        (aside / name).write_text(text, encoding="utf-8")
        sync_file(aside / name)
    sync_file(aside)
    os.replace(aside, out)  # onto nothing, or an empty folder: one that was filled meanwhile is refused
    sync_file(Path(os.path.abspath(out)).parent)


def _begin(out: Path, slots: Sequence[Slot], model: ModelConfig, config: dict[str, Any]) -> dict[str, Any]:
    aside = place_aside(out)
    attributes = {"config": {"model": model.model_dump()}, "imported": config}
    try:
        placed = format.lay_out(aside, slots, 0, attributes)
        disk.reserve(aside)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return {"aside": str(aside), "slots": [asdict(slot) for slot in placed]}


def _publish_file(aside: Path, out: Path, model: ModelConfig, slots: Sequence[Slot], sums: np.ndarray) -> None:
    format.mark_complete(aside, slots, sums)
    sync_file(aside)
    out.with_suffix(".toml").write_text(hub_config.toml(model), encoding="utf-8")
    os.replace(aside, out)
    sync_file(Path(os.path.abspath(out)).parent)
