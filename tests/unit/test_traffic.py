"""What ranks are said to send in a step is what they do send: counted where a group's transport is asked for it.

Four ranks are threads. A collective counts as a ring would carry it. What is said leaves out norms, counts and losses,
a few numbers a step, and small weights that are gathered with large ones, so figures agree to a few parts in a hundred.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hpctrain.comm.group import Handle, Op
from hpctrain.config import Config, parse
from hpctrain.data.batch import MicroBatch
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.plan import Plan, decide
from hpctrain.plan.topology import Topology
from hpctrain.plan.traffic import CODED, Flow, traffic
from hpctrain.plan.units import neighbours
from hpctrain.train import Job
from tests.support import threads
from tests.support.toys import VOCABULARY, Deck

LENGTH = 32
RUNS = {
    "tensor, by tokens": ("parallel.tp=4",),
    "tensor, by tokens, llama": ("parallel.tp=4", "model.family=llama"),
    "tensor, copies of heads": ("parallel.tp=4", "model.family=llama", "model.kv_heads=2"),
    "tensor, all tokens on all ranks": ("parallel.tp=4", "parallel.sequence=false"),
    "tensor, recomputed": ("parallel.tp=4", "train.recompute=full"),
    "tensor, every second one recomputed": ("parallel.tp=4", "train.recompute=every:2"),
    "tensor, recomputed, all tokens": ("parallel.tp=4", "parallel.sequence=false", "train.recompute=full"),
    "tensor in bf16": ("parallel.tp=4", "precision.compute=bf16"),
    "tensor in fp8": ("parallel.tp=4", "precision.compute=bf16", "precision.fp8=tensor"),
    "nothing shared": (),
    "nothing shared, in bf16": ("precision.compute=bf16",),
    "states shared": ("parallel.zero=1",),
    "gradients shared": ("parallel.zero=2",),
    "weights shared": ("parallel.zero=3",),
    "weights shared, room for all": ("parallel.zero=3", "parallel.gather_mib=100"),
    "weights shared, room for one": ("parallel.zero=3", "parallel.gather_mib=0"),
    "weights shared, recomputed": ("parallel.zero=3", "train.recompute=full"),
    "two copies": ("parallel.zero=2", "parallel.shard=2"),
    "weights in 8 bits": ("parallel.zero=3", "parallel.gather_in=int8"),
    "gradients in 8 bits": ("parallel.zero=1", "parallel.reduce_in=int8"),
    "stages": ("parallel.pp=4",),
    "stages of two ranks": ("parallel.pp=2", "parallel.zero=1"),
    "interleaved": ("parallel.pp=2", "parallel.schedule=interleaved"),
    "folded": ("parallel.pp=2", "parallel.schedule=zb-v"),
    "stages that share weights": ("parallel.pp=2", "parallel.zero=3"),
    "stages and products": ("parallel.pp=2", "parallel.tp=2", "model.family=llama"),
    "products and copies": ("parallel.tp=2", "parallel.zero=2"),
}


class Counting(threads.ThreadGroup):
    """A rank's group that counts the bytes that it would send by a ring."""

    sent = 0.0

    def _ring(self, nbytes: float) -> None:
        self.sent += nbytes * (self.size - 1) / self.size

    def _all_reduce(self, x: torch.Tensor, op: Op, later: bool) -> Handle:
        self._ring(2 * x.nbytes)
        return super()._all_reduce(x, op, later)

    def _all_gather(self, out: torch.Tensor, x: torch.Tensor, sizes: Sequence[int], later: bool) -> Handle:
        self._ring(out.nbytes)
        return super()._all_gather(out, x, sizes, later)

    def _reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, op: Op, sizes: Sequence[int], later: bool) -> Handle:
        self._ring(x.nbytes)
        return super()._reduce_scatter(out, x, op, sizes, later)

    def _all_to_all(self, out: torch.Tensor, x: torch.Tensor, *more: Any) -> Handle:
        self._ring(x.nbytes)
        return super()._all_to_all(out, x, *more)

    def _send(self, x: torch.Tensor, to: int, tag: int, later: bool) -> Handle:
        self.sent += x.nbytes
        return super()._send(x, to, tag, later)


def config_of(*overrides: str) -> Config:
    table = {
        "model": {"layers": 4, "width": 64, "heads": 4, "sequence": LENGTH},
        "train": {"batch": 16, "microbatch": 2},
        "log": {"peak_tflops": 1},
    }
    return parse(table, overrides)


