"""The keys of a configuration, as other parts of hpctrain list them."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hpctrain.config.section import Section
from hpctrain.config.sections import Config


def knobs(model: type[Section] = Config) -> dict[str, str]:
    """Every dotted key with its docstring, in the order of the sections; ``[]`` stands for each table of a list."""
    return {key: " ".join((field.description or "").split()) for key, field in fields(model)}


def defaults(model: type[Section] = Config) -> dict[str, Any]:
    """Every dotted key with its default, as plain values; None where it is left out."""
    found = {key: field.get_default() for key, field in fields(model)}
    return {key: _plain(value) for key, value in found.items()}


def fields(model: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """The keys that hold values, with those of tables in lists."""
    for name, field in model.model_fields.items():
        if section := _section(field.annotation):
            yield from fields(section, f"{prefix}{name}.")
            continue
        yield prefix + name, field
        for part in filter(is_section, get_args(field.annotation)):
            yield from fields(part, f"{prefix}{name}[].")


def is_section(annotation: Any) -> bool:
    """Whether this is the type of a table of the configuration."""
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _section(annotation: Any) -> type[Section] | None:
    """The section that a key holds, also where it may be left out; None where the key holds a value."""
    kinds = (annotation,) if get_origin(annotation) is None else get_args(annotation)
    found = [kind for kind in kinds if is_section(kind)]
    return found[0] if found and {*kinds} <= {*found, NoneType} else None


def _plain(value: Any) -> Any:
    if value is PydanticUndefined:
        return None
    return list(value) if isinstance(value, tuple) else value
