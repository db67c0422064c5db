"""The learning rate as a pure function of the step, so that a resumed run goes on as if it had never stopped."""

from __future__ import annotations

import math
from collections.abc import Callable

from hpctrain.config import OptimConfig

# shape -> height between 1 and 0 at a part of the way from the end of the warm-up (0) to the last step (1)
SHAPES: dict[str, Callable[[float, OptimConfig], float]] = {
    "constant": lambda part, config: 1.0,
    "linear": lambda part, config: 1.0 - part,
    "cosine": lambda part, config: 0.5 * (1.0 + math.cos(math.pi * part)),
    "wsd": lambda part, config: min(1.0, (1.0 - part) / config.cooldown),
}


def rate(config: OptimConfig, step: int, steps: int) -> float:
    """The rate of one step, of ``0 ... steps - 1``.

    It rises in equal parts to ``config.rate``, reached in the last step of the warm-up, and falls by ``config.shape``
    to ``config.floor`` times that in the last step; steps beyond have the last one's rate.
    """
    if step < config.warmup:
        return config.rate * (step + 1) / config.warmup
    start, last = max(config.warmup, 1) - 1, steps - 1
    part = min(1.0, (step - start) / (last - start)) if last > start else 0.0
    return config.rate * (config.floor + (1.0 - config.floor) * SHAPES[config.shape](part, config))
