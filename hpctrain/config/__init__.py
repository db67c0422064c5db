"""Every knob of a run, as frozen values with a docstring each.

``load`` reads a TOML file, lays ``--set section.key=value`` over it, and gives a ``Config``; whatever is wrong is
told as a ``ConfigError`` that names the key, its value and the mend. Nothing here imports torch or MPI.
"""

from hpctrain.config.job import JobConfig
from hpctrain.config.knobs import defaults, fields, is_section, knobs
from hpctrain.config.model import ModelConfig
from hpctrain.config.read import load, parse
from hpctrain.config.section import Auto, Section
from hpctrain.config.sections import (
    CheckpointConfig,
    CommConfig,
    Config,
    DataConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SourceConfig,
    TrainConfig,
)

__all__ = [
    "Auto",
    "CheckpointConfig",
    "CommConfig",
    "Config",
    "DataConfig",
    "JobConfig",
    "LogConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "Section",
    "SourceConfig",
    "TrainConfig",
    "defaults",
    "fields",
    "is_section",
    "knobs",
    "load",
    "parse",
]
