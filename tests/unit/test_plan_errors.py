"""What cannot be cut is refused before a rank is started, and doing what the message says mends it."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hpctrain.config import parse
from hpctrain.errors import PlanError
from hpctrain.plan.plan import Plan, decide, lay
from hpctrain.plan.topology import Topology

MODEL = ("model.layers=4", "model.width=16", "model.heads=4", "model.sequence=8", "train.batch=24")


def plan(ranks: int, *overrides: str, vocabulary: int = 300) -> Plan:
    return decide(parse({}, (*MODEL, *overrides)), Topology(("node",) * ranks), vocabulary)


# Ranks, what was chosen, the message, and what its last line says to choose instead, each with its number of ranks.
CASES = {
    "ranks for a grid that is given": (
        4, ("parallel.dp=3", "parallel.pp=2"),
        ["parallel.dp x pp x tp = 3 x 2 x 1 is not the number of ranks, 4",
         "the sizes of the mesh's axes multiply to the ranks that were started",
         'start 6 ranks, or set parallel.dp to 2 or "auto"'],
        [(6, ("parallel.dp=3", "parallel.pp=2")), (4, ("parallel.dp=2", "parallel.pp=2")),
         (4, ("parallel.dp=auto", "parallel.pp=2"))],
    ),
    "ranks that the model's do not divide": (
        4, ("parallel.pp=3",),
        ["parallel.dp x pp x tp = 1 x 3 x 1 is not the number of ranks, 4",
         "the sizes of the mesh's axes multiply to the ranks that were started",
         "start 3 ranks, or choose parallel.pp and parallel.tp so that their product divides 4"],
        [(3, ("parallel.pp=3",)), (4, ("parallel.pp=2",)), (4, ("parallel.pp=2", "parallel.tp=2"))],
    ),
    "a batch over the ranks that are left for it": (
        8, ("parallel.pp=2", "train.batch=6"),
        ["train.batch = 6 does not divide over 4 data-parallel ranks",
         "every rank takes the same number of sequences",
         "set train.batch to 4 or 8"],
        [(8, ("parallel.pp=2", "train.batch=4")), (8, ("parallel.pp=2", "train.batch=8"))],
    ),
    "heads": (
        3, ("parallel.tp=3",),
        ["parallel.tp = 3 does not fit a model of 4 heads, 4 of keys and values",
         "each rank takes whole heads, as many of keys and values or a copy of one, and a part of the vocabulary",
         "set parallel.tp to one of 1, 2, 4"],
        [(1, ("parallel.tp=1",)), (2, ("parallel.tp=2",)), (4, ("parallel.tp=4",))],
    ),
    "heads of keys and values": (
        4, ("parallel.tp=4", "model.heads=12", "model.width=48", "model.kv_heads=6"),
        ["parallel.tp = 4 does not fit a model of 12 heads, 6 of keys and values",
         "each rank takes whole heads, as many of keys and values or a copy of one, and a part of the vocabulary",
         "set parallel.tp to one of 1, 2, 3, 6, 12"],
        [(tp, (f"parallel.tp={tp}", "model.heads=12", "model.width=48", "model.kv_heads=6")) for tp in (1, 3, 6, 12)],
    ),
    "stages": (
        4, ("parallel.pp=4", "parallel.schedule=interleaved"),
        ["a pipeline of 8 stages for model.layers = 4",
         "each stage has at least one block",
         "set parallel.pp times parallel.chunks to 4 or less, or model.layers to 8 or more"],
        [(4, ("parallel.pp=4", "parallel.schedule=interleaved", "parallel.chunks=1")),
         (2, ("parallel.pp=2", "parallel.schedule=interleaved")),
         (4, ("parallel.pp=4", "parallel.schedule=interleaved", "model.layers=8"))],
    ),
    "too few numbers of layers": (
        2, ("parallel.pp=2", "parallel.layers_per_stage=[4]"),
        ["parallel.layers_per_stage = [4] for 2 stages and model.layers = 4",
         "each stage has at least one block, and all blocks are in one",
         "give 2 numbers that add up to 4, or leave parallel.layers_per_stage out"],
        [(2, ("parallel.pp=2", "parallel.layers_per_stage=[3,1]")), (2, ("parallel.pp=2",))],
    ),
    "layers that are too many": (
        2, ("parallel.pp=2", "parallel.schedule=zb-v", "parallel.layers_per_stage=[1,1,1,2]"),
        ["parallel.layers_per_stage = [1, 1, 1, 2] for 4 stages and model.layers = 4",
         "each stage has at least one block, and all blocks are in one",
         "give 4 numbers that add up to 4, or leave parallel.layers_per_stage out"],
        [(2, ("parallel.pp=2", "parallel.schedule=zb-v", "parallel.layers_per_stage=[1,1,1,1]"))],
    ),
    "a stage without a layer": (
        2, ("parallel.pp=2", "parallel.layers_per_stage=[4,0]"),
        ["parallel.layers_per_stage = [4, 0] for 2 stages and model.layers = 4",
         "each stage has at least one block, and all blocks are in one",
         "give 2 numbers that add up to 4, or leave parallel.layers_per_stage out"],
        [(2, ("parallel.pp=2", "parallel.layers_per_stage=[2,2]"))],
    ),
    "layers of a pipeline of one": (
        1, ("parallel.layers_per_stage=[2,2]",),
        ["parallel.layers_per_stage = [2, 2] for 1 stages and model.layers = 4",
         "each stage has at least one block, and all blocks are in one",
         "give 1 numbers that add up to 4, or leave parallel.layers_per_stage out"],
        [(1, ("parallel.layers_per_stage=[4]",)), (1, ())],
    ),
    "a schedule": (
        2, ("parallel.pp=2", "parallel.schedule=zbv"),
        ["'zbv' is not a kind of schedule",
         "there are gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, dualpipe-v",
         "did you mean zb-v?"],
        [(2, ("parallel.pp=2", "parallel.schedule=zb-v"))],
    ),
    "chunks of a schedule that has one": (
        2, ("parallel.pp=2", "parallel.chunks=2"),
        ["1f1b with 2 chunks a rank", "its ranks have 1", "leave chunks out, or take one of interleaved, looped-bfs"],
        [(2, ("parallel.pp=2",)), (2, ("parallel.pp=2", "parallel.chunks=2", "parallel.schedule=interleaved")),
         (2, ("parallel.pp=2", "parallel.chunks=2", "parallel.schedule=looped-bfs"))],
    ),
    "groups of a schedule that has none": (
        2, ("parallel.pp=2", "parallel.group=4"),
        ["1f1b with groups of 4 micro-batches", "it has no groups", "leave group out, or take interleaved"],
        [(2, ("parallel.pp=2",)), (2, ("parallel.pp=2", "parallel.group=4", "parallel.schedule=interleaved"))],
    ),
    "a group that is too small": (
        2, ("parallel.pp=2", "parallel.group=1", "parallel.schedule=interleaved", "train.batch=8"),
        ["groups of 1 micro-batches on 2 ranks",
         "a group of less than the ranks is back at the first rank before all of it is through",
         "take 2 (depth first) to {} (breadth first)"],
        [(2, ("parallel.pp=2", f"parallel.group={group}", "parallel.schedule=interleaved")) for group in (2, 3, 4)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_is_refused_and_its_advice_works(case: str) -> None:
    ranks, chosen, lines, mended = CASES[case]
    with pytest.raises(PlanError) as caught:
        plan(ranks, *chosen)
    most = plan(1, "train.batch=8").schedule.microbatches
    assert str(caught.value).split("\n  ") == [line.format(max(2, most)) for line in lines]
    for count, instead in mended:
        assert plan(count, *instead).mesh.ranks_total == count


def test_a_vocabulary_that_is_less_than_the_ranks_is_refused_once_it_is_known() -> None:
    model = ("model.heads=8", "parallel.tp=8")
    lay(parse({}, (*MODEL, *model)), Topology(("node",) * 8))  # nobody knows yet
    with pytest.raises(PlanError, match="parallel.tp = 8 does not fit .* and 5 tokens") as caught:
        plan(8, *model, vocabulary=5)
    assert caught.value.mend == "set parallel.tp to one of 1, 2, 4"


@settings(max_examples=40)
@given(
    layers=st.integers(1, 100), pp=st.integers(1, 16), chunks=st.integers(1, 4), words=st.sampled_from([50, 300, 50000])
)
def test_no_layer_is_lost_however_they_are_cut(layers: int, pp: int, chunks: int, words: int) -> None:
    assume(pp * chunks <= layers)
    more = ("parallel.schedule=looped-bfs", f"parallel.chunks={chunks}", f"model.layers={layers}", "train.batch=2")
    found, whole = plan(pp, f"parallel.pp={pp}", *more, vocabulary=words), plan(1, f"model.layers={layers}")
    assert [layer for span in found.spans for layer in span.layers] == list(range(layers))
    assert all(len(span.layers) >= 1 for span in found.spans)
    inner = [len(span.layers) for span in found.spans[:-1]]
    assert max(inner, default=0) - min(inner, default=0) <= 1
    assert found.layouts.keys() == whole.layouts.keys()
    held = [slot.name for own in found.units for unit in own for slot in unit.slots]
    assert set(held) == whole.layouts.keys()
    assert len(held) == len(set(held)) + (pp > 1)  # the tied weight is on the first rank and on the last
