"""Every stage of sharing is the run of one rank, and what one stage has saved any other goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mpi4py import MPI
from torch import Tensor, nn

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import Config, OptimConfig
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.clip import global_norm
from hpctrain.parallel.zero import shard
from hpctrain.train import Job
from tests.support.runs import course, difference, job, shared_folder, small_config, whole, write_corpus

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
STAGES = [0, 1, 2, 3]
STEPS, LONG = 6, 10  # twice the warm-up; and where two ways to train are to learn alike
MODELS = {"gpt2": (), "llama": ("model.family=llama", "model.kv_heads=2")}


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("zero"))
    if comm.rank == 0:
        write_corpus(folder)
    comm.Barrier()
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[..., dict[str, Tensor]]:
    """The course of a model on one rank, all samples at once; each rank makes it once."""

    @cache
    def of(model: str, steps: int = STEPS) -> dict[str, Tensor]:
        return course(run_of(folder, model, 1, 1), MPI.COMM_SELF, steps)

    return of


def run_of(folder: Path, model: str, ranks: int, microbatches: int, *overrides: str) -> Config:
    most = 12 // ranks // microbatches
    always = ("precision.compute=fp64", "train.batch=12", f"train.microbatch={most}")
    return small_config(folder, *always, *MODELS[model], *overrides)


# All of them on four ranks; on fewer, each pair of choices.
CASES = [
    (ranks, stage, microbatches, model)
    for ranks, stage, microbatches, (turn, model) in product([1, 2, 4], STAGES, [1, 3], enumerate(MODELS))
    if ranks == 4 or (ranks + stage + microbatches // 2 + turn) % 2
]


@pytest.mark.parametrize(("ranks", "stage", "microbatches", "model"), CASES)
def test_a_stage_is_the_run_of_one_rank(
    ranks: int, stage: int, microbatches: int, model: str, folder: Path, alone, first: First, comm: MPI.Comm
) -> None:
    part = first(ranks)
    config = run_of(folder, model, ranks, microbatches, f"parallel.zero={stage}")
    far = difference(course(config, part, STEPS), alone(model)) if part is not None else 0.0
    assert max(comm.allgather(far)) < 1e-10


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_copies_shared_by_two_are_the_run_of_one_rank(stage: int, model: str, folder, alone, comm: MPI.Comm) -> None:
    config = run_of(folder, model, 4, 3, f"parallel.zero={stage}", "parallel.shard=2", "parallel.gather_mib=0")
    assert max(comm.allgather(difference(course(config, comm, STEPS), alone(model)))) < 1e-10


@pytest.mark.parametrize("microbatches", [1, 3])
def test_a_second_copy_among_neighbours_is_the_run_of_one_rank(microbatches: int, folder, alone, comm) -> None:
    config = run_of(folder, "gpt2", 4, microbatches, "parallel.zero=3", "parallel.near=2", "parallel.gather_mib=0")
    assert max(comm.allgather(difference(course(config, comm, STEPS), alone("gpt2")))) < 1e-10


@pytest.mark.parametrize("form", ["int8", "fp8"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_travels_in_8_bits_learns_like_the_run_of_one_rank(stage: int, form: str, folder, alone, comm) -> None:
    """Steps of Adam do not tell a gradient's size but its sign, so only losses are compared."""
    near = ("parallel.near=2", f"parallel.gather_in={form}") if stage == 3 else ()
    config = run_of(folder, "gpt2", 4, 3, f"parallel.zero={stage}", f"parallel.reduce_in={form}", *near)
    losses, expected = (one["loss and norm"][:, 0] for one in (course(config, comm, LONG), alone("gpt2", LONG)))
    assert 1e-9 < max(comm.allgather(float((losses - expected).abs().max() / expected[0]))) < 0.02


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_summed_in_bf16_learn_like_those_in_fp32(stage: int, folder, comm) -> None:
    bf16 = ("precision.compute=bf16", f"parallel.zero={stage}")
    wide, narrow = (
        course(run_of(folder, "gpt2", 4, 3, *bf16, f"precision.gradients={kind}"), comm, LONG)["loss and norm"][:, 0]
        for kind in ("wide", "compute")
    )
    assert 1e-9 < max(comm.allgather(float((narrow - wide).abs().max() / wide[0]))) < 0.02


# ---- checkpoints


@contextmanager
def going(config: Config, part: MPI.Comm) -> Iterator[tuple[Job, Checkpoint]]:
    """A run that has taken two steps, and where it saves."""
    with job(config, part) as (run, batches):
        for step in range(2):
            run.step(step, batches)
        folder, everyone = config.run.folder / "checkpoints", run.runner.group
        yield run, Checkpoint(config.checkpoint, folder, run.plan.mesh, everyone)


