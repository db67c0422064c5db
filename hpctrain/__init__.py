"""hpctrain: train large language models on supercomputers.

The nouns are loaded when they are first named, so that ``import hpctrain`` loads neither torch nor MPI.
"""

from importlib import import_module

__version__ = "0.1.0"

NOUNS = {
    "Config": "hpctrain.config",
    "Mesh": "hpctrain.plan.mesh",
    "Layout": "hpctrain.plan.layout",
    "Plan": "hpctrain.plan.plan",
    "World": "hpctrain.cluster.world",
    "Group": "hpctrain.comm.group",
    "Groups": "hpctrain.comm.groups",
    "shard": "hpctrain.parallel.zero",
}

__all__ = [*NOUNS, "__version__"]


def __getattr__(name: str) -> object:
    if name in NOUNS:
        return getattr(import_module(NOUNS[name]), name)
    raise AttributeError(f"hpctrain has no {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
