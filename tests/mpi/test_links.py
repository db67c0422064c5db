"""Nodes that exchange: every pair is measured, by all ranks of both, and the doctor shows what it found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cluster import links
from hpctrain.cluster.checks import CHECKS
from hpctrain.cluster.links import Place, measure, rounds
from hpctrain.cluster.speed import measured
from hpctrain.cluster.world import World
from hpctrain.config import CommConfig
from hpctrain.errors import LateError

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.mark.parametrize("layout", ["abcd", "aabb", "abab", "aaab", "abcc", "aaaa"])
def test_every_pair_of_nodes_is_measured_however_ranks_are_spread(first: Callable, layout: str) -> None:
    if (four := first(4)) is None:
        return
    world = World.of(four, host=layout[four.rank])
    place = Place()
    found = list(measure(world, place))
    names = list(dict.fromkeys(layout))
    expected = [(n, names[a], names[b]) for n, pairs in enumerate(rounds(len(names))) for a, b in pairs]
    assert [(pair.round, pair.one, pair.other) for pair in found] == expected
    assert all(pair.bytes_per_second > 0 for pair in found)
    assert world.collect(found) == [found] * 4
    assert place == Place(len(rounds(len(names))) - 1, None)


def test_only_those_who_hang_with_each_other_say_so(first: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    if (four := first(4)) is None:
        return
    world, place = World.of(four.Dup(), CommConfig(timeout_seconds=1), host="abcd"[four.rank]), Place()
    exchange = links._exchange

    def hang(comm: object, partner: int) -> float:
        if place.round == 1 and world.host in "bc":
            raise TimeoutError
        return exchange(comm, partner)

    monkeypatch.setattr(links, "_exchange", hang)
    with pytest.raises((TimeoutError, LateError)):
        list(measure(world, place))
    assert four.allgather(place) == [Place(1), Place(1, "c"), Place(1, "b"), Place(1)]


def test_the_ranks_of_a_job_measure_what_the_check_before_a_start_does(first: Callable, tmp_path: Path) -> None:
    if (four := first(4)) is None:
        return
    world = World.of(four, host="aabb"[four.rank])
    folder = Path(world.share(str(tmp_path))) / "runs not yet made"
    speeds = measured(world, folder)
    assert [answer.node for answer in speeds.answers] == ["a", "b"]
    assert all(answer.found.keys() == set(CHECKS) and not answer.errors for answer in speeds.answers)
    assert [(pair.one, pair.other) for pair in speeds.pairs] == [("a", "b")]
    assert speeds.show().splitlines()[3].endswith("2 nodes")
    assert speeds.to_json()["links"][0][:3] == [0, "a", "b"]
    assert not folder.exists() and list(folder.parent.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told_for_each_node(first: Callable) -> None:
    if (four := first(4)) is None:
        return
    speeds = measured(World.of(four, host="aabb"[four.rank]), Path("/proc/no/folder"))
    assert [one.node for one in speeds.findings if "failed while writing to the run's folder" in str(one)] == ["a", "b"]
    assert [line.split()[-1] for line in speeds.show().splitlines()[1:3]] == ["broken", "broken"]
