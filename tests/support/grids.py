"""Runs whose ranks have different blocks, parts of products, and samples: what they may choose, and what they made.

All of a run is read from a checkpoint, where each tensor is whole, whatever mesh wrote it. The choices that are not of
the mesh are those of ``tests.support.matrix``, and so are the bounds, but for what is told beside ``BOUNDS`` here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.state import Held, State
from hpctrain.comm.group import SoloGroup
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CheckpointConfig, Config
from hpctrain.data.batch import Batches, MicroBatch
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.train import Job
from tests.support import matrix
from tests.support.pairs import Row, all_pairs
from tests.support.runs import job

# The order of axes is pp, dp, tp; what is not named is 1.
MESHES: dict[str, tuple[int, int, int]] = {
    "pp 4": (4, 1, 1),
    "pp 2 x dp 2": (2, 2, 1),
    "pp 2 x tp 2": (2, 1, 2),
    "pp 2": (2, 1, 1),
    "dp 2 x tp 2": (1, 2, 2),
    "tp 4": (1, 1, 4),
    "tp 2": (1, 1, 2),
}
SCHEDULES: dict[str, tuple[str, ...]] = {
    "1f1b": (),
    "gpipe": ("parallel.schedule=gpipe",),
    "interleaved": ("parallel.schedule=interleaved",),
    "interleaved, large groups": ("parallel.schedule=interleaved", "parallel.group=5"),
    "looped-bfs": ("parallel.schedule=looped-bfs",),
    "zb-h1": ("parallel.schedule=zb-h1",),
    "zb-h2": ("parallel.schedule=zb-h2",),
    "zb-v": ("parallel.schedule=zb-v",),
    "dualpipe-v": ("parallel.schedule=dualpipe-v",),
}
CHUNKS = {"interleaved": 2, "interleaved, large groups": 2, "looped-bfs": 2, "zb-v": 2, "dualpipe-v": 2}
MODELS = {
    "gpt2": (),
    "gpt2, untied": ("model.tied=false", "model.vocabulary=263"),
    "llama": ("model.family=llama", "model.kv_heads=1"),
    "llama, tied": ("model.family=llama", "model.kv_heads=2", "model.tied=true", "model.mlp_width=85"),
}
OPTIMIZERS = {
    "adamw": (),
    "adamw in bf16": ("optim.states=bf16",),
    **{kind: (f"optim.kind={kind}",) for kind in ("adafactor", "adamw8bit", "muon")},
}
# Of the two ways of fp8 a schedule has one: a backward that is taken in two is whole under both.
FP8 = {name: ("fp8 tensor", "fp8 block")[turn % 2] for turn, name in enumerate(SCHEDULES)}
AXES = {
    "mesh": list(MESHES),
    "schedule": list(SCHEDULES),
    "precision": list(matrix.PRECISIONS),
    "recompute": matrix.AXES["recompute"],
    "zero": matrix.AXES["zero"],
    "optimizer": list(OPTIMIZERS),
    "model": list(MODELS),
    "microbatch": [3, 5, 12],  # of 12 sequences, or of 6 on each of two ranks: alike, uneven, and fewer than stages
    "layers": ["as many as stages", "balanced", "given"],
    "sequence": [True, False],
    "dropout": [0.0, 0.1],
    "documents": ["apart", "together"],
}
SIZES = ("model.width=32", "train.batch=12", "optim.rate=1e-3", "log.peak_tflops=1")
STEPS = 2
# Models have up to nine layers here, not two: the roundings of each add up as the root of their number.
ROUNDINGS = (9 / 2) ** 0.5


def possible(row: Row) -> bool:
    """Whether a run can have these choices; choices that would change nothing are made in one way only."""
    pp, _, tp = MESHES[row["mesh"]] if "mesh" in row else (2, 1, 2)
    plain = pp > 1 or (row.get("schedule", "1f1b") == "1f1b" and row.get("layers", "given") != "balanced")
    fp8 = pp == 1 or row.get("precision") not in FP8.values() or row.get("precision") == FP8.get(row.get("schedule"))
    return plain and (tp > 1 or row.get("sequence", True)) and (fp8 or "schedule" not in row)


ROWS = all_pairs(AXES, possible)


def stages(mesh: tuple[int, int, int], schedule: str) -> int:
    """Stages of a pipeline."""
    return mesh[0] * (CHUNKS.get(schedule, 1) if mesh[0] > 1 else 1)


def knobs(row: Row) -> tuple[str, ...]:
    """A row as overrides of a configuration."""
    mesh = MESHES[row["mesh"]]
    count = stages(mesh, row["schedule"])
    layers = count + (row["layers"] != "as many as stages")
    given = [2, *[1] * (count - 1)]  # the first stage has one more, which the usual way would not give it
    return (
        *meshed(mesh),
        *SCHEDULES[row["schedule"]],
        *MODELS[row["model"]],
        *matrix.PRECISIONS[row["precision"]],
        *OPTIMIZERS[row["optimizer"]],
        f"model.layers={layers}",
        *([f"parallel.layers_per_stage={given}"] if row["layers"] == "given" else []),
        f"parallel.sequence={str(row['sequence']).lower()}",
        f"parallel.zero={row['zero']}",
        f"train.recompute={row['recompute']}",
        f"train.microbatch={row['microbatch']}",
        f"model.dropout={row['dropout']}",
        f"data.cross_documents={str(row['documents'] == 'together').lower()}",
    )


def meshed(mesh: tuple[int, int, int]) -> tuple[str, ...]:
    """Ranks along pp, dp and tp as overrides."""
    return tuple(f"parallel.{axis}={size}" for axis, size in zip(("pp", "dp", "tp"), mesh, strict=True))


def ranks_of(row: Row) -> int:
    """How many ranks a row is run on."""
    pp, dp, tp = MESHES[row["mesh"]]
    return pp * dp * tp


# ---- what a run made -------------------------------------------------------------------------------------------------


def course(
    config: Config, comm: MPI.Comm, steps: int, folder: Path, hosts: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Losses, norms and validation losses of some steps, then all that the run holds, whole. Collective.

    ``hosts`` say what node each rank is to be on, by default this one. ``folder`` is one that all ranks write to.
    Raises AssertionError on a rank that holds something else than what was written for it: of replicas one alone
    writes.
    """
    with job(config, comm, hosts) as (run, batches):
        values = [run.step(step, batches) for step in range(steps)]
        validated = run.runner.evaluate(validation(run, batches))
        return {
            "loss and norm": torch.tensor([[value["loss"], value["norm"]] for value in values], dtype=torch.float64),
            "validation loss": torch.tensor([validated], dtype=torch.float64),
            **through(folder, everything(run), run.plan.mesh, comm),
        }


