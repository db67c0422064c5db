"""Every optimizer by its name in the configuration, and several of them as one."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.optim.adafactor import Adafactor
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.adamw8bit import AdamW8bit
from hpctrain.optim.muon import Muon
from hpctrain.optim.optimizer import Optimizer, State

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adafactor": Adafactor,
    "adamw8bit": AdamW8bit,
    "muon": Muon,
}


@dataclass(frozen=True)
class Optimizers:
    """One for each set of parameters that is shared by its own group of ranks."""

    members: tuple[Optimizer, ...]

    def update(self, rate: float, step: int) -> None:
        """Move all parameters; as ``Optimizer.update``. Collective."""
        for member in self.members:
            member.update(rate, step)

    def states(self) -> dict[str, list[State]]:
        """What the next updates depend on, of all parameters; as ``Optimizer.states``."""
        found: dict[str, list[State]] = {}
        for member in self.members:
            for name, states in member.states().items():
                found.setdefault(name, []).extend(states)
        return found
