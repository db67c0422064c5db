"""The parts of MpiGroup that decide without talking."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.operation import Ledger, Operation
from hpctrain.comm.reduce import Reducer, cut, starts

numbers = st.integers(0, 10_000)


@given(numbers, st.integers(1, 40), st.integers(1, 64))
def test_a_cut_covers_everything_in_aligned_runs(total, pieces, align):
    sizes = cut(total, pieces, align)
    assert len(sizes) == pieces and sum(sizes) == total and min(sizes) >= 0
    assert all(start % align == 0 or size == 0 for start, size in zip(starts(sizes), sizes, strict=True))
    assert max(sizes) - total / pieces < align


@given(st.lists(numbers, min_size=1))
def test_each_run_starts_where_the_one_before_ends(sizes):
    assert starts(sizes) == [0, *accumulate(sizes)][:-1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_is", ["new", 0, 1, 2])
def test_a_reduction_may_write_over_any_of_its_sources(dtype, out_is):
    length = 300_000  # more than a block
    sources = [(torch.arange(length) * (rank + 1) % 13).to(dtype) for rank in range(3)]
    for op, wanted in {
        "sum": sum(source.double() for source in sources).to(dtype),
        "max": torch.stack(sources).amax(0),
        "min": torch.stack(sources).amin(0),
    }.items():
        given_sources = [source.clone() for source in sources]
        out = torch.empty(length, dtype=dtype) if out_is == "new" else given_sources[out_is]
        Reducer()(out, given_sources, op)
        assert torch.equal(out, wanted)


def test_a_sum_is_made_in_the_order_of_its_sources():
    sources = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]
    out = torch.empty(1)
    Reducer()(out, sources, "sum")
    assert out.item() == 1.0  # (1e8 + 1 is 1e8 in fp32) - 1e8 + 1; the other way round it would be 0 or 2


@given(
    st.builds(
        Operation,
        kind=st.sampled_from(["barrier", "all_reduce", "broadcast"]),
        dtype=st.sampled_from([torch.float32, torch.bool, torch.bfloat16]),
        elements=st.integers(0, 2**62),
        op=st.sampled_from(["", "sum", "min"]),
        root=st.integers(-1, 2**30),
        sizes_hash=st.integers(-(2**63), 2**63 - 1),
    )
)
def test_an_operation_comes_back_from_its_bytes(operation):
    assert Operation.unpacked(operation.packed()) == operation


def test_a_late_rank_is_named_with_the_operation_and_the_mend():
    ledger = Ledger("dp", (0, 4), 30)
    ledger.add(Operation("barrier"))
    ledger.add(Operation.of("all_reduce", torch.zeros(5), "sum"))
    assert str(ledger.late([1])).splitlines() == [
        "rank 1 (rank 4 of the world) did not come to #2 all_reduce sum of 5 float32 in group dp within 30 s",
        "  the last operations here: #2 all_reduce sum of 5 float32, #1 barrier",
        "  look at that rank's log and host; comm.timeout_seconds is the limit",
    ]


def test_ranks_that_differ_are_told_apart_by_operation():
    ledger = Ledger("world", range(3), 30)
    ledger.add(Operation("barrier"))
    barrier, broadcast = Operation("barrier"), Operation.of("broadcast", torch.zeros(4, dtype=torch.int64), root=2)
    told = str(ledger.differing({0: barrier, 1: broadcast, 2: barrier}))
    assert "rank 0, rank 2: barrier; rank 1: broadcast of 4 int64 from 2" in told
    assert "look for a branch that not all ranks take" in told


def test_messages_say_where_they_go_and_come_from():
    x = torch.zeros(4)
    assert str(Operation.of("send", x, root=2)) == "send of 4 float32 to 2"
    assert str(Operation.of("recv", x, root=1)) == "recv of 4 float32 from 1"


def test_the_ledger_keeps_only_the_last_operations():
    ledger = Ledger("world", (0,), 1, length=4)
    for _ in range(random.Random(1).randrange(50, 60)):
        ledger.add(Operation("barrier"))
    assert ledger.last(100).count("barrier") == 4 and ledger.last(1).startswith(f"#{ledger.number} ")
