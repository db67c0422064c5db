"""Reading a configuration: a TOML file, ``--set section.key=value`` laid over it, and what to say of what is wrong."""

from __future__ import annotations

import re
import tomllib
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hpctrain.config.knobs import knobs
from hpctrain.config.section import Section
from hpctrain.config.sections import Config
from hpctrain.errors import ConfigError

Made = TypeVar("Made", bound=Section)


def load(path: str | Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a TOML file and lay ``section.key=value`` overrides over it, the last one winning."""
    return parse(tables(contents(Path(path)), str(path)), overrides, str(path))


def parse(table: dict[str, Any], overrides: tuple[str, ...] = (), source: str = "configuration") -> Config:
    """Make a ``Config`` of a nested table; ``source`` names it in errors."""
    table = deepcopy(table)
    for override in overrides:
        _lay(table, override)
    return validate(Config, table, source)


def validate(model: type[Made], table: dict[str, Any], source: str) -> Made:
    """Make a ``model`` of a nested table; ConfigError tells the first key that is wrong, in the file ``source``."""
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise _told(error, source, model) from None


def contents(path: Path) -> str:
    """The text of a TOML file; ConfigError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read", error.strerror or "", "give the path of a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not TOML", str(error), "mend that line") from None


def tables(text: str, source: str) -> dict[str, Any]:
    """The values of TOML; ConfigError where it is none."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML", str(error), "mend that line") from None


def _lay(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(f"--set {override}: not section.key=value", "", "write e.g. --set train.steps=100")
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {override}: {part} is a value, not a section", "", "name an existing section")
    table[path[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    """A TOML value; a bare word is a string, as a shell user expects."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


# What pydantic says of Python's types, in the words of TOML.
WORDS = {
    "tuple_type": "it should be a list, in brackets",
    "string_type": "it should be text, in quotes (in a shell, with quotes around them)",
    "model_type": "it is a section, not a value",
    "bool_type": "it should be true or false",
}


def _told(error: ValidationError, source: str, model: type[Section]) -> ConfigError:
    """The fault of the first wrong key, as key, value and mend; the number of further wrong keys is said.

    An unknown key goes before one that is missing: it is often the same, mistyped.
    """
    faults: dict[str, list[Any]] = {}
    for fault in sorted(error.errors(include_url=False), key=lambda fault: fault["type"] == "missing"):
        faults.setdefault(_dotted(fault["loc"]), []).append(fault)
    key, here = next(iter(faults.items()))
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    meaning = knobs(model).get(_any(key), "")
    if here[0]["type"] == "extra_forbidden":
        return ConfigError(f"{source}: {key} is not a known key{more}", "", _nearest(_any(key), model))
    if here[0]["type"] == "missing":
        return ConfigError(f"{source}: {key} is missing{more}", "", meaning)
    why = "; or ".join(WORDS.get(fault["type"], fault["msg"].replace("Input", "it")) for fault in here)
    return ConfigError(f"{source}: {key} = {here[0]['input']!r} cannot be{more}", why, meaning)


def _dotted(place: tuple[str | int, ...]) -> str:
    """A place in the configuration as ``data.sources[0].path``, without pydantic's names of a union's members."""
    parts = [part for part in place if part not in ("int", "float", "literal['auto']")]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _any(key: str) -> str:
    """The key as ``knobs`` has it: of any table of a list."""
    return re.sub(r"\[\d+\]", "[]", key)


def _nearest(key: str, model: type[Section]) -> str:
    """The key that was meant: one of this name, or of a name like it in this section; else what there is."""
    known = [*knobs(model), *model.model_fields]
    section, _, name = key.rpartition(".")
    names = [one.rpartition(".")[2] for one in known if one.rpartition(".")[0] == section]
    same = [one for one in known if one.rpartition(".")[2] == name]
    near = [f"{section}.{one}".lstrip(".") for one in get_close_matches(name, names, n=1)]
    if best := same or near:
        return f"did you mean {best[0]}?"
    return f"known in {section}: {', '.join(names)}" if names and section else f"known sections: {', '.join(names)}"
