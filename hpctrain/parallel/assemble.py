"""Assemble: who of a rank's groups takes part in what, as the plan says."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from hpctrain.comm.groups import Groups
from hpctrain.config import Config, ParallelConfig
from hpctrain.optim.optimizers import OPTIMIZERS, Optimizers
from hpctrain.parallel.deferred import Deferred
from hpctrain.parallel.pipeline import Pipe
from hpctrain.parallel.units import Ranks
from hpctrain.parallel.zero import Sharded
from hpctrain.plan.plan import Plan, pipeline
from hpctrain.plan.rules import TENSOR
from hpctrain.plan.spans import TIED
from hpctrain.plan.units import FAR, NEAR, PIPE, STAGES, neighbours


def sharers(config: Config, plan: Plan, groups: Groups) -> Ranks:
    """The groups that share what this rank has of the model. Collective."""
    stage, near = STAGES[plan.zero], config.parallel.near
    inner, outer = groups[stage.axes], groups[stage.replicas]
    if near is None:
        return Ranks(inner, outer)
    around = groups.regroup(neighbours(plan.mesh, near))
    return Ranks(inner, outer, around[NEAR], around[FAR])


def travelling(parallel: ParallelConfig) -> tuple[str | None, str | None]:
    """In what weights and gradients travel, None for as they are."""
    return tuple(None if form == "exact" else form for form in (parallel.gather_in, parallel.reduce_in))


def piped(config: Config, plan: Plan, groups: Groups, deferred: Deferred) -> Pipe:
    """The pipeline that this rank is in."""
    by_tokens = config.parallel.sequence and groups[TENSOR].size > 1
    terms = {"smoothing": config.train.smoothing, "z_loss": config.train.z_loss}
    return Pipe(plan.spans, partial(pipeline, config), groups[PIPE], by_tokens, deferred, terms)


def optimizers(sharded: Sharded, config: Config, plan: Plan, groups: Groups) -> Optimizers:
    """An optimizer for each set of parameters that other ranks have parts of. Collective."""
    make, axes = OPTIMIZERS[config.optim.kind], STAGES[plan.zero].axes
    kinds = sorted(sharded.kinds.items())  # in one order on all ranks
    return Optimizers(tuple(make(own, config.optim, groups[(*axes, *cut)], config.run.seed) for cut, own in kinds))


def counted(sharded: Sharded, plan: Plan, groups: Groups) -> list[Tensor]:
    """This rank's gradients, without those that another rank of ``everyone`` counts."""
    mesh, home = plan.mesh, plan.schedule.home
    repeats = {TIED} if plan.shape.tied and groups[PIPE].rank != home[0] else set()
    return [
        flat.gradient
        for cut, flats in sharded.kinds.items()
        if mesh.index(groups.rank, *(axis for axis in TENSOR if axis not in cut)) == 0
        for flat in flats
        if not repeats.intersection(piece.name for piece in flat.pieces)
    ]


def everyone(plan: Plan) -> tuple[str, ...]:
    """The axes along which ranks own different parts of the model."""
    return (PIPE, *STAGES[plan.zero].axes, *TENSOR)
