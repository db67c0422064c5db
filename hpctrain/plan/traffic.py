"""Traffic: the bytes that ranks send along each axis of the mesh in one step, and to whom.

A pure function of what is trained and how it is cut. Collectives count as a ring would carry them: of n ranks each
sends (n-1)/n of all that is gathered or scattered, and twice that to sum it everywhere; the ring runs through the group
in mesh order. Figures are those of a rank, as the mean over the stages of a pipeline. What a step sends beside them is
left out: norms, counts and losses, a few numbers each.

Tensor parallelism brings activations together four times a block forwards and, as a rank keeps only its own tokens of
them, six times backwards (Korthikanti 2022, section 4.2, with the third gather of each half made again).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from hpctrain.config import Config
from hpctrain.plan.formats import Format
from hpctrain.plan.layout import ITEMSIZE
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.rules import COPY, TENSOR, cuts
from hpctrain.plan.units import FAR, NEAR, PIPE, REPLICA, SHARD, STAGES
from hpctrain.plan.weights import NORMS, ModelShape, Weight, block, weights
from hpctrain.schedule.action import Action, Schedule

CODED = 1 + 4 / 256  # bytes of a number that travels in 8 bits, with its share of a scale
FIGURES = 3  # what ranks tell each other of each token's logits, in fp32; one more with label smoothing


@dataclass(frozen=True)
class Flow:
    """What travels along some axes in one step."""

    name: str
    axes: tuple[str, ...]
    """Its groups are those along these axes."""
    bytes: int
    """That a rank sends; by ``links`` the most that one does."""
    pattern: str = "ring"
    """``ring``: each sends to the next in the group; ``all``: to every other one equally; ``links``: as they say."""
    links: tuple[tuple[int, int, int], ...] = ()
    """A member of the group, another, and the bytes that the first sends to the second."""


@dataclass(frozen=True)
class Scene:
    """What traffic is a function of."""

    config: Config
    shape: ModelShape
    mesh: Mesh
    schedule: Schedule

    @property
    def stages(self) -> int:
        """Ranks of a pipeline."""
        return self.mesh.size(PIPE)

    @property
    def microbatches(self) -> int:
        """Of a step."""
        return self.schedule.microbatches

    @property
    def tokens(self) -> int:
        """Of a step, in one pipeline."""
        return self.config.train.batch // self.mesh.size(REPLICA, SHARD, FAR, NEAR) * self.shape.sequence

    @property
    def format(self) -> Format:
        """Of numbers."""
        return Format.of(self.config.precision)

    @property
    def activations(self) -> int:
        """Bytes of what goes from one block to the next in a step, of all tokens."""
        return self.tokens * self.shape.width * ITEMSIZE[self.format.compute]

    @property
    def shared(self) -> tuple[str, ...]:
        """The axes of the ranks that share one copy."""
        return (FAR, NEAR) if self.config.parallel.near else (SHARD,)

    @property
    def blocks(self) -> float:
        """Parameters in the blocks of a rank."""
        return self.shape.layers * _local(block(self.shape, 0), self.mesh) / self.stages

    @property
    def held(self) -> float:
        """Parameters of a rank outside of blocks; a tied head that is elsewhere has the embedding's weight too."""
        outside = _local((w for w in weights(self.shape) if not w.name.startswith("blocks.")), self.mesh)
        return (outside + self._tied) / self.stages

    @property
    def _tied(self) -> float:
        apart = self.shape.tied and self.schedule.home[0] != self.schedule.home[self.schedule.stages - 1]
        return apart * self.shape.vocabulary * self.shape.width / self.mesh.size(*TENSOR)


