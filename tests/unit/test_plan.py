"""The plan: every decision as one value, and what is refused before a rank is started."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import Config, parse
from hpctrain.errors import ConfigError, PlanError
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.plan import Plan, decide, lay
from hpctrain.plan.topology import Topology
from hpctrain.plan.units import neighbours
from hpctrain.plan.weights import weights
from hpctrain.schedule.action import Schedule, accumulate

TWO_NODES = Topology(("a", "a", "b", "b"))


def config(**train: int) -> Config:
    return parse({"model": {"layers": 2, "width": 16, "heads": 2, "sequence": 8}, "train": train})


def plan(ranks: int = 4, **train: int) -> Plan:
    return decide(config(**train), Topology(("node",) * ranks), 300)


def refused(chosen: Config, ranks: int) -> list[str]:
    with pytest.raises(PlanError) as caught:
        decide(chosen, Topology(("node",) * ranks), 300)
    return str(caught.value).split("\n  ")


def test_the_mesh_is_all_ranks_along_dp() -> None:
    assert lay(config(), TWO_NODES) == Mesh((("dp", 4),))
    assert lay(parse({"parallel": {"dp": 4}}), TWO_NODES) == Mesh((("dp", 4),))


def test_a_mesh_that_is_not_the_ranks_is_refused() -> None:
    assert refused(parse({"parallel": {"dp": 3}}), 4) == [
        "parallel.dp x pp x tp = 3 x 1 x 1 is not the number of ranks, 4",
        "the sizes of the mesh's axes multiply to the ranks that were started",
        'start 3 ranks, or set parallel.dp to 4 or "auto"',
    ]


@pytest.mark.parametrize(("batch", "near"), [(6, "4 or 8"), (3, "4"), (9, "8 or 12")])
def test_a_batch_that_does_not_divide_over_the_ranks_is_refused(batch: int, near: str) -> None:
    assert refused(config(batch=batch), 4) == [
        f"train.batch = {batch} does not divide over 4 data-parallel ranks",
        "every rank takes the same number of sequences",
        f"set train.batch to {near}",
    ]


def test_a_vocabulary_below_the_tokenizers_is_refused() -> None:
    with pytest.raises(ConfigError, match="model.vocabulary = 200 is less than the tokenizer's 300 tokens"):
        decide(parse({"model": {"vocabulary": 200}}), TWO_NODES, 300)


@given(ranks=st.integers(1, 8), share=st.integers(1, 20), microbatch=st.integers(1, 12))
def test_a_rank_has_as_many_micro_batches_as_its_share_needs(ranks: int, share: int, microbatch: int) -> None:
    found = plan(ranks, batch=ranks * share, microbatch=microbatch)
    assert found.schedule == accumulate(-(-share // microbatch))


def test_every_weight_has_a_layout_of_its_own_shape() -> None:
    found = plan()
    assert found.layouts == {w.name: Layout(w.shape, "float32") for w in weights(found.shape)}


@pytest.mark.parametrize(("compute", "dtype", "size"), [("fp32", "float32", 4), ("fp64", "float64", 8)])
def test_the_bytes_are_those_of_weights_gradients_and_two_running_means(compute: str, dtype: str, size: int) -> None:
    chosen = config().model_copy(update={"precision": parse({"precision": {"compute": compute}}).precision})
    found = decide(chosen, TWO_NODES, 300)
    whole = size * sum(w.size for w in weights(found.shape))
    assert found.dtype == dtype
    assert found.bytes == {"weights": whole, "gradients": whole, "optimizer": 2 * whole, "buffers": 0}


def zero(ranks: int, stage: int, **parallel: float) -> Plan:
    table = {"model": {"layers": 3, "width": 16, "heads": 2, "sequence": 8}, "parallel": {"zero": stage, **parallel}}
    return decide(parse(table), Topology(("node",) * ranks), 300)


@pytest.mark.parametrize(("stage", "shared"), [(0, ""), (1, "o"), (2, "og"), (3, "ogw")])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_bytes_of_each_stage_are_those_of_the_zero_paper(stage: int, shared: str, ranks: int) -> None:
    found = zero(ranks, stage)
    whole = 4 * sum(w.size for w in weights(found.shape))
    parts = {kind: 1 / ranks if kind in shared else 1 for kind in "wgo"}
    expected = {"weights": whole * parts["w"], "gradients": whole * parts["g"], "optimizer": 2 * whole * parts["o"]}
    assert {kind: found.bytes[kind] for kind in expected} == pytest.approx(expected, rel=0.02)
    assert (found.bytes["buffers"] > 0) == (stage > 1)


def test_masters_are_shared_with_the_states() -> None:
    chosen = parse({"precision": {"compute": "bf16"}, "parallel": {"zero": 1}})
    found = decide(chosen, Topology(("node",) * 4), 300)
    whole = sum(w.size for w in weights(found.shape))
    assert found.bytes["weights"] == pytest.approx(2 * whole + whole, rel=0.001)


def test_ranks_that_share_a_copy_are_neighbours() -> None:
    found = zero(8, 3, shard=2)
    assert found.mesh == Mesh((("replica", 4), ("dp", 2)))
    assert "parallel.zero = 3: 2 ranks share optimizer states, gradients and weights, and there are 4 copies" in (
        found.reasons
    )
    assert found.layouts["head.norm.bias"].interval(found.mesh, 0) == (0, 0)
    assert found.layouts["head.norm.bias"].interval(found.mesh, 1) == (0, 16)
    assert zero(8, 3, shard=8).mesh == Mesh((("dp", 8),))


@pytest.mark.parametrize(
    ("stage", "shard", "lines"),
    [
        (0, 2, ["parallel.shard = 2 with parallel.zero = 0", "stage 0 shares nothing: every rank has its own copy",
                "set parallel.zero to 1, 2 or 3, or leave parallel.shard out"]),
        (2, 3, ["parallel.shard = 3 does not divide 4 data-parallel ranks",
                "each copy of the model is shared by equally many ranks", "set parallel.shard to one of 1, 2, 4"]),
    ],
)  # fmt: skip
def test_sharing_that_does_not_fit_is_refused(stage: int, shard: int, lines: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        zero(4, stage, shard=shard)
    assert str(caught.value).split("\n  ") == lines


@pytest.mark.parametrize(("given", "expected"), [(0.0, 1), ("auto", 2), (1.0, None)])
def test_there_is_room_for_one_block_at_least(given: object, expected: int | None) -> None:
    found = zero(4, 3, gather_mib=given)
    block = max(unit.total for unit in found.units[0] if not unit.held) * 4
    assert found.gather_bytes == (expected * block if expected else 2**20)


def test_every_rank_decides_the_same() -> None:
    assert decide(config(), TWO_NODES, 300) == decide(config(), TWO_NODES, 300)


def test_the_plan_is_shown_in_lines_that_say_what_and_why() -> None:
    lines = decide(config(batch=8, microbatch=1), TWO_NODES, 300).show().splitlines()
    assert lines[0] == "ranks     2 nodes x 2 ranks"
    assert lines[1] == "mesh      dp 4"
    assert lines[2] == "model     11,520 parameters in float32"
    assert lines[3] == "a rank    weights 0 MiB, gradients 0 MiB, optimizer 0 MiB"
    assert lines[4:] == [
        "because   every rank takes other samples: dp = 4",
        "because   train.batch = 8 over dp = 4, 1 at once, is 2 micro-batches a rank",
        "because   ranks along dp are on several nodes; 135.0 KiB a step cross nodes, in the order given",
    ]
    assert "is 1 micro-batch a rank" in plan(batch=4, microbatch=1).show()


def test_the_plan_as_json_is_plain_and_gives_its_parts_back() -> None:
    found = decide(config(), TWO_NODES, 300)
    value = json.loads(json.dumps(found.to_json()))
    assert Mesh.from_json(value["mesh"]) == found.mesh
    assert Topology.from_json(value["topology"]) == found.topology
    assert Schedule.from_json(value["schedule"]) == found.schedule
    assert value["shape"] | {"bias": tuple(value["shape"]["bias"])} == vars(found.shape)
    assert value["parameters"] == sum(w.size for w in weights(found.shape))
    assert value["bytes"] == found.bytes and value["reasons"] == list(found.reasons)


def test_neighbours_divide_the_ranks_of_a_copy() -> None:
    chosen = parse({"parallel": {"zero": 3, "near": 3}, "train": {"batch": 8}})
    with pytest.raises(ConfigError, match="parallel.near = 3 does not divide 8 ranks that share one copy") as told:
        decide(chosen, Topology(("node",) * 8), 300)
    assert told.value.mend == "set parallel.near to one of 1, 2, 4, 8"


def test_neighbours_follow_one_another_in_a_copy() -> None:
    mesh = neighbours(Mesh((("replica", 2), ("dp", 6))), 3)
    assert mesh.axes == (("replica", 2), ("far", 2), ("near", 3))
    assert mesh.ranks(4, "near") == (3, 4, 5) and mesh.ranks(4, "far") == (1, 4)


def test_a_second_copy_and_narrow_gradients_weigh_what_they_should() -> None:
    model = {"layers": 2, "width": 16, "heads": 2, "sequence": 8}
    table = {"model": model, "train": {"batch": 8}, "precision": {"compute": "bf16"}, "parallel": {"zero": 3}}
    plain, near, narrow = (
        decide(parse(table, more), Topology(("node",) * 4), 300)
        for more in ((), ("parallel.near=2",), ("precision.gradients=compute",))
    )
    blocks = [unit.total for unit in plain.units[0] if not unit.held]
    assert near.bytes == plain.bytes | {"second copy": 2 * sum(-(-total // 2) for total in blocks)}
    assert narrow.bytes["gradients"] * 2 == plain.bytes["gradients"]
    assert any("from neighbours" in reason for reason in near.reasons)