def validation(run: Job, batches: Batches) -> list[MicroBatch]:
    """A validation batch in micro-batches of two, which no step of training has."""
    group = run.runner.group
    return batches.validation(0, group.rank, group.size, microbatch=2)


def everything(run: Job) -> State:
    """What a checkpoint keeps, and gradients."""
    gradients = {}
    for part in run.sharded.parts:
        for slot in part.unit.slots:
            tensor = part.share(slot, part.gradient)
            layout = run.state[f"model/{slot.name}"].layout
            gradients[f"gradient/{slot.name}"] = Held(replace(layout, dtype=_name(tensor)), tensor)
    return run.state | gradients


def through(folder: Path, state: State, mesh: Mesh, comm: MPI.Comm) -> dict[str, Tensor]:
    """Write a state, see that every rank finds there what it holds, and give the whole of it. Collective."""
    everyone = MpiGroup(comm)
    point = Checkpoint(CheckpointConfig(sync=False), folder, mesh, everyone)
    path = point.save(1, state, {})
    again = {name: Held(held.layout, torch.zeros_like(held.tensor)) for name, held in state.items()}
    assert point.resume(again) == 1
    differ = [name for name, held in state.items() if not torch.equal(held.tensor, again[name].tensor)]
    assert everyone.collect(differ) == [[]] * everyone.size, "replicas hold different numbers"
    everyone.close()
    return read(path)


def read(path: Path) -> dict[str, Tensor]:
    """Everything in a checkpoint file, whole and flat."""
    index = read_index(path)
    state = {
        slot.name: Held(Layout(slot.shape, slot.dtype), torch.empty(slot.shape, dtype=getattr(torch, slot.dtype)))
        for slot in index.slots
    }
    assert Checkpoint(CheckpointConfig(), path.parent, Mesh(()), SoloGroup()).resume(state) == index.step
    return {name: held.tensor.flatten() for name, held in state.items()}


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