def traffic(config: Config, shape: ModelShape, mesh: Mesh, schedule: Schedule) -> tuple[Flow, ...]:
    """Everything that travels, along axes that have more than one rank.

    ``mesh`` has ``far`` and ``near`` in the place of ``dp`` where ``parallel.near`` is set.
    """
    scene = Scene(config, shape, mesh, schedule)
    found = (flow for flows in FLOWS for flow in flows(scene))
    return tuple(flow for flow in found if mesh.size(*flow.axes) > 1 and flow.bytes)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def _products(scene: Scene) -> Iterator[Flow]:
    """Activations, per block and around the blocks, and vectors whose gradient is summed with each micro-batch."""
    ranks, shape, train = scene.mesh.size(*TENSOR), scene.shape, scene.config.train
    whole = _times_by_tokens(scene) if scene.config.parallel.sequence else _times(scene)
    figures = scene.tokens * (FIGURES + bool(train.smoothing)) * 4 * ranks
    vectors = 0
    if scene.config.parallel.sequence:
        norms = (2 * shape.layers + 1) * len(NORMS[shape.norm]) * shape.width
        places = shape.sequence * shape.width * (shape.positions == "learned")
        vectors = 2 * scene.microbatches * (norms + places) * ITEMSIZE[scene.format.compute]
    total = whole * scene.activations + figures + vectors
    yield Flow("activations", TENSOR, _bytes(total * _ring(ranks) / scene.stages))


def _copies(scene: Scene) -> Iterator[Flow]:
    """Gradients of heads of keys and values that several ranks have, summed with each micro-batch."""
    several = (w for w in block(scene.shape, 0) if "kv_heads" in w.dims)
    numbers = scene.shape.layers * _local(several, scene.mesh) / scene.stages
    total = 2 * scene.microbatches * numbers * ITEMSIZE[scene.format.compute]
    yield Flow("gradients of heads", (COPY,), _bytes(total * _ring(scene.mesh.size(COPY))))


def _times_by_tokens(scene: Scene) -> int:
    """How often all tokens are gathered or scattered: four times forwards, and the same backwards with two to gather
    anew, save where products of fp8 keep them; once each way at the embedding and at the head."""
    backward = 6 if scene.config.precision.fp8 == "none" else 4
    return scene.shape.layers * (4 + backward) + 4 * _again(scene) + 4


def _times(scene: Scene) -> int:
    """Where every rank has all tokens, sums: two forwards and two backwards; one at the embedding, one at the head."""
    return 2 * (4 * scene.shape.layers + 2 * _again(scene) + 2)


