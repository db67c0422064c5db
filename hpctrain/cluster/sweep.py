"""Sweep: the runs of ``--array KEY=V1,V2``, each with a name and settings of its own; several keys multiply."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from hpctrain.cluster.request import Element
from hpctrain.config import RunConfig
from hpctrain.errors import UsageError


def elements(arrays: Sequence[str], run: RunConfig) -> tuple[Element, ...]:
    """The runs of a sweep, the last key's values changing fastest. Their folders differ because their names do."""
    if not arrays:
        return ()
    if "{name}" not in run.dir:
        what = f'--array with run.dir = "{run.dir}"'
        mend = 'write {name} where the name of each run is to stand, such as "runs/{name}"'
        raise UsageError(what, "all runs of the array would have one folder", mend)
    found = tuple(_element(settings, run) for settings in product(*map(_settings, arrays)))
    _check(found, arrays)
    return found


def _settings(array: str) -> list[str]:
    key, equals, values = array.partition("=")
    found = split(values)
    if not (key.strip() and equals and all(found)):
        what = f"--array {array}: not KEY=VALUE,VALUE"
        raise UsageError(what, "one job is made for each value", "write e.g. --array optim.rate=1e-3,3e-4")
    return [f"{key.strip()}={value}" for value in found]


def split(text: str) -> list[str]:
    """The values between commas, but for commas inside brackets and quotes: of ``[1,2],[3]`` two."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            parts.append("")
            continue
        quote = ("" if letter == quote else quote) or (letter if not quote and letter in "\"'" else "")
        depth += 0 if quote else (letter in "[{") - (letter in "]}")
        parts[-1] += letter
    return [part.strip() for part in parts]


def _element(settings: tuple[str, ...], run: RunConfig) -> Element:
    name = "-".join((run.name, *(_short(setting) for setting in settings)))
    return Element(name, str(Path(run.dir.replace("{name}", name))), settings)


def _short(setting: str) -> str:
    """``rate-1e-3`` of ``optim.rate=1e-3``."""
    key, _, value = setting.partition("=")
    return re.sub(r"[^\w.+-]+", "-", f"{key.rpartition('.')[2]}-{value}").strip("-")


def _check(found: Sequence[Element], arrays: Sequence[str]) -> None:
    names = [element.name for element in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        what = f"--array {' --array '.join(arrays)}: two runs would be called {twice}"
        raise UsageError(what, "each run has a folder by its name", "leave out values that stand there twice")
