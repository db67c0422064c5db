"""Which blocks each rank takes of tensors whose short runs alternate: every one once, and few at a time."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint import shares
from hpctrain.checkpoint.blocks import BLOCK_BYTES, count
from hpctrain.checkpoint.state import Entry
from hpctrain.plan.layout import ITEMSIZE, Cut, Layout
from hpctrain.plan.mesh import Mesh

ROUND = 2 * BLOCK_BYTES


def entry(name: str, shape: tuple[int, ...], holders: tuple[int, ...], dim: int = 1) -> Entry:
    """A tensor that is cut over all its holders along a dim, as a rank knows it that holds nothing of it."""
    return Entry(name, Layout(shape, "float32", (Cut(dim, ("tp",)),)), Mesh((("tp", len(holders)),)), None, holders)


def stretches(entries: list[Entry], ranks: int) -> list[tuple[int, shares.Stretch]]:
    """All of them, with the numbers of their rounds, counted on from section to section."""
    rounds = [one for section in shares.sections(entries, ranks) for one in section.rounds]
    return [(number, stretch) for number, one in enumerate(rounds) for stretch in one]


ENTRIES = st.lists(
    st.tuples(st.integers(1, 700), st.integers(2, 4000), st.sampled_from([(0, 1), (2, 3), (0, 1, 2, 3), (4,), (1, 3)])),
    min_size=1,
    max_size=6,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "ROUND_BYTES", (ROUND, ROUND))
    monkeypatch.setattr(shares, "SECTION_BYTES", 3 * ROUND)


@given(ENTRIES)
@settings(max_examples=150, deadline=None)
def test_every_block_is_taken_once_by_a_holder_and_all_have_equal_shares(rows) -> None:
    entries = [entry(f"model/{i}", (rows_, columns), holders) for i, (rows_, columns, holders) in enumerate(rows)]
    crossing = [one for one in entries if len(one.holders) > 1]
    found = stretches(entries, 5)
    blocks = Counter(
        (one.entry.name, block) for _, one in found for block in range(one.start // BLOCK_BYTES, count(one.stop))
    )
    assert blocks == Counter((one.name, block) for one in crossing for block in range(count(one.layout.nbytes)))
    assert all(one.rank in one.entry.holders and one.start % BLOCK_BYTES == 0 for _, one in found)
    assert all(one.stop % BLOCK_BYTES == 0 or one.stop == one.entry.layout.nbytes for _, one in found)
    for holders in {one.holders for one in crossing}:
        line = [one for _, one in found if one.entry.holders == holders]
        taken = [sum(count(one.nbytes) for one in line if one.rank == rank) for rank in holders]
        sections = len(list(shares.sections([one for one in entries if one.holders == holders], 5)))
        assert max(taken) - min(taken) <= sections


@given(ENTRIES)
@settings(max_examples=150, deadline=None)
def test_a_rank_never_has_more_than_a_round_and_goes_through_each_tensor_once(rows) -> None:
    entries = [entry(f"model/{i}", (rows_, columns), holders) for i, (rows_, columns, holders) in enumerate(rows)]
    found = stretches(entries, 5)
    for rank in range(5):
        own = [(number, one) for number, one in found if one.rank == rank]
        assert [one for _, one in own] == list(shares.own(entries, 5, rank))
        for (before, one), (after, other) in pairwise(own):
            assert before < after or one.place + count(one.nbytes) * BLOCK_BYTES <= other.place
            assert one.entry.name != other.entry.name or one.stop == other.start
        assert all(one.place + one.nbytes <= ROUND for _, one in own)


def test_a_rank_goes_through_the_file_without_a_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SECTION_BYTES", 1 << 30)
    entries = [entry(f"model/{i}", (1000, 1000), (0, 1, 2)) for i in range(4)]  # of 16 blocks each
    taken = [[(one.entry.name, one.start // BLOCK_BYTES) for one in shares.own(entries, 3, rank)] for rank in range(3)]
    assert [own[0] for own in taken] == [("model/0", 0), ("model/1", 6), ("model/2", 11)]
    assert {name for name, _ in taken[1]} == {"model/1", "model/2"}


def test_stages_of_a_pipeline_work_in_the_same_rounds() -> None:
    stages = [(stage, (2 * stage, 2 * stage + 1)) for stage in range(3)]
    entries = [entry(f"model/{stage}.{i}", (1024, 1024), ranks) for stage, ranks in stages for i in (0, 1)]
    for section in shares.sections(entries, 6):
        for one in section.rounds:
            assert {stretch.rank for stretch in one} == set(range(6))


@pytest.mark.parametrize("ranks", [1, 2, 16, 17, 100, 20_000])
def test_the_memory_of_a_node_does_not_grow_with_its_ranks_as_long_as_a_round_is_worth_it(ranks, monkeypatch) -> None:
    monkeypatch.setattr(shares, "ROUND_BYTES", (1 << 20, 1 << 23))
    taken = shares.round_bytes(ranks)
    assert taken % BLOCK_BYTES == 0
    assert taken == 1 << 20 or taken * ranks <= 1 << 27
    assert 1 << 20 <= taken <= 1 << 23


@given(ENTRIES.filter(lambda rows: len(rows) == 1 and len(rows[0][2]) > 1), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_the_runs_of_all_holders_fill_a_stretch(rows, dim) -> None:
    ((height, width, holders),) = rows
    one = entry("model/a", (height, 1 + width % 7, 1 + width // 7), holders, dim)
    mesh = one.mesh
    for rank in range(2):
        for stretch in shares.own([one], max(holders) + 1, holders[rank]):
            seen = bytearray(stretch.nbytes)
            for holder in range(mesh.ranks_total):
                runs = shares.Runs.of(stretch, holder, one.layout.boxes(mesh, holder))
                held = one.layout.box(mesh, holder).size * ITEMSIZE["float32"]
                for at, start, length in zip(runs.at, runs.start, runs.length, strict=True):
                    assert 0 <= start < start + length <= held
                    for place in (at, at + length - 1):
                        seen[place] += 1
                    seen[at + 1 : at + length - 1] = bytes([1]) * max(0, length - 2)
            assert set(seen) <= {1, 2}
