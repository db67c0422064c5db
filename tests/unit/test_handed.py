"""The list of a run's jobs: what is appended is read, and nothing that breaks a line breaks the list."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.jobs import FILE, Handed, append, guessed, newest, read

HANDED = st.builds(Handed, st.text(), st.floats(allow_nan=False), st.text(), st.text(), st.text())


def handed(folder: Path, output: str = "slurm-%j.out", id: str = "12", at: float = 1.0) -> Handed:
    return Handed(id, at, str(folder / "job.sbatch"), str(folder / output))


@given(st.lists(HANDED, max_size=5))
def test_what_is_appended_is_read(tmp_path_factory: pytest.TempPathFactory, jobs: list[Handed]) -> None:
    folder = tmp_path_factory.mktemp("run") / "new"
    for job in jobs:
        append(folder, job)
    assert read(folder) == tuple(jobs)


def test_a_line_is_json_with_these_keys(tmp_path: Path) -> None:
    append(tmp_path, handed(tmp_path))
    line = json.loads((tmp_path / FILE).read_text())
    assert list(line) == ["id", "submitted_at", "script", "output", "kind"]
    assert (line["id"], line["kind"]) == ("12", "slurm")


def test_a_run_without_jobs_has_none(tmp_path: Path) -> None:
    assert read(tmp_path / "nowhere") == read(tmp_path) == ()
    assert newest(()) is None


@pytest.mark.parametrize("broken", ["", '{"id": "13", "submi', "[]", "7", '{"id": "13"}', "\x00\x00"])
def test_a_line_that_cannot_be_read_hides_no_other(tmp_path: Path, broken: str) -> None:
    first, last = handed(tmp_path), handed(tmp_path, id="14", at=2.0)
    append(tmp_path, first)
    with (tmp_path / FILE).open("a") as file:
        file.write(broken + "\n")
    append(tmp_path, last)
    assert read(tmp_path) == (first, last)


def test_keys_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    append(tmp_path, handed(tmp_path))
    line = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps(line | {"of a later version": 1}) + "\n")
    assert read(tmp_path) == (handed(tmp_path),)


def test_the_newest_is_the_one_that_was_handed_in_last(tmp_path: Path) -> None:
    jobs = [handed(tmp_path, at=1.0), handed(tmp_path, id="14", at=3.0), handed(tmp_path, id="13", at=2.0)]
    assert newest(jobs).id == "14"


def test_the_output_of_a_job_is_a_file_once_it_is_there(tmp_path: Path) -> None:
    job = handed(tmp_path)
    assert job.outputs(tmp_path) == []
    (tmp_path / "slurm-12.out").touch()
    assert job.outputs(tmp_path) == [tmp_path / "slurm-12.out"]


def test_an_array_has_an_output_for_each_job_and_the_last_written_comes_last(tmp_path: Path) -> None:
    job = handed(tmp_path, "slurm-%A_%a.out")
    for age, name in enumerate(("slurm-12_3.out", "slurm-12_1.out", "slurm-12_2.out", "slurm-13_1.out")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    assert [path.name for path in job.outputs(tmp_path)] == ["slurm-12_3.out", "slurm-12_1.out", "slurm-12_2.out"]
    assert [path.name for path in job.outputs(tmp_path, "1")] == ["slurm-12_1.out"]
    assert job.outputs(tmp_path, "9") == []


def test_a_job_of_an_array_that_was_handed_in_by_its_number_has_its_own_output(tmp_path: Path) -> None:
    job = handed(tmp_path, "slurm-%A_%a.out", id="12_2")
    for name in ("slurm-12_1.out", "slurm-12_2.out"):
        (tmp_path / name).touch()
    assert [path.name for path in job.outputs(tmp_path)] == ["slurm-12_2.out"]


def test_an_output_is_found_where_the_run_was_moved_to(tmp_path: Path) -> None:
    job = handed(tmp_path / "before")
    (tmp_path / "slurm-12.out").touch()
    assert job.outputs(tmp_path) == [tmp_path / "slurm-12.out"]


def test_jobs_that_were_handed_in_otherwise_are_known_by_their_output(tmp_path: Path) -> None:
    texts = {"slurm-12.out": "", "job-13_4.out": "", "train.out": "on n1\nSLURM_JOB_ID=14\n", "other.out": "nothing"}
    for age, (name, said) in enumerate(texts.items()):
        (tmp_path / name).write_text(said)
        os.utime(tmp_path / name, (age, age))
    assert [job.id for job in guessed(tmp_path)] == ["12", "13_4", "14"]
    assert [path.name for job in guessed(tmp_path) for path in job.outputs(tmp_path)] == list(texts)[:3]
    assert guessed(tmp_path / "nowhere") == ()