def _again(scene: Scene) -> int:
    """Blocks whose forward is made a second time."""
    kind, _, every = scene.config.train.recompute.partition(":")
    return {"full": scene.shape.layers, "every": -(-scene.shape.layers // int(every or 1))}.get(kind, 0)


# ---- data parallelism and what ranks share ---------------------------------------------------------------------------


def _gradients(scene: Scene) -> Iterator[Flow]:
    """Summed over all ranks once a step, or scattered to their owners: once a step, or with each micro-batch."""
    parallel, itemsize = scene.config.parallel, ITEMSIZE[scene.format.summed]
    stage, numbers = STAGES[parallel.zero], scene.blocks + scene.held
    if not stage.states:
        ranks = scene.mesh.size(REPLICA, SHARD)
        yield Flow("gradients", (REPLICA, SHARD), _bytes(2 * _ring(ranks) * numbers * itemsize))
        return
    times, ranks = scene.microbatches if stage.gradients else 1, scene.mesh.size(*scene.shared)
    if parallel.reduce_in == "exact":
        yield Flow("gradients", scene.shared, _bytes(times * _ring(ranks) * numbers * itemsize))
    elif parallel.near:
        near, far = parallel.near, scene.mesh.size(FAR)
        yield Flow("gradients to neighbours", (NEAR,), _bytes(times * _ring(near) * numbers * CODED), "all")
        yield Flow("gradients", (FAR,), _bytes(times * _ring(far) * numbers / near * CODED), "all")
    else:
        yield Flow("gradients", scene.shared, _bytes(times * _ring(ranks) * numbers * CODED), "all")
    copies = scene.mesh.size(REPLICA)
    yield Flow("gradients of copies", (REPLICA,), _bytes(2 * _ring(copies) * numbers / ranks * itemsize))


def _weights(scene: Scene) -> Iterator[Flow]:
    """Gathered once a step, or whenever a block is used and not there any more."""
    parallel, itemsize, ranks = scene.config.parallel, ITEMSIZE[scene.format.compute], scene.mesh.size(*scene.shared)
    if not STAGES[parallel.zero].states:
        return
    wire = itemsize if parallel.gather_in == "exact" else CODED
    times = _gathers(scene) if STAGES[parallel.zero].weights else 1.0
    far = min(times, 1.0) if parallel.near else times
    yield Flow("weights", scene.shared, _bytes(_ring(ranks) * (far * scene.blocks + scene.held) * wire))
    if parallel.near:
        numbers = (times - far) * scene.blocks
        yield Flow("weights of neighbours", (NEAR,), _bytes(_ring(parallel.near) * numbers * itemsize))


def _gathers(scene: Scene) -> float:
    """How often a block is gathered in a step, as the mean: each forward and each backward needs all blocks of its
    stage, and those there is room for stay where one turns into the other."""
    layers = scene.shape.layers / scene.schedule.stages
    room, own = _room(scene), scene.shape.layers / scene.stages
    if room >= own:
        return 1.0
    lines = [[action for action in line if action.op in "FBI"] for line in scene.schedule.ranks]
    uses = sum(map(len, lines)) * layers
    turns = sum(_turns(a, b) for line in lines for a, b in zip(line, line[1:], strict=False))
    return (uses - turns * min(room, layers)) / scene.shape.layers


def _turns(a: Action, b: Action) -> bool:
    return a.stage == b.stage and (a.op == "F") != (b.op == "F")


def _room(scene: Scene) -> int:
    """Blocks alive at once."""
    given = scene.config.parallel.gather_mib
    size = _local(block(scene.shape, 0), scene.mesh) * ITEMSIZE[scene.format.compute]
    return 2 if given == "auto" else max(1, int(given * 2**20 / size))


# ---- pipelines -------------------------------------------------------------------------------------------------------


def _stages(scene: Scene) -> Iterator[Flow]:
    """Activations to the next stage and their gradients back, and the sum of a tied weight's gradients."""
    by_tokens = scene.config.parallel.sequence and scene.mesh.size(*TENSOR) > 1
    size = scene.activations // (scene.mesh.size(*TENSOR) if by_tokens else 1)
    home, links = scene.schedule.home, []
    for stage in range(scene.schedule.stages - 1):
        if scene.schedule.crosses(stage):
            ends = home[stage], home[stage + 1]
            links += [(*ends, size), (*ends[::-1], size)]
    if scene._tied:
        ends = home[0], home[scene.schedule.stages - 1]
        owned = scene._tied / (scene.mesh.size(*scene.shared) if STAGES[scene.config.parallel.zero].states else 1)
        links += [(*pair, _bytes(owned * ITEMSIZE[scene.format.summed])) for pair in (ends, ends[::-1])]
    sent = [sum(size for source, _, size in links if source == rank) for rank in range(scene.stages)]
    yield Flow("activations between stages", (PIPE,), max(sent), "links", tuple(links))


FLOWS: tuple[Callable[[Scene], Iterator[Flow]], ...] = (_products, _copies, _gradients, _weights, _stages)


def _ring(ranks: int) -> float:
    """What of all that is gathered or scattered each rank sends on."""
    return (ranks - 1) / ranks


def _local(found: Iterator[Weight], mesh: Mesh) -> float:
    """Parameters of one rank."""
    return sum(w.size / prod(mesh.size(*cut.axes) for cut in cuts(w)) for w in found)


def _bytes(size: float) -> int:
    return round(size)
