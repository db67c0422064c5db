"""The benchmark of collectives measures every operation, beside every peer."""

from __future__ import annotations

import pytest

from hpctrain.bench.comm import OURS, PEERS, run
from hpctrain.cluster.world import World
from hpctrain.errors import UsageError

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.mark.parametrize("against", PEERS)
def test_every_operation_has_a_row_for_each_size_and_memory(comm, against):
    rows = run(against, World.of(comm), sizes=(4096, 1 << 21), rounds=1)
    wanted = [(memory, operation) for memory in ("ordinary", "window") for operation in OURS]
    wanted.append(("common", "all_gather"))
    assert [(row.memory, row.operation) for row in rows if row.bytes == 4096] == wanted
    assert [(row.memory, row.operation) for row in rows if row.bytes == 1 << 21] == wanted
    assert all(row.milliseconds > 0 and row.against == against for row in rows)
    assert all(row.times_faster == pytest.approx(row.against_milliseconds / row.milliseconds) for row in rows)


def test_an_unknown_peer_is_refused_with_the_known_ones(comm):
    with pytest.raises(UsageError, match="--against nccl: not a known peer\n  take one of gloo, messages"):
        run("nccl", World.of(comm))
