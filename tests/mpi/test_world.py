"""Ranks that have met: who they are, what they agree on, and what the doctor finds when asking all of them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cluster.cores import threads
from hpctrain.cluster.deadline import Deadline
from hpctrain.cluster.devices import choose_device
from hpctrain.cluster.doctor import diagnose
from hpctrain.cluster.links import clock_offsets
from hpctrain.cluster.stop import Flag, listening
from hpctrain.cluster.wait import missing
from hpctrain.cluster.world import World
from hpctrain.config import CommConfig, RunConfig
from hpctrain.errors import LateError

pytestmark = pytest.mark.mpi(min_size=4)

LAYOUTS = {
    "one node": "aaaa",
    "blocks": "aabb",
    "cyclic": "abab",
    "uneven": "aaab",
    "uneven and mixed": "abba",
    "a node each": "abcd",
}


@pytest.fixture
def four(first: Callable) -> object:
    """The first four ranks; a larger launch has the others look on."""
    return first(4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_local_ranks_count_up_on_each_node_however_ranks_are_spread(four, layout: str) -> None:
    hosts = LAYOUTS[layout]
    if four is None:
        return
    world = World.of(four, host=hosts[four.rank])
    seen = world.collect((world.host, world.node, world.local_rank, world.local_size))
    order = list(dict.fromkeys(hosts))
    assert seen == [
        (host, order.index(host), hosts[:rank].count(host), hosts.count(host)) for rank, host in enumerate(hosts)
    ]
    assert world.topology.hosts == tuple(hosts)


def test_ranks_of_this_machine_are_on_one_node(comm) -> None:
    world = World.of(comm)
    assert (world.rank, world.size, world.node, world.local_rank) == (comm.rank, comm.size, 0, comm.rank)
    assert world.collect(world.local_size) == [comm.size] * comm.size
    assert len(world.cores_of_node) == comm.size and world.cores <= frozenset(range(os.cpu_count()))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_true_is_enough_and_all_hear_of_it(first, ranks: int) -> None:
    if (part := first(ranks)) is None:
        return
    world = World.of(part)
    assert world.agree(False) is False
    for rank in range(ranks):
        assert world.agree(world.rank == rank) is True


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("value", [None, {"a": [1, 2]}, "x" * 100_000, b""], ids=["none", "dict", "long", "empty"])
def test_what_rank_0_shares_reaches_all(first, ranks: int, value: object) -> None:
    if (part := first(ranks)) is None:
        return
    world = World.of(part)
    assert world.share(value if world.leads else "mine") == value
    assert world.collect(world.rank) == list(range(ranks))


def test_the_signal_of_one_rank_stops_all_at_the_same_step(four, tmp_path) -> None:
    if four is None:
        return
    world, flag = World.of(four), Flag()
    with listening(RunConfig(dir=str(tmp_path)), world, flag) as stop:
        for step in range(1000):
            time.sleep(0.001 * world.rank)
            if world.rank == 3 and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.agreed():
                break
    flag.restore()
    assert world.collect((step, stop.why)) == [(5, "signal TERM at rank 3")] * 4


def test_the_end_of_the_time_which_rank_0_alone_sees_stops_all_at_the_same_step(four, tmp_path) -> None:
    if four is None:
        return
    world, flag = World.of(four), Flag()
    deadline = Deadline(time.time() + 2) if world.leads else None
    with listening(RunConfig(dir=str(tmp_path), margin_seconds=0), world, flag, deadline) as stop:
        steps = 1
        while not stop.agreed():
            time.sleep(0.01 * world.rank)
            stop.pace.stepped(0.03)
            steps += 1
    flag.restore()
    assert len({*world.collect((steps, stop.why))}) == 1 and steps > 1
    assert stop.why.startswith("the job's time ends in 0.")


def test_a_wait_that_ends_names_who_did_not_come_and_the_world_goes_on(four) -> None:
    if four is None:
        return
    world = World.of(four, CommConfig(timeout_seconds=0.5))
    private = four.Dup()
    told = ""
    if world.rank != 2:
        try:
            world.barrier()
        except LateError as error:
            told = str(error)
    private.Barrier()  # meanwhile rank 2 is here, and nowhere else
    said = private.allgather(told)
    if world.rank == 2:
        world.barrier()
    private.Barrier()
    assert ["barrier: rank 2 did not come within 0.5 s" in text for text in said] == [True, True, False, True]


def test_nobody_is_missing_when_all_ask(four) -> None:
    if four is not None:
        assert four.allgather(missing(four)) == [[]] * 4


def test_processors_serve_where_there_is_no_other_device(four) -> None:
    if four is None:
        return
    world = World.of(four)
    chosen = world.collect((choose_device(world), threads(world, {})))
    if chosen[0][0] == "cpu":
        assert {device for device, _ in chosen} == {"cpu"}
    assert all(1 <= count <= os.cpu_count() for _, count in chosen)


def test_clocks_of_one_machine_agree_though_it_plays_four_nodes(four) -> None:
    if four is None:
        return
    offsets = clock_offsets(World.of(four, host="abcd"[four.rank]))
    assert len(offsets) == 4 and offsets[0] == 0.0
    assert max(abs(offset) for offset in offsets) < 0.5


def test_the_doctor_asks_every_rank_and_tells_all_the_same(four, tmp_path: Path) -> None:
    if four is None:
        return
    world = World.of(four, host="aabb"[four.rank])
    report = diagnose(world, tmp_path)
    texts = world.collect(json.dumps(report.to_json()["warnings"]))
    facts = {fact.name: fact for fact in report.facts}
    assert len(set(texts)) == 1
    assert (facts["size"].value, facts["nodes"].value, facts["topology"].value) == (4, 2, "2 nodes x 2 ranks")
    assert facts["mpi.library"].value and facts["folder.type"].value != "unknown"
    assert all(fact.source for fact in report.facts if fact.name != "launcher")
