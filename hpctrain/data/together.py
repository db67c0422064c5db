"""What all ranks meet together while they prepare text: an error of one is a DataError of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hpctrain.comm import together
from hpctrain.comm.group import Group
from hpctrain.errors import DataError

DOING = "preparing the text"

led = partial(together.led, doing=DOING, kind=DataError)


def each(group: Group, act: Callable[[], Any]) -> list[Any]:
    """Do ``act`` on every rank and give the JSON-able values of all; an error of one is every rank's. Collective."""
    return group.collect(together.together(group, act, DOING, DataError))
