"""Fact: a value that was found out about the job, and where it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fact:
    """One JSON-able value; ``source`` is a variable, a file or a call that a person can look up."""

    name: str
    value: Any
    source: str
