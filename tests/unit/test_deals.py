"""Deals of blocks to stages: all are dealt, ranks have equal work, and no step is longer than with equal stages."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import load
from hpctrain.plan import deals
from hpctrain.plan.deals import Deal, beginning, by_rank, by_stage, deal, seconds
from hpctrain.plan.plan import decide
from hpctrain.plan.topology import Topology
from hpctrain.schedule.action import Schedule
from hpctrain.schedule.check import check
from hpctrain.schedule.kinds import SCHEDULES, make
from hpctrain.schedule.passes import add_messages

ROOT = Path(__file__).resolve().parents[2]
HEADS = st.sampled_from([0.1, 0.3, 1.0, 1.5, 2.7])


@st.composite
def pipelines(draw: st.DrawFn) -> Schedule:
    """Any kind of schedule, of a few ranks."""
    kind, ranks, rounds = draw(st.sampled_from(sorted(SCHEDULES))), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    chunks = draw(st.integers(1, 3)) if SCHEDULES[kind].chunks is None else None
    return make(kind, ranks, rounds * ranks + draw(st.integers(0, 2)), chunks)


def work(dealt: Deal, head: float, schedule: Schedule) -> list[float]:
    """What each rank has to do, in blocks."""
    found = [0.0] * len(schedule.ranks)
    for stage, blocks in enumerate(dealt):
        found[schedule.home[stage]] += blocks + head * (stage == schedule.stages - 1)
    return found


@given(pipelines(), st.integers(0, 20), HEADS)
def test_every_block_is_dealt_and_no_stage_is_empty(schedule: Schedule, more: int, head: float) -> None:
    layers = schedule.stages + more
    for dealt in (deal(layers, head, schedule), by_rank(layers, head, schedule)):
        assert len(dealt) == schedule.stages and sum(dealt) == layers and min(dealt) >= 1


@given(pipelines(), st.integers(0, 20), HEADS)
def test_a_step_takes_no_longer_than_with_equal_stages(schedule: Schedule, more: int, head: float) -> None:
    layers = schedule.stages + more
    equal, chosen = by_stage(layers, head, schedule.stages), deal(layers, head, schedule)
    assert seconds(chosen, head, schedule) <= seconds(equal, head, schedule) + 1e-5


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_of_a_long_step_the_beginning_decides(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, seen = make(kind, 6, 45), []
    monkeypatch.setattr(deals, "FORWARDS", 100)
    monkeypatch.setattr(deals, "seconds", lambda deal, head, one: seen.append(one) or seconds(deal, head, one))
    layers = schedule.stages + 2
    chosen, equal, first = deal(layers, 2.7, schedule), by_stage(layers, 2.7, schedule.stages), beginning(schedule, 18)
    assert all(one == first and one.microbatches == 18 for one in seen) and check(first)
    assert seconds(chosen, 2.7, first) <= seconds(equal, 2.7, first) + 1e-5


@given(pipelines(), st.integers(0, 20), HEADS)
def test_where_ranks_are_dealt_to_no_block_would_be_better_on_another_rank(
    schedule: Schedule, more: int, head: float
) -> None:
    dealt = by_rank(schedule.stages + more, head, schedule)
    found = work(dealt, head, schedule)
    several = {schedule.home[stage] for stage, blocks in enumerate(dealt) if blocks > 1}
    assert all(found[rank] - 1 <= min(found) + 1e-9 for rank in several)


@pytest.mark.parametrize(
    ("kind", "ranks", "chunks", "layers", "head", "equal", "better"),
    [
        ("interleaved", 2, 2, 6, 1.5, (2, 2, 1, 1), (2, 1, 2, 1)),
        ("interleaved", 3, 2, 8, 0.3, (2, 2, 1, 1, 1, 1), (1, 1, 1, 2, 2, 1)),
        ("zb-v", 2, None, 5, 1.5, (2, 1, 1, 1), (1, 1, 2, 1)),
    ],
)
def test_a_rank_with_the_head_has_fewer_blocks_in_all(
    kind: str, ranks: int, chunks: int | None, layers: int, head: float, equal: Deal, better: Deal
) -> None:
    schedule = make(kind, ranks, 4 * ranks, chunks)
    assert by_stage(layers, head, schedule.stages) == equal
    assert deal(layers, head, add_messages(schedule)) == better
    assert seconds(better, head, schedule) < seconds(equal, head, schedule)


def test_one_stage_a_rank_is_dealt_the_first_ones_first() -> None:
    assert deal(126, 0.7, make("1f1b", 16, 64)) == (8,) * 14 + (7,) * 2


def test_a_large_model_is_dealt_alike_on_every_rank() -> None:
    config = load(ROOT / "configs/llama-70b-3d.toml")
    found = [decide(config, Topology(("node",) * 64), 128256).spans for _ in range(2)]
    assert found[0] == found[1] and sum(len(span.layers) for span in found[0]) == 80
