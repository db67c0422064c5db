"""Read parts back: from this node's disk what is there, and from other ranks the rest.

What to read is decided first, by all ranks from the same list of what all nodes have, and every part that shall be read
is checked before a tensor is touched. Where the parts were written does not matter: a part may be on any node.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint import disk, load, near_file
from hpctrain.checkpoint.disk import Piece
from hpctrain.checkpoint.format import Index
from hpctrain.checkpoint.keep import in_a_line
from hpctrain.checkpoint.near_file import Chain, Head, Run, meet, placed, read_head, scatter
from hpctrain.checkpoint.ranges import file_order, flat_bytes, pieces
from hpctrain.checkpoint.state import Entry, State
from hpctrain.checkpoint.streams import Ends, flow
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError, IncompleteError
from hpctrain.plan.topology import Topology


@dataclass(frozen=True)
class Part:
    """A part that lies on a node: the file's name there, and what its head says."""

    node: int
    name: str
    save: str
    step: int
    after: int
    rank: int
    ranks: int

    @property
    def own(self) -> bool:
        """Whether the rank that had these bytes wrote them on its own node."""
        return self.name.endswith(".own")


@dataclass(frozen=True)
class Save:
    """The parts of one save, wherever they are."""

    step: int
    save: str
    parts: tuple[Part, ...]

    @property
    def ranks(self) -> int:
        """How many ranks had a part."""
        return self.parts[0].ranks

    def lacking(self, but: Collection[Part] = ()) -> list[int]:
        """The ranks whose parts are nowhere, save for those in ``but``."""
        have = {part.rank for part in self.parts if part not in but}
        return [rank for rank in range(self.ranks) if rank not in have]

    def chosen(self, but: Collection[Part]) -> list[Part]:
        """One part of each rank, where none is lacking: the one on its own node, else a copy."""
        best: dict[int, Part] = {}
        for part in sorted(self.parts, key=lambda part: (not part.own, part.node)):
            if part not in but:
                best.setdefault(part.rank, part)
        return [best[rank] for rank in range(self.ranks)]


def saves(parts: Sequence[Part]) -> list[Save]:
    """The saves that these are parts of, the newest first."""
    found: dict[tuple[int, str], list[Part]] = {}
    for part in parts:
        found.setdefault((part.step, part.save), []).append(part)
    return [Save(step, save, tuple(found[step, save])) for step, save in sorted(found, reverse=True)]


def reader(topology: Topology, part: Part) -> int:
    """The rank that checks a part and sends it: the one that wrote it if it runs there, else one of that node."""
    here = topology.ranks_of(part.node)
    return part.rank if part.rank in here else here[part.rank % len(here)]


def check(
    chosen: Sequence[Part], folder: Path, topology: Topology, entries: Sequence[Entry], group: Group, verify: bool
) -> list[tuple[Part, str]]:
    """The parts that cannot be read, or do not have their checksums, and what is wrong with each. Collective.

    Each part is looked at by one rank of its node. Raises CheckpointError where they are of other tensors than these.
    """
    mine = [part for part in chosen if reader(topology, part) == group.rank]
    found = together(group, lambda: list(_faults(mine, folder, entries, verify)), f"checking {folder}")
    return [(Part(**part), fault) for told in group.collect(found) for part, fault in told]


def fill(
    chosen: Sequence[Part], folder: Path, topology: Topology, entries: Sequence[Entry], state: State, group: Group
) -> None:
    """Fill ``state`` from one part of each rank that saved; ``folder`` is this node's. Collective.

    Raises CheckpointError on all ranks where one of them cannot read; tensors may be filled in part by then.
    """
    doing, node = f"reading {folder}", topology.node_of(group.rank)
    here = [part for part in chosen if part.node == node]
    heads = together(group, lambda: {part.rank: read_head(folder / part.name)[0] for part in here}, doing)
    held = [entry for entry in file_order(entries) if entry.rank is not None]
    targets = {entry.name: flat_bytes(state[entry.name].tensor) for entry in held}
    wanted = _wanted(entries, targets)
    near = [piece for part in here for piece in _overlaps(folder / part.name, heads[part.rank], wanted)]
    together(group, lambda: _read(near), doing)
    own = [part for part in here if reader(topology, part) == group.rank]
    away = [rank for rank in range(group.size) if topology.node_of(rank) != node]
    asked = _everyones(wanted, group)
    served = {rank: [Served(folder / part.name, heads[part.rank], asked[rank]) for part in own] for rank in away}
    far = Serving(served, wanted, group)
    flow(far, group, doing)
    count = sum(piece.memory.numel() for _, piece in near) + sum(far.in_bytes)
    together(group, lambda: _all_came(count, wanted, folder), doing)
    for name, flat in targets.items():
        _put(flat, state[name].tensor)


class Served:
    """What a rank asked for of a part, end to end: where it is in the file, and which runs of the checkpoint it is."""

    def __init__(self, path: Path, head: Head, asked: Sequence[Run]) -> None:
        starts = list(accumulate((length for _, length in head.runs), initial=head.data_at))
        common = list(meet(head.runs, asked))
        self.path = path
        self.runs = [(head.runs[run][0] + skipped, length) for run, skipped, _, _, length in common]
        self.places = [starts[run] + skipped for run, skipped, _, _, _ in common]


