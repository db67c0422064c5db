"""The step benchmark compares equal work: every contestant takes the steps that we take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from mpi4py import MPI

from hpctrain.bench.step import Scene, contestant, run
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError
from tests.support.runs import shared_folder, small_config, write_corpus

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),  # the names that every supported torch has
]

First = Callable[[int], MPI.Comm | None]
STEPS = 5
ALWAYS = ("precision.compute=fp64", "optim.shape=constant", "optim.warmup=0")


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("bench"))
    if comm.rank == 0:
        write_corpus(folder)
    comm.Barrier()
    return folder


@pytest.fixture(autouse=True)
def no_default_group() -> Iterator[None]:
    """Torch's default group, which peers need, is of other ranks in the next test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def losses(name: str, scene: Scene) -> list[float]:
    """Of the first steps of a contestant. Collective."""
    step = contestant(name)(scene)()
    return [step(number) for number in range(STEPS)]


@pytest.mark.parametrize("ranks", [2, 4])  # of two micro-batches, and of one
@pytest.mark.parametrize("peer", ["ddp", "fsdp2", "fsdp2-mpi4py", "zero-3"])
def test_a_peer_takes_the_steps_that_we_take(peer: str, ranks: int, folder: Path, first: First, comm: MPI.Comm) -> None:
    part = first(ranks)
    far = 0.0
    if part is not None:
        scene = Scene.open(small_config(folder, *ALWAYS), World.of(part))
        ours = losses("hpctrain", scene)
        far = max(abs(a - b) for a, b in zip(losses(peer, scene), ours, strict=True))
        assert ours[-1] < ours[0]
    assert max(comm.allgather(far)) < 1e-6  # torch's clipping adds as much to the norm


def test_bf16_is_close_to_what_we_do(folder: Path, comm: MPI.Comm) -> None:
    config = small_config(folder, *ALWAYS, "precision.compute=bf16", "optim.rate=1e-3")
    scene = Scene.open(config, World.of(comm))
    assert losses("fsdp2", scene) == pytest.approx(losses("hpctrain", scene), abs=1e-2)


def test_every_contestant_has_a_row_and_equal_losses(folder: Path, comm: MPI.Comm) -> None:
    rows = run(Scene.open(small_config(folder, *ALWAYS), World.of(comm)), ("zero-1", "zero-2", "fsdp2"), 1)
    assert [row.name for row in rows] == ["one", "apart", "hpctrain", "zero-1", "zero-2", "fsdp2"]
    assert [row.loss for row in rows[3:]] == pytest.approx([rows[2].loss] * 3, abs=1e-6)
    assert all(row.tokens_per_second > 0 for row in rows)


def test_an_unknown_contestant_is_refused_with_the_known_ones(folder: Path, comm: MPI.Comm) -> None:
    scene = Scene.open(small_config(folder, *ALWAYS), World.of(comm))
    with pytest.raises(UsageError, match="--against fsdp3: not a known peer\n  take some of .*zero-3, ddp.*fsdp2.*"):
        run(scene, ("fsdp3",), 1)
