"""Plan: every decision about a run as one value, and ``decide``, which takes them all.

``decide`` is a pure function of what a person chose and of what the machine offers. It runs on a laptop as well as
in the job, and every rank of a job computes the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from hpctrain.config import Config
from hpctrain.errors import PlanError
from hpctrain.plan.formats import Format
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.place import Placement, compare, place
from hpctrain.plan.rules import TENSOR, axes, check, cuts
from hpctrain.plan.saved import host_bytes, shown
from hpctrain.plan.spans import TIED, Span, mine, spans
from hpctrain.plan.states import state_bytes
from hpctrain.plan.topology import Topology
from hpctrain.plan.traffic import Flow, traffic
from hpctrain.plan.units import PIPE, REPLICA, SHARD, STAGES, Member, Unit, arrange, choose, neighbours, room
from hpctrain.plan.weights import ModelShape, Weight, parameters
from hpctrain.schedule.action import Schedule, accumulate
from hpctrain.schedule.kinds import find, make
from hpctrain.schedule.passes import add_messages

UNKNOWN = 1 << 30  # tokens of a tokenizer that is not there yet: enough to be cut over any ranks
GUESSED = 1 << 16  # the same where what travels is to be counted
SHARED = {1: "optimizer states", 2: "optimizer states and gradients", 3: "optimizer states, gradients and weights"}


@dataclass(frozen=True)
class Plan:
    """What a run will do: ranks, model, who holds what, in which order, and what it weighs."""

    topology: Topology
    mesh: Mesh
    placement: Placement
    """What its order is worth."""
    shape: ModelShape
    dtype: str
    """Of what the optimizer updates; the weights that multiply may have another (``formats.py``)."""
    layouts: dict[str, Layout]
    """Of each parameter, by its name."""
    spans: tuple[Span, ...]
    """What each stage of the pipeline has of the model."""
    units: tuple[tuple[Unit, ...], ...]
    """For each rank along ``pp``: parameters that are gathered, reduced and updated together."""
    zero: int
    """The stage of ZeRO: what the ranks share."""
    gather_bytes: int
    """Weights of blocks alive at once, where ranks share them."""
    schedule: Schedule
    bytes: dict[str, int]
    """What one rank holds, in bytes, the one that holds most: weights, gradients, optimizer, and buffers for what
    comes and goes."""
    host: dict[str, int]
    """What saves take of a rank's host memory, in bytes; where ranks compute on CPUs, on top of what they hold."""
    reasons: tuple[str, ...]
    """Why it is so, a sentence each."""

    def spans_of(self, stage_rank: int) -> tuple[Span, ...]:
        """What a rank along ``pp`` has of the model: those of its stages."""
        home = self.schedule.home
        return tuple(span for stage, span in enumerate(self.spans) if home[stage] == stage_rank)

    def show(self) -> str:
        """The plan as lines for a person."""
        held = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in self.bytes.items() if size)
        return "\n".join((
            f"ranks     {self.topology.describe()}",
            f"mesh      {self.mesh}",
            f"model     {parameters(self.shape):,} parameters in {self.dtype}",
            f"a rank    {held}",
            *([f"on the host  {shown(self.host)}"] if self.host else []),
            *(f"because   {reason}" for reason in self.reasons),
        ))  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The plan as plain values; what a checkpoint keeps of the run that wrote it."""
        return {
            "mesh": self.mesh.to_json(),
            "topology": self.topology.to_json(),
            "placement": {"order": self.placement.load.to_json(), "given": self.placement.given.to_json()},
            "shape": vars(self.shape),
            "dtype": self.dtype,
            "zero": self.zero,
            "parameters": parameters(self.shape),
            "schedule": self.schedule.to_json(),
            "bytes": self.bytes,
            "host": self.host,
            "reasons": list(self.reasons),
        }


def lay(config: Config, topology: Topology) -> Mesh:
    """The mesh of a run, its ranks in the order in which links are used best; every rank of a job finds the same one.

    Along ``dp`` ranks take other samples; a batch that does not divide over them is refused.
    """
    mesh = grid(config, topology)
    if config.parallel.placement == "given" or topology.levels[0].count == 1:
        return mesh
    shape = ModelShape.of(config.model, _vocabulary(config, _guess(config)))
    return replace(mesh, order=place(topology, _seen(config, mesh), _flows(config, shape, mesh)).order)


def grid(config: Config, topology: Topology) -> Mesh:
    """The axes of a run, over ranks as they were numbered."""
    parallel, ranks = config.parallel, len(topology.hosts)
    model = parallel.pp * parallel.tp
    dp = max(1, ranks // model) if parallel.dp == "auto" else parallel.dp
    if dp * model != ranks:
        raise PlanError(
            f"parallel.dp x pp x tp = {dp} x {parallel.pp} x {parallel.tp} is not the number of ranks, {ranks}",
            "the sizes of the mesh's axes multiply to the ranks that were started",
            f"start {dp * model} ranks, or " + _fitting(ranks, model),
        )
    _microbatches(config, dp)
    data = choose(parallel.zero, dp, parallel.shard)
    if parallel.near is not None:
        neighbours(Mesh(data), parallel.near)
    tensor = axes(ModelShape.of(config.model, _vocabulary(config, UNKNOWN)), parallel.tp) if parallel.tp > 1 else ()
    return Mesh((*([(PIPE, parallel.pp)] if parallel.pp > 1 else []), *data, *tensor))


def _vocabulary(config: Config, auto: int) -> int:
    return auto if config.model.vocabulary == "auto" else config.model.vocabulary


def _guess(config: Config) -> int:
    """The tokens of a tokenizer that is not there yet, as far as its name tells them."""
    kind, _, size = config.data.tokenizer.partition(":")
    if config.data.sources or kind not in ("bytes", "bpe"):
        return GUESSED
    return int(size) if size.isdigit() else 257


def _seen(config: Config, mesh: Mesh) -> Mesh:
    """The mesh with the axes that something travels along."""
    return neighbours(mesh, config.parallel.near) if config.parallel.near else mesh


def _flows(config: Config, shape: ModelShape, mesh: Mesh) -> tuple[Flow, ...]:
    schedule = pipeline(config, _microbatches(config, mesh.size(REPLICA, SHARD)))
    return traffic(config, shape, _seen(config, mesh), schedule)


def _fitting(ranks: int, model: int) -> str:
    """What to set where as many ranks were started, and ``model`` of them have one sample."""
    if ranks % model == 0:
        return f'set parallel.dp to {ranks // model} or "auto"'
    return f"choose parallel.pp and parallel.tp so that their product divides {ranks}"


def decide(config: Config, topology: Topology, vocabulary: int) -> Plan:
    """Take every decision about a run; ``vocabulary`` is the tokenizer's number of tokens."""
    mesh = lay(config, topology)
    shape = ModelShape.of(config.model, vocabulary)
    check(shape, config.parallel.tp)
    format, stage = Format.of(config.precision), STAGES[config.parallel.zero]
    schedule = pipeline(config, _microbatches(config, mesh.size(REPLICA, SHARD)))
    parts = spans(shape, schedule, config.parallel.layers_per_stage)
    homes = [tuple(parts[s] for s, home in schedule.home.items() if home == rank) for rank in range(config.parallel.pp)]
    units = tuple(cut(mine(shape, own), format.master, mesh, _alone(shape, homes)) for own in homes)
    given = config.parallel.gather_mib
    gather_bytes = max(room(own, format.compute, None if given == "auto" else int(given * 2**20)) for own in units)
    placement = compare(topology, _seen(config, mesh), _flows(config, shape, mesh))
    return Plan(
        topology=topology,
        mesh=mesh,
        placement=placement,
        shape=shape,
        dtype=format.master,
        layouts=_layouts(units, stage.axes, format.master),
        spans=parts,
        units=units,
        zero=config.parallel.zero,
        gather_bytes=gather_bytes,
        schedule=schedule,
        bytes=max((_bytes(own, mesh, config, gather_bytes, format) for own in units), key=lambda b: sum(b.values())),
        host=host_bytes(config, units, topology, format.master),
        reasons=(*_reasons(config, mesh), *([placement.reason] if placement.reason else [])),
    )


