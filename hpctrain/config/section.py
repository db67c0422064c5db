"""Section: a table of a configuration file."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Auto = Literal["auto"]


class Section(BaseModel):
    """A table of the configuration: frozen, and refusing keys that it does not know."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
