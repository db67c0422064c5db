"""Pictures of schedules: every action once, in its place, in lines that fit."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.schedule.action import OPS, Schedule
from hpctrain.schedule.draw import COLOURS, cells, describe, summary, text
from hpctrain.schedule.kinds import make
from hpctrain.schedule.passes import add_messages
from hpctrain.schedule.picture import save, svg
from hpctrain.schedule.simulate import Costs, simulate
from tests.support.schedules import examples, schedules

SVG = "{http://www.w3.org/2000/svg}"
small = schedules(ranks=5, microbatches=8)
costs = st.builds(Costs, *[st.sampled_from([0.5, 1, 1.25, 3])] * 4)


# ---- text


def test_time_runs_from_left_to_right_and_a_dot_is_waiting():
    assert text(simulate(make("1f1b", 3, 3))) == (
        "time    0              5              10\n"
        "rank 0  F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---\n"
        "rank 1  .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .\n"
        "rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .\n"
    )


def test_a_rank_of_several_stages_names_them_and_its_picture_is_folded_to_the_width():
    assert text(simulate(make("zb-v", 2, 3)), width=60) == (
        "time    0                   5                   10\n"
        "rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2\n"
        "rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1\n"
        "\n"
        "time            15\n"
        "rank 0  3W2 0I1 0W1 0I2 0W2 .\n"
        "rank 1  1I1 2I2 1I2 1W1 2W2 1W2\n"
    )


def test_cells_are_as_long_as_their_costs():
    assert text(simulate(make("gpipe", 2, 1), Costs(forward=1, input=2, weight=2, message=1))) == (
        "time    0              5              10\n"
        "rank 0  F0 .  .  .  .  .  .  .  B0---------\n"
        "rank 1  .  .  F0 B0--------- .  .  .  .  .\n"
    )


@examples(60)
@given(small, costs)
def test_every_action_is_drawn_once_on_its_rank(schedule, costs):
    drawn = text(simulate(schedule, costs), width=10_000).splitlines()
    for line, actions in zip(drawn[1:], schedule.ranks, strict=True):
        several = len({action.stage for action in actions}) > 1
        expected = [str(action) if several else f"{action.op}{action.microbatch}" for action in actions]
        assert re.findall(r"\d*[FBIW]\d+", line[len("rank 0  ") :]) == expected


@examples(40)
@given(small, costs, st.integers(30, 200))
def test_a_picture_is_no_wider_than_it_may_be_and_loses_nothing(schedule, costs, width):
    found = simulate(schedule, costs)
    narrow, whole = text(found, width), text(found, width=10_000)
    assert max(map(len, narrow.splitlines())) <= width
    for rank in range(len(schedule.ranks)):
        parts = [re.findall(rf"^rank {rank}  (.*)$", drawn, re.MULTILINE) for drawn in (narrow, whole)]
        assert "".join(parts[0]).replace(" ", "") == "".join(parts[1]).replace(" ", "")


@examples(30)
@given(small, st.integers(30, 120))
def test_colours_change_no_letter(schedule, width):
    found = simulate(schedule)
    coloured = text(found, width, colours=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == text(found, width).splitlines()
    assert coloured.count("\x1b[30;48;2;") >= 2 * len(schedule.ranks)


def test_later_chunks_are_paler():
    shades = {
        cell.chunk: cell.colour for cell in cells(simulate(make("interleaved", 2, 2, 3))) if cell.action.op == "F"
    }
    assert shades[0] == COLOURS["F"]
    lightness = [sum(bytes.fromhex(shades[chunk][1:])) for chunk in range(3)]
    assert lightness == sorted(set(lightness))


def test_what_takes_no_time_is_not_drawn():
    found = simulate(add_messages(make("zb-h1", 2, 2)), Costs(1, 1, 0))
    assert {cell.action.op for cell in cells(found)} == {"F", "I"}
    assert text(simulate(make("1f1b", 2, 2), Costs(0, 0, 0))) == ""


# ---- numbers


def test_a_schedule_is_described_in_numbers():
    found = simulate(make("1f1b", 4, 8))
    assert describe(found) == (
        "pipeline     4 ranks, 4 stages, 8 micro-batches\n"
        "time         33; a rank is at it for 33, and computes 24\n"
        "bubble       27.3% of all ranks' time\n"
        "activations  at most 4 3 2 1, rank by rank, one for each stage and micro-batch\n"
        "messages     48 between ranks"
    )
    assert summary(found) == {
        "ranks": 4,
        "stages": 4,
        "microbatches": 8,
        "makespan": 33,
        "span": 33,
        "work": 24,
        "bubble": 1 - 24 / 33,
        "activations": [4, 3, 2, 1],
        "messages": 48,
    }


@examples(40)
@given(small)
def test_messages_are_counted_as_they_are_sent(schedule):
    told = add_messages(schedule)
    assert summary(simulate(schedule))["messages"] == sum(action.is_send for _, action in told)
    assert summary(simulate(told)) == summary(simulate(schedule))


# ---- SVG and PNG


@examples(40)
@given(small, costs)
def test_an_svg_has_a_cell_for_each_action_at_its_time(schedule, costs):
    found = simulate(schedule, costs)
    root = ElementTree.fromstring(svg(found, "a <b> & c"))
    assert root.find(f"{SVG}title").text == "a <b> & c"
    rows = root.findall(f"{SVG}g")
    assert len(rows) == len(schedule.ranks)
    for row, actions, times in zip(rows, schedule.ranks, found.times, strict=True):
        drawn = [(cell.find(f"{SVG}title").text, cell.find(f"{SVG}rect").attrib) for cell in row.findall(f"{SVG}g")]
        assert [name for name, _ in drawn] == [str(action) for action in actions]
        whole = float(row.find(f"{SVG}rect").attrib["width"])
        for (_, rect), (begin, end) in zip(drawn, times, strict=True):
            assert float(rect["x"]) / whole == pytest.approx(begin / found.makespan, abs=0.2 / whole)
            assert float(rect["width"]) / whole == pytest.approx((end - begin) / found.makespan, abs=0.2 / whole)


def test_an_svg_explains_its_colours():
    drawn = svg(simulate(make("zb-v", 2, 3)), "")
    for op in "FIW":
        assert OPS[op] in drawn
    assert "backward" not in drawn
    assert "paler: a later stage of the rank" in drawn
    assert "paler" not in svg(simulate(make("1f1b", 2, 3)), "")


def test_a_picture_is_saved_as_its_name_says(tmp_path):
    found = simulate(make("1f1b", 2, 2))
    save(tmp_path / "it.svg", found, "it")
    assert (tmp_path / "it.svg").read_text() == svg(found, "it")


def test_a_png_is_drawn_with_matplotlib(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib draws PNG")
    save(tmp_path / "it.png", simulate(make("zb-v", 2, 3)), "it")
    assert (tmp_path / "it.png").read_bytes().startswith(b"\x89PNG")


def test_a_png_without_matplotlib_is_refused_with_what_works(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(PlanError) as caught:
        save(tmp_path / "it.png", simulate(Schedule.parse("0F0 0B0")), "it")
    assert str(caught.value) == (
        "no PNG without matplotlib\n"
        "  it is not installed\n"
        "  pip install 'hpctrain[report]', or let the name end in .svg"
    )


def test_a_picture_of_another_ending_is_refused(tmp_path):
    path = tmp_path / "it.gif"
    with pytest.raises(PlanError) as caught:
        save(path, simulate(Schedule.parse("0F0 0B0")), "it")
    assert str(caught.value) == (
        f"{path} is not a name for a picture\n  its ending says what it will be\n  let it end in .svg or .png"
    )


def test_a_picture_that_cannot_be_written_is_refused(tmp_path):
    path = tmp_path / "missing/it.svg"
    with pytest.raises(PlanError) as caught:
        save(path, simulate(Schedule.parse("0F0 0B0")), "it")
    assert caught.value.what.startswith(f"{path} cannot be written: ")
    assert caught.value.mend == "name a file in a folder that is there"