SHARED = ("parallel.shard=2",)
MOVES = [
    ((4, 0, ()), (2, 3, ())),
    ((4, 3, ()), (2, 1, ())),
    ((2, 1, ()), (4, 2, SHARED)),
    ((4, 2, SHARED), (1, 0, ())),
    ((1, 3, ()), (4, 3, SHARED)),
    ((4, 3, SHARED), (4, 0, ())),
]


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_a_checkpoint_of_one_stage_loads_under_another(move, comm: MPI.Comm, first: First, folder, tmp_path) -> None:
    own = shared_folder(comm, tmp_path)
    kept: list[dict[str, Tensor]] = []
    for turn, (ranks, stage, more) in enumerate(move):
        config = run_of(folder, "gpt2", ranks, 1, f"parallel.zero={stage}", f"run.dir='{own}'", *more)
        part = first(ranks)
        if part is not None:
            with going(config, part) as (run, checkpoint):
                if turn == 0:
                    checkpoint.save(2, run.state, {})
                else:
                    for held in run.state.values():
                        held.tensor.zero_()
                    assert checkpoint.resume(run.state) == 2
                kept.append({name: flat for name, flat in whole(run).items() if not name.startswith("gradient")})
        comm.Barrier()
    saved, loaded = comm.bcast(kept)  # the first rank is in both
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert len({name.rpartition("/")[0] for name in saved}) == 3


# ---- anybody's module


class Cnn(nn.Module):
    """Convolutions in channels_last, a norm with buffers, and a parameter that never meets the loss."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1))
        self.layers = nn.ModuleList(one.to(memory_format=torch.channels_last) for one in convolutions)
        self.norm = nn.GroupNorm(2, 6)
        self.register_buffer("scale", torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            x = F.relu(self.norm(layer(x)), inplace=True)
        return (self.head(x.mean((2, 3))) * self.scale).square().sum()


class Shared(nn.Module):
    """A weight that two layers share, a layer that runs twice, and one that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 2, 1):
            x = torch.tanh(self.layers[index](x))
        return x.square().sum()


USERS = {"cnn": (Cnn, (3, 4, 4)), "shared": (Shared, (5,))}
OPTIM = OptimConfig(rate=0.01, decay=0.1)


def samples(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(3, 4, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def made(kind: type[nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return kind().double()


def by_torch(kind: type[nn.Module], xs: Tensor) -> dict[str, Tensor]:
    """Three steps of plain torch on all samples; a parameter that is not used still decays, as any of ours does."""
    model = made(kind, 0)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": OPTIM.decay},
              {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=OPTIM.rate, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.epsilon)
    for x in xs:
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        model(x).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


NODES = {"one node": lambda rank: "a", "two nodes": lambda rank: str(rank // 2), "four nodes": str}


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_module_of_a_user_is_what_torch_makes_of_it_alone(stage: int, user: str, nodes: str, comm: MPI.Comm) -> None:
    kind, shape = USERS[user]
    xs, expected = samples(shape), by_torch(kind, samples(shape))
    group = MpiGroup(comm, node_key=NODES[nodes](comm.rank))
    sharded = shard(made(kind, comm.rank), group, stage)  # all start from the first rank's weights
    optimizer = AdamW(sharded.flats(), OPTIM, sharded.group)
    for step, x in enumerate(xs):
        sharded.begin()
        for half in x[comm.rank : comm.rank + 1].tensor_split(2):
            with sharded.reducing(last=len(half) == 0):
                sharded.module(half).backward()
        sharded.finish()
        norm = global_norm([flat.gradient for flat in sharded.flats()], sharded.group)
        optimizer.update(OPTIM.rate, step)
    with sharded.whole() as model:
        found = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    group.close()
    far = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert max(comm.allgather(far)) < 1e-12
    assert len(set(comm.allgather(norm))) == 1


@pytest.mark.parametrize(("stage", "seen"), [(0, "own"), (1, "all"), (2, "all")])
def test_ranks_of_a_node_share_the_memory_of_whole_weights_unless_each_updates_all(stage, seen, comm: MPI.Comm) -> None:
    group = MpiGroup(comm)
    (part,) = shard(nn.Linear(5, 5), group, stage).parts
    part.own.fill_(float(comm.rank))
    group.barrier()
    found = part.full.clone()  # nothing was gathered
    group.barrier()
    group.close()
    owners = torch.repeat_interleave(torch.arange(len(part.sizes)), torch.tensor(part.sizes))
    expected = {"own": torch.full((30,), comm.rank), "all": owners}[seen]
    assert all(comm.allgather(torch.equal(found, expected.float())))