class Serving(Ends):
    """What a rank reads for ranks of other nodes, and what it has asked them for. Making it is collective."""

    def __init__(self, served: Mapping[int, Sequence[Served]], wanted: Sequence[Piece], group: Group) -> None:
        self._files = {rank: [(one.path, at) for one in parts for at in one.places] for rank, parts in served.items()}
        runs = {rank: [run for one in parts for run in one.runs] for rank, parts in served.items()}
        told = _told([runs.get(rank, []) for rank in range(group.size)], group)
        self._out = [Chain([length for _, length in runs.get(rank, [])]) for rank in range(group.size)]
        self._in = [Chain([length for _, length in one]) for one in told]
        self._targets = [_memories(one, wanted) for one in told]
        self.out_bytes = [chain.total for chain in self._out]
        self.in_bytes = [chain.total for chain in self._in]

    def give(self, to: int, start: int, into: Tensor) -> None:
        pieces: dict[Path, list[Piece]] = {}
        for number, skipped, place, length in self._out[to].cut(start, into.numel()):
            path, at = self._files[to][number]
            pieces.setdefault(path, []).append(Piece(at + skipped, into[place : place + length]))
        for path, some in pieces.items():
            disk.read(path, some)

    def take(self, source: int, start: int, data: Tensor) -> None:
        scatter(self._in[source], self._targets[source], start, data)


def _faults(
    parts: Sequence[Part], folder: Path, entries: Sequence[Entry], verify: bool
) -> Iterator[tuple[dict[str, Any], str]]:
    for part in parts:
        path = folder / part.name
        try:
            head, _ = read_head(path)
            if verify:
                near_file.check(path)
        except (CheckpointError, OSError) as error:  # a disk that fails is what the other copy is for
            yield asdict(part), in_a_line(error)
            continue
        load.check(path, Index(head.step, {}, head.slots), entries)


def _wanted(entries: Sequence[Entry], targets: Mapping[str, Tensor]) -> list[Piece]:
    """Where each run of bytes of what this rank holds goes, ascending."""
    pairs = zip(file_order(entries), placed(entries), strict=True)
    return [
        piece
        for entry, slot in pairs
        if entry.name in targets
        for piece in pieces(entry, entry.layout.boxes(entry.mesh, entry.rank), targets[entry.name], slot)
    ]


def _overlaps(path: Path, head: Head, wanted: Sequence[Piece]) -> Iterator[tuple[Path, Piece]]:
    """What a file on this node has of what is wanted."""
    starts = list(accumulate((length for _, length in head.runs), initial=head.data_at))
    for run, skipped, number, into, length in meet(head.runs, _runs(wanted)):
        yield path, Piece(starts[run] + skipped, wanted[number].memory[into : into + length])


def _read(found: Sequence[tuple[Path, Piece]]) -> None:
    for path, some in groupby(found, key=lambda one: one[0]):
        disk.read(path, [piece for _, piece in some])


def _runs(wanted: Sequence[Piece]) -> list[Run]:
    return [(piece.at, piece.memory.numel()) for piece in wanted]


def _memories(runs: Sequence[Run], wanted: Sequence[Piece]) -> list[Tensor]:
    """The memory of each run, which lies in one wanted piece."""
    starts = [piece.at for piece in wanted]
    found = []
    for at, length in runs:
        piece = wanted[bisect_right(starts, at) - 1]
        found.append(piece.memory[at - piece.at : at - piece.at + length])
    return found


def _everyones(wanted: Sequence[Piece], group: Group) -> list[list[Run]]:
    """The runs that each rank wants. Collective."""
    own = torch.tensor(_runs(wanted), dtype=torch.int64).view(-1).to(group.device)
    sizes = group.collect(own.numel())
    every = torch.empty(sum(sizes), dtype=torch.int64, device=group.device)
    group.all_gather(every, own, sizes=sizes)
    return [_pairs(one) for one in every.cpu().split(sizes)]


def _told(runs: Sequence[Sequence[Run]], group: Group) -> list[list[Run]]:
    """Tell each rank its list, and give what each told this one. Collective."""
    counts = torch.tensor([2 * len(one) for one in runs], device=group.device)
    coming = torch.empty_like(counts)
    group.all_to_all(coming, counts)
    sizes = coming.tolist()
    given = torch.tensor([number for one in runs for run in one for number in run], dtype=torch.int64)
    taken = torch.empty(sum(sizes), dtype=torch.int64, device=group.device)
    group.all_to_all(taken, given.to(group.device), out_sizes=sizes, sizes=counts.tolist())
    return [_pairs(one) for one in taken.cpu().split(sizes)]


def _pairs(numbers: Tensor) -> list[Run]:
    return [(at, length) for at, length in numbers.view(-1, 2).tolist()]


def _all_came(count: int, wanted: Sequence[Piece], folder: Path) -> None:
    needed = sum(piece.memory.numel() for piece in wanted)
    if count != needed:
        raise IncompleteError(
            f"{count} of {needed} bytes came from the parts near the ranks",
            f"the parts in {folder} and on the other nodes do not make a whole",
            "an older checkpoint is taken",
        )


def _put(flat: Tensor, tensor: Tensor) -> None:
    """Bring bytes to a tensor whose memory they are not, since it does not lie in one run."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.dtype).view(tensor.shape))
