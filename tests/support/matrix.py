"""The choices of a run that must not change what is trained by many ranks, and how near to one rank they come.

The run on one rank has the same precision and the same micro-batches. What is left between the two is the order of
sums: ranks and micro-batches are added up in fp32 (in fp64 under fp64) in another order. That alone is the last bits
of the format of the sum. A number that lies next to the middle between two 16-bit or 8-bit numbers may then be rounded
to the other one, which is a whole step of the smaller format; a few such numbers there are in every tensor, and what is
made of them is as far from each other. So differences are measured over all numbers of a kind (the Euclidean norm of
the difference, by that of the numbers), and no kind may differ by more than the rounding of all its numbers would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.config import Config
from hpctrain.optim.codes import decode, stretched
from tests.support.pairs import Row, all_pairs

PRECISIONS = {
    "fp64": ("precision.compute=fp64",),
    "fp32": ("precision.compute=fp32",),
    "bf16": ("precision.compute=bf16",),
    # A scale that does not overflow and doubles on the way: every step has a norm.
    "fp16": ("precision.compute=fp16", "precision.scale=1024", "precision.scale_interval=2"),
    "fp8 tensor": ("precision.compute=bf16", "precision.fp8=tensor"),
    "fp8 block": ("precision.compute=bf16", "precision.fp8=block"),
}
MODELS = {"gpt2": (), "llama": ("model.family=llama", "model.kv_heads=2")}
AXES = {
    "precision": list(PRECISIONS),
    "recompute": ["none", "selective", "full", "every:2", "offload"],
    "zero": [0, 1, 2, 3],
    "optimizer": ["adamw", "adafactor", "adamw8bit", "muon"],
    "microbatch": [4, 2, 3],  # of 16 sequences: each of four ranks has one, two alike, or one of 3 and one of 1
    "states": ["fp32", "bf16"],
    "model": list(MODELS),
    "dropout": [0.0, 0.1],
}

# Of losses, norms and weights, and of gradients and what the optimizer keeps of them. The second is what one rounding
# may move a number by, as a part of it: 2^-8 in bf16, 2^-11 in fp16, and half of its 2^-4 in fp8 (e4m3), as the sums
# are of many. Weights are kept in fp32 and differ by as much of a few steps' movement; losses are means over tokens.
BOUNDS = {
    "fp64": (1e-10, 1e-10),
    "fp32": (1e-5, 1e-5),
    "bf16": (1e-3, 2**-8),
    "fp16": (1e-4, 2**-11),
    "fp8 tensor": (2e-3, 2**-5),
    "fp8 block": (2e-3, 2**-5),
}
# Stochastic rounding and 8-bit codes: where the last bit of an fp32 number decides, it is decided differently now and
# then, one number in 2^16, and that number of the state moves by up to 2^-7 of itself, or by a code.
ROUNDED_STATES = 1e-4
ROUNDED = ("adamw8bit", "adamw in bf16")
# Where gradients differ by a rounding to 16 bits, more codes do; the next code is up to 2^-6 of the block's scale away.
CODES = 2**-6


def possible(row: Row) -> bool:
    """Whether a run can have these choices: only AdamW keeps its states in bf16."""
    return row.get("states") != "bf16" or row.get("optimizer", "adamw") == "adamw"


ROWS = all_pairs(AXES, possible)


def knobs(row: Row) -> tuple[str, ...]:
    """A row as overrides of a configuration."""
    shard = (f"parallel.shard={row['shard']}",) if "shard" in row else ()
    return (
        *PRECISIONS[row["precision"]],
        *MODELS[row["model"]],
        *shard,
        f"parallel.zero={row['zero']}",
        f"train.recompute={row['recompute']}",
        f"train.microbatch={row['microbatch']}",
        f"optim.kind={row['optimizer']}",
        f"optim.states={row['states']}",
        f"model.dropout={row['dropout']}",
    )


def name_of(row: Row) -> str:
    """The row in a test's name."""
    return "-".join(str(value) for value in row.values())


def too_far(
    found: dict[str, Tensor], expected: dict[str, Tensor], row: Row, roundings: float = 1.0
) -> dict[str, tuple[float, float]]:
    """Each kind of numbers that differs by more than it may, with how much it does and how much it may.

    ``roundings`` is how many times as much short formats may differ as here, where models have two layers.
    """
    short = roundings if row["precision"] not in ("fp64", "fp32") else 1.0
    far = {kind: (size, short * _bound(kind, row)) for kind, size in distances(found, expected).items()}
    return {kind: pair for kind, pair in far.items() if not pair[0] <= pair[1]}


def distances(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The size of the difference in each kind of numbers, by the size of the numbers."""
    found, expected = read(found), read(expected)
    assert found.keys() == expected.keys()
    kinds: dict[str, list[str]] = {}
    for name in expected:
        kinds.setdefault(name.rpartition("/")[0] or name, []).append(name)
    pairs = {
        kind: [torch.cat([side[name].reshape(-1).double() for name in names]) for side in (found, expected)]
        for kind, names in kinds.items()
    }
    return {kind: float((a - b).norm() / b.norm()) for kind, (a, b) in pairs.items()}


def read(course: dict[str, Tensor]) -> dict[str, Tensor]:
    """The course with what 8-bit codes stand for in their place: a code is no number that has a size."""
    given = dict(course)
    for name in [name for name in given if "_code/" in name]:
        codes, scales = given.pop(name), given[name.replace("_code/", "_scale/")]
        given[name] = decode(codes, stretched(scales, 0, codes.numel()), "exp_avg_code" in name)
    return given


def on_one_rank(config: Config) -> Config:
    """The run that shares nothing, which all that agree apart from what they share have in common."""
    return config.model_copy(update={"parallel": type(config.parallel)()})


def _bound(kind: str, row: Row) -> float:
    told, kept = BOUNDS[row["precision"]]
    if kind in ("loss and norm", "validation loss", "model"):
        return told
    in_bf16 = row.get("states") == "bf16" or row["optimizer"] == "adamw in bf16"
    if row["precision"] == "fp32" and (in_bf16 or row["optimizer"] in ROUNDED):
        return ROUNDED_STATES
    if row["precision"] == "fp16" and in_bf16 and kind.startswith("optim"):
        return 2**-8  # what one rounding of the state itself moves it by
    return max(kept, CODES) if kind.endswith("_code") and row["precision"] not in ("fp64", "fp32") else kept