def flows_of(plan: Plan, config: Config) -> tuple[Flow, ...]:
    return traffic(config, plan.shape, plan.mesh, plan.schedule)


def measured(plan: Plan, config: Config) -> dict[tuple[int, ...], float]:
    """What all ranks of each group sent together in the second step, the first of which the order of use is known."""

    class Samples(Deck):
        def _micro(self, step: int, rows: Sequence[int]) -> MicroBatch:
            tokens = torch.arange(len(rows) * (LENGTH + 1)).view(len(rows), -1) % VOCABULARY
            return MicroBatch(tokens[:, :-1], tokens[:, 1:].clone(), None, tuple(rows))

    def act(groups: threads.ThreadGroups) -> dict[tuple[int, ...], float]:
        job = Job.build(config, plan, groups, torch.device("cpu"))
        samples = Samples(config.train.batch, config.train.microbatch)
        job.step(0, samples)
        before = {ranks: getattr(group, "sent", 0.0) for ranks, group in groups._groups.items()}
        job.step(1, samples)
        return {ranks: group.sent - before[ranks] for ranks, group in groups._groups.items() if len(ranks) > 1}

    found: dict[tuple[int, ...], float] = defaultdict(float)
    for told in threads.over(plan.mesh, act):
        for ranks, sent in told.items():
            found[ranks] += sent
    return found


def said(plan: Plan, config: Config) -> dict[tuple[int, ...], float]:
    """The same as the plan has it; stages of a pipeline may differ, so of groups along other axes it is the mean."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    for flow in flows_of(plan, config):
        for group in plan.mesh.groups(*flow.axes):
            found[group] += sum(size for *_, size in flow.links) if flow.links else flow.bytes * len(group)
    return found


@pytest.mark.parametrize("run", RUNS)
def test_what_ranks_send_along_each_axis_is_what_the_plan_says(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(*RUNS[run])
    monkeypatch.setattr(threads, "ThreadGroup", Counting)
    plan = decide(config, Topology(("node",) * 4), VOCABULARY)
    counted, expected = measured(plan, config), said(plan, config)
    axes = {flow.axes for flow in flows_of(plan, config)}
    assert axes
    for along in axes:
        groups = set(plan.mesh.groups(*along))
        ours, theirs = (sum(one.get(group, 0.0) for group in groups) for one in (expected, counted))
        assert ours == pytest.approx(theirs, rel=0.03), along
    left = [sent for group, sent in counted.items() if group not in expected]
    assert sum(left) < 0.01 * sum(counted.values())  # what nothing is said of


def test_neighbours_get_weights_from_afar_once_and_then_from_each_other() -> None:
    config = config_of("parallel.zero=3", "parallel.near=2", "train.batch=32")
    plan = decide(config, Topology(("a", "a", "b", "b") * 2), VOCABULARY)
    found = {flow.name: flow for flow in traffic(config, plan.shape, neighbours(plan.mesh, 2), plan.schedule)}
    plain = {
        flow.name: flow
        for flow in traffic(config_of("parallel.zero=3", "train.batch=32"), plan.shape, plan.mesh, plan.schedule)
    }
    assert found["weights"].axes == ("far", "near") and found["weights of neighbours"].axes == ("near",)
    uses = plain["weights"].bytes / found["weights"].bytes
    assert uses > 2
    share = found["weights of neighbours"].bytes / (plain["weights"].bytes - found["weights"].bytes)
    assert share == pytest.approx((1 / 2) / (7 / 8), rel=0.01)


def test_coded_gradients_are_added_up_among_neighbours_first() -> None:
    config = config_of("parallel.zero=3", "parallel.near=2", "parallel.reduce_in=int8", "train.batch=32")
    plan = decide(config, Topology(("a", "a", "b", "b") * 2), VOCABULARY)
    found = {flow.name: flow for flow in traffic(config, plan.shape, neighbours(plan.mesh, 2), plan.schedule)}
    near, far = found["gradients to neighbours"], found["gradients"]
    assert (near.axes, near.pattern, far.axes, far.pattern) == (("near",), "all", ("far",), "all")
    assert far.bytes / near.bytes == pytest.approx((3 / 4 / 2) / (1 / 2), rel=0.01)
    assert pytest.approx(1.016, abs=0.001) == CODED


def test_axes_of_one_rank_have_no_traffic() -> None:
    config = config_of("parallel.tp=1")
    plan = decide(config, Topology(("node",)), VOCABULARY)
    assert traffic(config, plan.shape, Mesh(()), plan.schedule) == ()
