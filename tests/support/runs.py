"""Small runs for tests: a corpus of a few documents, and a job on the ranks of any communicator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from mpi4py import MPI

from hpctrain.cluster.world import World
from hpctrain.comm.group import Group
from hpctrain.comm.groups import Groups
from hpctrain.config import Config, parse
from hpctrain.data.batch import Batches
from hpctrain.plan.plan import decide, lay
from hpctrain.train import Job, open_data

Item = TypeVar("Item")
Made = TypeVar("Made")

TEXT = "Ranks meet, tokens flow; a loss comes down. 0123456789"


def small_config(folder: Path, *overrides: str) -> Config:
    """A run of a model of a few thousand parameters on ``write_corpus(folder)``."""
    table: dict[str, Any] = {
        "run": {"name": "small", "dir": str(folder / "run")},
        "model": {"layers": 2, "width": 16, "heads": 4, "sequence": 16},
        "data": {"text": [str(folder / "corpus")], "tokenizer": "bytes", "validation": 0.1},
        "train": {"steps": 20, "batch": 8, "microbatch": 2},
        "optim": {"rate": 1e-2, "warmup": 3},
    }
    return parse(table, overrides)


def write_corpus(folder: Path, documents: int = 40) -> None:
    """Documents of different lengths and different text."""
    place = folder / "corpus"
    place.mkdir(parents=True, exist_ok=True)
    for number in range(documents):
        text = " ".join(TEXT[(number * 7 + i) % len(TEXT) :] for i in range(1 + number % 5))
        (place / f"{number:03}.txt").write_text(text)


def write_tokens(folder: Path) -> None:
    """``write_corpus``, and what a run in this folder makes of it; by one rank."""
    write_corpus(folder)
    with job(small_config(folder), MPI.COMM_SELF):
        pass


@contextmanager
def job(config: Config, comm: MPI.Comm, hosts: Sequence[str] | None = None) -> Iterator[tuple[Job, Batches]]:
    """A job on the ranks of ``comm``, and its data; ``hosts`` say what node each is to be on. Collective."""
    torch.set_num_threads(1)
    world = World.of(comm, host=hosts[comm.rank] if hosts else None)
    groups = Groups.open(lay(config, world.topology), world, config.comm)
    batches = open_data(config, groups)
    yield Job.build(config, decide(config, world.topology, batches.vocabulary), groups, torch.device("cpu")), batches
    groups.close()


def course(config: Config, comm: MPI.Comm, steps: int) -> dict[str, torch.Tensor]:
    """Losses and norms of the first steps, then all that a checkpoint keeps, and gradients, whole. Collective."""
    with job(config, comm) as (run, batches):
        values = [run.step(step, batches) for step in range(steps)]
        told = torch.tensor([[value["loss"], value["norm"]] for value in values], dtype=torch.float64)
        return {"loss and norm": told, **whole(run)}


def whole(run: Job) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint keeps, and gradients, flat and whole. Collective over the ranks of a copy.

    What every rank keeps whole is the rank's own, so that it shows where one has something else.
    """
    cut = {name: held.tensor.view(-1) for name, held in run.state.items() if held.layout.flat}
    for part in run.sharded.parts:
        cut |= {f"gradient/{slot.name}": part.share(slot, part.gradient) for slot in part.unit.slots}
    each = {name: held.tensor.flatten().clone() for name, held in run.state.items() if not held.layout.flat}
    return each | {name: _joined(cut[name], run.sharded.group) for name in sorted(cut)}


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any of the kinds of numbers, as a part of the largest of its kind."""
    assert found.keys() == expected.keys()
    kinds: dict[str, list[str]] = {}
    for name in expected:
        kinds.setdefault(name.rpartition("/")[0], []).append(name)
    pairs = [[torch.cat([side[n].view(-1) for n in names]) for side in (found, expected)] for names in kinds.values()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def _joined(piece: torch.Tensor, group: Group) -> torch.Tensor:
    sizes = group.collect(piece.numel())
    out = torch.empty(sum(sizes), dtype=piece.dtype)
    group.all_gather(out, piece, sizes=sizes)
    return out


def by_turns(comm: MPI.Comm, items: Sequence[Item], make: Callable[[Item], Made]) -> Callable[[Item], Made]:
    """What ``make`` makes of each of the items, told to all: as many items at a time as there are ranks, one each.

    For runs on one rank that many ranks are compared with: no core waits while they are made. Collective: all ranks
    ask for the same items, best in their order, since only the last that were made together are kept.
    """
    kept: dict[int, list[Made | None]] = {}

    def of(item: Item) -> Made:
        turn, place = divmod(items.index(item), comm.size)
        if turn not in kept:
            own = items[turn * comm.size :][comm.rank : comm.rank + 1]
            kept.clear()
            kept[turn] = comm.allgather(make(own[0]) if own else None)
        return kept[turn][place]

    return of


def shared_folder(comm: MPI.Comm, folder: Path) -> Path:
    """Rank 0's folder, on every rank."""
    return Path(comm.bcast(str(folder)))