def _layouts(units: Iterable[Iterable[Unit]], axes: tuple[str, ...], dtype: str) -> dict[str, Layout]:
    every = [(unit, slot) for own in units for unit in own for slot in unit.slots]
    return {slot.name: unit.layout(slot, axes, dtype) for unit, slot in every}


def pipeline(config: Config, microbatches: int) -> Schedule:
    """What the ranks along ``pp`` do in a step of so many micro-batches, and what they send each other."""
    parallel = config.parallel
    find(parallel.schedule)  # told of a mistake also where it does not matter
    if parallel.pp == 1:
        return accumulate(microbatches)
    return _pipeline(parallel.schedule, parallel.pp, microbatches, parallel.chunks, parallel.group)


@lru_cache(maxsize=8)
def _pipeline(kind: str, ranks: int, microbatches: int, chunks: int | None, group: int | None) -> Schedule:
    return add_messages(make(kind, ranks, microbatches, chunks, group))


def cut(found: Iterable[Weight], dtype: str, mesh: Mesh | None = None, alone: Collection[str] = ()) -> tuple[Unit, ...]:
    """The units of a model: its blocks, and what is around them; weights that are ``alone`` are each one by itself."""
    found = tuple(found)
    blocks = {".".join(weight.name.split(".")[:2]) for weight in found if weight.name.startswith("blocks.")}
    shared = mesh is not None and mesh.size(*TENSOR) > 1
    members = (Member.of(w.name, w.shape, w.decay, dtype, blocks, cuts(w) if shared else ()) for w in found)
    return arrange((replace(m, unit=m.name) if m.name in alone else m for m in members), mesh)


