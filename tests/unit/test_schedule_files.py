"""Schedules go into files and come back as the same value."""

from __future__ import annotations

import csv

import pytest
from hypothesis import given

from hpctrain.errors import PlanError
from hpctrain.schedule.action import Schedule
from hpctrain.schedule.files import from_csv, read, to_csv
from hpctrain.schedule.kinds import make
from hpctrain.schedule.passes import add_messages
from tests.support.schedules import examples, schedules


@examples(40)
@given(schedules(microbatches=20))
def test_a_schedule_comes_back_from_csv_and_text_as_the_same_value(schedule):
    for value in (schedule, add_messages(schedule)):
        assert from_csv(to_csv(value)) == value
        assert Schedule.parse(str(value)) == value


def test_a_csv_has_a_row_for_each_rank_and_an_action_in_each_cell():
    assert to_csv(make("1f1b", 2, 2)) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    assert from_csv("0F0,0B0\n\n") == Schedule.parse("0F0 0B0\n\n")


def test_a_csv_with_waiting_and_quotes_is_read():
    assert from_csv('0F0,,"0B0"\r\n,1F0, 1B0\r\n') == Schedule.parse("0F0 0B0\n1F0 1B0")


def test_what_torch_overlaps_is_read_one_after_the_other():
    assert from_csv("0F0,(0F1;3B0)OVERLAP_F_B,0B0") == Schedule.parse("0F0 0F1 3B0 0B0")


def test_what_torch_does_with_weights_is_left_out():
    assert from_csv("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD") == Schedule.parse("0F0 0B0")


def test_a_file_is_read_by_its_ending(tmp_path):
    schedule = make("zb-v", 2, 3)
    (tmp_path / "it.csv").write_text(to_csv(schedule))
    (tmp_path / "it.txt").write_text(str(schedule))
    assert read(tmp_path / "it.csv") == read(tmp_path / "it.txt") == schedule
    with (tmp_path / "theirs.csv").open("w", newline="") as file:
        csv.writer(file).writerows(schedule.ranks)
    assert read(tmp_path / "theirs.csv") == schedule


def test_a_file_without_a_schedule_is_refused_by_its_name(tmp_path):
    path = tmp_path / "it.csv"
    path.write_text("0F0,what\n")
    with pytest.raises(PlanError) as caught:
        read(path)
    assert caught.value.what == f"{path}: 'what' is not an action"
    assert caught.value.why == "an action is a stage, an op and a micro-batch, such as 2F0, both counted from 0"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "not text"])
def test_a_file_that_cannot_be_read_is_refused(content, tmp_path):
    path = tmp_path / "it.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        read(path)
    assert caught.value.what.startswith(f"{path} cannot be read: ")
    assert (caught.value.why, caught.value.mend) == (
        "a schedule is a line of actions a rank, or a CSV",
        "name a file with such lines",
    )
