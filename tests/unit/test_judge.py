"""From figures to findings, and from findings to the nodes that train."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster import judge
from hpctrain.cluster.judge import FIGURES, Answer, Finding, Limits, blamed, choose, findings, medians_of_others, table
from hpctrain.cluster.links import Pair, rounds
from hpctrain.errors import NodesError

LIMITS = Limits()
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "hpctrain": "0.1.0", "mpi4py": "4.1.2"}
GOOD = {
    "versions": VERSIONS,
    "devices": {"kind": "cuda", "count": 4, "free_bytes": [90e9] * 4, "bytes_per_second": [5e10] * 4},
    "memory": {"free_bytes": 480e9, "bytes_per_second": 2e11},
    "products": {"flops": [6e14] * 4},
    "near": {"write_bytes_per_second": 2e9},
    "shared": {"write_bytes_per_second": 1e9},
}


def names(count: int) -> list[str]:
    return [f"node{number}" for number in range(1, count + 1)]


def healthy(count: int = 6, **changed: dict[str, Any]) -> list[Answer]:
    """Answers of equal nodes, but for the checks of those named in ``changed``."""
    return [Answer(name, {**GOOD, **changed.get(name, {})}) for name in names(count)]


def links(count: int, slow: Sequence[str] = (), factor: float = 0.1, pair: tuple[str, str] | None = None) -> list[Pair]:
    """What a tournament of so many nodes gives, where some nodes, or one pair, are slow by a factor."""
    found = []
    for number, pairs in enumerate(rounds(count)):
        for one, other in pairs:
            two = (f"node{one + 1}", f"node{other + 1}")
            bad = set(two) & set(slow) or set(two) == set(pair or ())
            found.append(Pair(number, *two, 2e10 * (factor if bad else 1.0)))
    return found


def only(found: list[Finding]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def test_nothing_is_found_of_equal_nodes() -> None:
    assert findings(healthy(), links(6), LIMITS) == []


def test_one_node_is_compared_with_nobody() -> None:
    assert findings(healthy(1), [], LIMITS) == []


@pytest.mark.parametrize("count", [2, 3, 6, 500])
def test_a_node_that_multiplies_slowly_is_found_among_any_number(count: int) -> None:
    slow = {"products": {"flops": [6e14, 6e14, 3.66e14, 6e14]}}
    found = only(findings(healthy(count, node2=slow), [], LIMITS))
    assert str(found) == "node2 multiplies matrices at 61% of the others' speed"
    assert not found.broken


@pytest.mark.parametrize(
    ("check", "value", "says"),
    [
        ("memory", {"free_bytes": 480e9, "bytes_per_second": 5e10}, "copies memory at 25% of the others' speed"),
        ("memory", {"free_bytes": 48e9, "bytes_per_second": 2e11}, "has 10% of the free memory that the others have"),
        ("near", {"write_bytes_per_second": 1e8}, "writes to checkpoint.near at 5% of the others' speed"),
        ("shared", {"write_bytes_per_second": 1e8}, "writes to the run's folder at 10% of the others' speed"),
        (
            "devices",
            GOOD["devices"] | {"free_bytes": [90e9, 9e9, 90e9, 90e9]},
            "has a device with 10% of the others' free memory",
        ),
        (
            "devices",
            GOOD["devices"] | {"bytes_per_second": [5e10, 5e10, 5e10, 5e9]},
            "copies to a device at 10% of the others' speed",
        ),
    ],
)
def test_each_figure_is_told_in_its_own_words(check: str, value: dict[str, Any], says: str) -> None:
    found = only(findings(healthy(node3={check: value}), [], LIMITS))
    assert (found.node, found.says, found.broken) == ("node3", says, False)


def test_a_limit_of_nothing_finds_nothing_slow() -> None:
    slow = {"products": {"flops": [1.0]}}
    assert findings(healthy(node2=slow), links(6, ["node2"]), Limits(0, 0, 0, 0)) == []


@given(st.dictionaries(st.text(), st.floats(0, 1e15), min_size=2, max_size=9))
def test_what_is_usual_for_a_node_is_the_median_of_all_others(values: dict[str, float]) -> None:
    for name, usual in medians_of_others(values).items():
        assert usual == pytest.approx(median([value for other, value in values.items() if other != name]))


def test_a_node_with_other_versions_is_broken() -> None:
    found = only(findings(healthy(node4={"versions": VERSIONS | {"torch": "2.14.0"}}), [], LIMITS))
    assert str(found) == "node4 has torch 2.14.0, and most others have 2.13.0"
    assert found.broken


def test_a_node_that_lacks_a_device_is_broken() -> None:
    lacking = {"devices": {"kind": "cuda", "count": 3}}
    found = only(findings(healthy(node4=lacking), [], LIMITS))
    assert str(found) == "node4 sees 3 devices (cuda), and most others see 4 devices (cuda)"
    none = only(findings(healthy(node4={"devices": {"kind": "cpu", "count": 0}}), [], LIMITS))
    assert "sees 0 devices (cpu)" in none.says and none.broken


def test_a_check_that_failed_is_told_with_its_error() -> None:
    answers = healthy(2)
    answers[1] = Answer("node2", {"versions": VERSIONS}, {"shared": "OSError: [Errno 30] Read-only file system"})
    found = only(findings(answers, [], LIMITS))
    assert str(found) == "node2 failed while writing to the run's folder: OSError: [Errno 30] Read-only file system"


def test_a_clock_that_goes_wrong_is_told() -> None:
    answers = healthy(3)
    answers[2] = Answer("node3", GOOD, {}, clock_ahead_seconds=35.2)
    assert str(only(findings(answers, [], LIMITS))) == "node3 has a clock that is +35.2 s from the others'"


# ---- links


@pytest.mark.parametrize("count", [3, 4, 5, 8, 33, 1000])
def test_a_slow_node_is_blamed_and_those_it_met_are_not(count: int) -> None:
    for slow in random.Random(count).sample(names(count), min(count, 5)):
        found, pairs = blamed(links(count, [slow]), 0.5)
        assert (only(found).node, pairs) == (slow, [])
        assert "exchanges with other nodes at 10% of the usual speed" in found[0].says


@pytest.mark.parametrize("count", [8, 33, 1000])
def test_several_slow_nodes_are_blamed(count: int) -> None:
    slow = random.Random(count).sample(names(count), 3)
    found, pairs = blamed(links(count, slow), 0.5)
    assert ({one.node for one in found}, pairs) == (set(slow), [])


@pytest.mark.parametrize("count", [4, 8, 33])
def test_a_slow_pair_of_good_nodes_is_told_and_nobody_is_blamed(count: int) -> None:
    found, pairs = blamed(links(count, pair=("node1", "node2")), 0.5)
    assert (found, pairs) == ([], ["node1 and node2 exchange at 10% of the usual speed"])


def test_of_two_nodes_neither_can_be_blamed_for_their_link() -> None:
    assert blamed(links(2, ["node2"]), 0.5) == ([], [])


def test_a_pair_that_hung_costs_one_of_its_nodes() -> None:
    found, _ = blamed([Pair(1, "node2", "node3", 0.0)], 0.5)
    assert (str(only(found)), found[0].broken) == ("node3 exchanged nothing with node2", True)


# ---- the choice


def bad(node: str, share: float = 0.0, says: str = "did not answer") -> Finding:
    return Finding(node, says, broken=not share, share=share)


SLOW = "multiplies matrices at 61% of the others' speed"


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([], ["node1", "node2", "node3"]),
        ([bad("node2")], ["node1", "node3", "node4"]),
        ([bad("node1"), bad("node3")], ["node2", "node4", "node5"]),
        ([bad("node4")], ["node1", "node2", "node3"]),
        ([bad("node2", 0.6)], ["node1", "node3", "node4"]),
        ([bad("node1", 0.6), bad("node2", 0.7), bad("node3", 0.5)], ["node2", "node4", "node5"]),
        ([bad("node1"), bad("node2", 0.7), bad("node3", 0.5)], ["node2", "node4", "node5"]),
        ([bad("node1"), bad("node2"), bad("node3", 0.5)], ["node3", "node4", "node5"]),
    ],
)
def test_good_nodes_are_chosen_in_their_order_and_then_the_least_slow(found: list[Finding], chosen: list[str]) -> None:
    assert list(choose(names(5), found, 3).nodes) == chosen


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0, 1)), max_size=12), st.integers(1, 8))
def test_a_broken_node_is_never_chosen_and_order_is_kept(marks: list[tuple[int, float]], wanted: int) -> None:
    found = [bad(f"node{number}", share) for number, share in marks]
    broken = {one.node for one in found if one.broken}
    if 8 - len(broken) < wanted:
        with pytest.raises(NodesError):
            choose(names(8), found, wanted)
        return
    chosen = choose(names(8), found, wanted).nodes
    assert len(chosen) == wanted and not broken & set(chosen)
    assert list(chosen) == [name for name in names(8) if name in chosen]


def test_it_is_said_which_spare_takes_whose_place() -> None:
    said = choose(names(5), [bad("node2", 0.61, SLOW), bad("node3"), bad("node3", says="is cold")], 3).sentences
    assert said == (
        f"node2 {SLOW}: left out; node4, a spare, takes its place",
        "node3 did not answer; it is cold: left out; node5, a spare, takes its place",
    )


def test_a_slow_node_is_kept_where_there_is_no_spare() -> None:
    choice = choose(names(3), [bad("node2", 0.61, SLOW)], 3)
    assert choice.nodes == ("node1", "node2", "node3")
    assert choice.sentences == (f"node2 {SLOW}: kept, as no better node is spare",)


def test_a_spare_that_is_broken_is_told_too() -> None:
    assert choose(names(4), [bad("node4")], 3).sentences == ("node4, a spare, did not answer: left out",)


def test_too_few_nodes_are_told_with_the_broken_ones_and_how_to_go_on() -> None:
    with pytest.raises(NodesError) as caught:
        choose(names(4), [bad("node2"), bad("node3", says="has 3 devices"), bad("node1", 0.6)], 3)
    assert str(caught.value) == (
        "2 of 4 nodes can train, and 3 are wanted\n"
        "  node2 did not answer\n"
        "  node3 has 3 devices\n"
        "  hand the job in again with --exclude=node2,node3, or with job.spares = 2 or more"
    )
    assert caught.value.exit_code == 1


def test_what_fails_on_all_nodes_is_not_mended_by_other_nodes() -> None:
    with pytest.raises(NodesError) as caught:
        choose(names(2), [bad("node1"), bad("node2")], 1)
    assert caught.value.mend == "what fails on every node is hardly their fault: mend it, or set job.check to false"


def test_a_job_that_is_too_small_is_told() -> None:
    with pytest.raises(NodesError) as caught:
        choose(names(2), [], 3)
    assert str(caught.value) == (
        "2 of 2 nodes can train, and 3 are wanted\n"
        "  the job has no more nodes\n"
        "  ask for more nodes, or set job.nodes lower"
    )


# ---- the table


def test_the_table_has_a_line_a_node_and_the_median() -> None:
    lines = table(healthy(3), links(3), [], {"node2": "spare"}).splitlines()
    assert lines[0].split()[:2] == ["node", "TFLOP/s"]
    assert [line.split()[0] for line in lines[1:]] == ["node1", "node2", "node3", "median"]
    assert lines[2].endswith("spare") and lines[2].split()[1] == "600"
    assert lines[4].endswith("3 nodes")


def test_of_many_nodes_the_table_has_only_those_with_a_finding() -> None:
    answers = healthy(100)
    lines = table(answers, [], [bad("node7"), bad("node99")], {}).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["node7", "node99", "median"]


def test_a_node_that_said_nothing_has_no_figures() -> None:
    lines = table([*healthy(1), Answer("node2")], [], [], {}).splitlines()
    assert set(lines[2].split()[1:]) == {"-"}


def test_every_figure_has_a_limit_and_every_check_a_name() -> None:
    assert all(isinstance(getattr(LIMITS, figure.limit), float) for figure in FIGURES)
    assert {figure.check for figure in FIGURES} <= judge.DOING.keys()
