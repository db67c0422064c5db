"""Writing a configuration: the TOML that reads back as the same one, with what a person chose and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hpctrain.config.sections import Config

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_CONTROL = re.compile("[\x7f\x80-\x9f]")


def toml(config: Config) -> str:
    """The keys that were set, section by section."""
    chosen = config.model_dump(mode="json", exclude_unset=True)
    return "\n".join("\n".join(_section(name, keys)) + "\n" for name, keys in chosen.items() if keys)


def _section(name: str, keys: Mapping[str, Any]) -> Iterator[str]:
    yield f"[{name}]"
    for key, value in keys.items():
        if value is not None:  # what is left out is None
            yield f"{_key(key)} = {_value(value)}"


def _key(text: str) -> str:
    return text if _BARE.fullmatch(text) else _text(text)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return json.dumps(value)


def _text(text: str) -> str:
    """JSON's quotes, which are TOML's but for a few control characters."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))
