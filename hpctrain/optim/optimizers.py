"""Every optimizer by its name in the configuration."""

from __future__ import annotations

from hpctrain.optim.adafactor import Adafactor
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.adamw8bit import AdamW8bit
from hpctrain.optim.muon import Muon
from hpctrain.optim.optimizer import Optimizer

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "adamw": AdamW,
    "adafactor": Adafactor,
    "adamw8bit": AdamW8bit,
    "muon": Muon,
}
