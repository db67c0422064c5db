"""The step benchmark's DeepSpeed beside us: the same losses, step by step. Started as README.md here says."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist
from mpi4py import MPI

from hpctrain.bench.step import Scene, contestant
from hpctrain.cluster.world import World
from tests.support.runs import shared_folder, small_config, write_corpus

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="tests/peers/README.md says how to install deepspeed"),
]

STEPS = 5
MODELS = {"gpt2": (), "llama, untied": ("model.family=llama", "model.kv_heads=2", "model.tied=false")}


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = shared_folder(comm, tmp_path_factory.mktemp("deepspeed"))
    if comm.rank == 0:
        write_corpus(folder)
    comm.Barrier()
    yield folder
    if dist.is_initialized():
        dist.destroy_process_group()


def both(stage: int, folder: Path, comm: MPI.Comm, *overrides: str) -> list[list[float]]:
    """The losses of the first steps, theirs and ours. Collective."""
    always = ("train.batch=16", "optim.shape=constant", "optim.warmup=0")  # two micro-batches a rank, on four ranks
    scene = Scene.open(small_config(folder, *always, *overrides), World.of(comm))
    steps = [contestant(name)(scene)() for name in (f"deepspeed-{stage}", "hpctrain")]
    return [[step(number) for number in range(STEPS)] for step in steps]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_a_stage_takes_the_steps_that_we_take(model: str, stage: int, folder: Path, comm: MPI.Comm) -> None:
    theirs, ours = both(stage, folder, comm, *MODELS[model])
    assert theirs == pytest.approx(ours, abs=1e-5)
    assert ours[-1] < ours[0]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_close_to_what_we_do(stage: int, folder: Path, comm: MPI.Comm) -> None:
    theirs, ours = both(stage, folder, comm, "precision.compute=bf16", "optim.rate=1e-3")
    assert theirs == pytest.approx(ours, abs=1e-2)