def _alone(shape: ModelShape, homes: Sequence[Sequence[Span]]) -> tuple[str, ...]:
    """A tied weight that two ranks of a pipeline have: they have to own the same intervals of it."""
    holders = [own for own in homes if any(span.has(TIED, shape.tied) for span in own)]
    return (TIED,) if len(holders) > 1 else ()


def _bytes(units: tuple[Unit, ...], mesh: Mesh, config: Config, gather_bytes: int, format: Format) -> dict[str, int]:
    """Of the first rank along ``dp``, whose intervals are the largest."""
    stage, near = STAGES[config.parallel.zero], config.parallel.near
    sharers = mesh.size(*stage.axes)
    whole = sum(unit.total for unit in units)
    own = sum(stop - start for start, stop in (unit.interval(sharers, 0) for unit in units))
    held = [unit.total for unit in units if unit.held]
    blocks = [unit.total for unit in units if not unit.held]
    reduced = format.gradient_bytes(max(held, default=0) + 2 * max(blocks, default=0))
    gathered = format.weight_bytes(sum(held)) + min(gather_bytes, format.weight_bytes(sum(blocks)))
    return {
        "weights": format.weight_bytes(own if stage.weights else whole) + format.master_bytes(own),
        "gradients": format.gradient_bytes(own if stage.gradients else whole),
        "optimizer": state_bytes(units, sharers, 0, config.optim, format.master),
        "buffers": stage.gradients * reduced + stage.weights * gathered,
        **({"second copy": format.weight_bytes(sum(-(-total // near) for total in blocks))} if near else {}),
    }


def _reasons(config: Config, mesh: Mesh) -> Iterator[str]:
    ranks, batch = mesh.size(REPLICA, SHARD), config.train.batch
    microbatches, sharers = _microbatches(config, ranks), mesh.size(*STAGES[config.parallel.zero].axes)
    if mesh.ranks_total > ranks:
        each = mesh.ranks_total // ranks
        yield f"{each} ranks work on each sample: pp = {mesh.size(PIPE)}, tp = {mesh.size(*TENSOR)}"
    yield f"{'every rank takes' if ranks == mesh.ranks_total else 'ranks along dp take'} other samples: dp = {ranks}"
    if config.parallel.zero:
        copies = f", and there are {ranks // sharers} copies" * (ranks > sharers)
        yield f"parallel.zero = {config.parallel.zero}: {sharers} ranks share {SHARED[config.parallel.zero]}{copies}"
    if config.parallel.near:
        yield f"parallel.near = {config.parallel.near}: weights come from afar once a step, and then from neighbours"
    yield (
        f"train.batch = {batch} over dp = {ranks}, {config.train.microbatch} at once,"
        f" is {microbatches} micro-batch{'es' * (microbatches > 1)} a rank"
    )


def _microbatches(config: Config, dp: int) -> int:
    """Micro-batches of a rank in a step; the last one may be smaller than the others."""
    batch = config.train.batch
    if batch % dp:
        near = [n for n in (batch // dp * dp, (batch // dp + 1) * dp) if n]
        raise PlanError(
            f"train.batch = {batch} does not divide over {dp} data-parallel ranks",
            "every rank takes the same number of sequences",
            f"set train.batch to {' or '.join(map(str, near))}",
        )
    return -(-batch // dp // config.train.microbatch)
