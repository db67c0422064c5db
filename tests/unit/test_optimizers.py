"""The table of optimizers and the configuration's names for them are one."""

from __future__ import annotations

from typing import get_args

from hpctrain.config import OptimConfig
from hpctrain.optim.optimizers import OPTIMIZERS


def test_every_kind_of_the_configuration_has_its_optimizer():
    assert tuple(OPTIMIZERS) == get_args(OptimConfig.model_fields["kind"].annotation)
