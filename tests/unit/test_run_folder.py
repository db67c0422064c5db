"""How far a run has come, as its folder tells; and the tail of a file that grows."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint import keep
from hpctrain.watch import run
from hpctrain.watch.log import Lines, Log
from hpctrain.watch.run import STEP_FILE, newest_checkpoint, pace, progress, steps_of
from hpctrain.watch.tail import followed, last_lines


def write(folder: Path, *lines: dict[str, object] | str) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "log.jsonl").write_text("".join(text + "\n" for text in texts))


# ---- the log


def test_what_a_run_logs_is_read(tmp_path: Path) -> None:
    before = time.time()
    with Log(tmp_path, 0, 10, leads=True) as log:
        for step in range(1, 5):
            log.step(step, {"loss": 1 / step, "tokens_per_second": 100.0 * step, "seconds": 0.5})
    found = progress(tmp_path)
    assert (found.step, found.loss, found.tokens_per_second) == (4, 0.25, 400.0)
    assert before - 1 <= found.logged_at <= time.time() + 1


def test_before_its_first_line_a_run_has_no_progress(tmp_path: Path) -> None:
    assert progress(tmp_path) is None
    write(tmp_path, "", '{"step": 1, "ti')
    assert progress(tmp_path) is None


@pytest.mark.parametrize("cut", ['{"step": 3, "time": 12', "", "\x00\x00", "[]", '{"step": "3", "time": 3}'])
def test_a_line_that_is_not_whole_is_passed_over(tmp_path: Path, cut: str) -> None:
    write(tmp_path, {"step": 1, "time": 10.0}, {"step": 2, "time": 11.0}, cut)
    assert (progress(tmp_path).step, progress(tmp_path).loss) == (2, None)


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    write(tmp_path, *({"step": step, "time": float(step), "more": "x" * 200} for step in range(1, 3000)))
    assert progress(tmp_path).step == 2999
    assert (tmp_path / "log.jsonl").stat().st_size > 3 * run.TAIL_BYTES


def test_one_line_tells_the_pace_by_what_it_says_of_its_step(tmp_path: Path) -> None:
    write(tmp_path, {"step": 1, "time": 10.0, "seconds": 2.5})
    assert progress(tmp_path).left_seconds(11) == 25.0


@given(st.integers(1, 100), st.integers(2, 30), st.floats(0.01, 100))
def test_the_pace_of_an_even_log_is_its_own(every: int, count: int, seconds: float) -> None:
    per_line, per_step = pace([(every * n, 5.0 + seconds * n) for n in range(count)])
    assert per_line == pytest.approx(seconds) and per_step == pytest.approx(seconds / every)


def test_a_pause_between_two_starts_is_no_part_of_the_pace_and_a_save_is() -> None:
    times = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 3605.0, 3606.0, 3611.0, 3612.0]
    per_line, per_step = pace([(step, at) for step, at in enumerate(times, 1)])
    assert per_line == 1.0 and per_step == pytest.approx((7 * 1.0 + 5.0) / 8)


def test_the_time_that_is_left_is_that_of_the_steps_that_are_left(tmp_path: Path) -> None:
    write(tmp_path, *({"step": step, "time": 2.0 * step} for step in range(1, 11)))
    found = progress(tmp_path)
    assert (found.left_seconds(15), found.left_seconds(10), found.left_seconds(5)) == (10.0, 0.0, 0.0)


@pytest.mark.parametrize(("age", "moves"), [(0, True), (110, True), (130, False), (-50, True)])
def test_a_log_of_quick_steps_stands_still_after_two_minutes(tmp_path: Path, age: float, moves: bool) -> None:
    write(tmp_path, *({"step": step, "time": 1.0 * step} for step in range(1, 11)))
    assert progress(tmp_path).moves(10.0 + age) == moves


@pytest.mark.parametrize(("age", "moves"), [(900, True), (1100, False)])
def test_a_log_of_slow_steps_stands_still_after_ten_of_them(tmp_path: Path, age: float, moves: bool) -> None:
    write(tmp_path, *({"step": step, "time": 100.0 * step} for step in range(1, 11)))
    assert progress(tmp_path).moves(1000.0 + age) == moves


# ---- checkpoints and output


@given(st.integers(0, 10**10))
def test_the_name_of_a_checkpoint_is_known_here_too(step: int) -> None:
    assert int(STEP_FILE.fullmatch(keep.file_name(step))[1]) == step
    assert not STEP_FILE.fullmatch(keep.part_name(keep.file_name(step)))


def test_the_newest_checkpoint_is_that_of_the_latest_step(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints").mkdir()
    assert newest_checkpoint(tmp_path) is None
    names = [keep.file_name(step) for step in (99, 100, 20)]
    for name in [*names, keep.part_name(keep.file_name(900)), "latest", "kept", "step-1.h5"]:
        (tmp_path / "checkpoints" / name).touch()
    found = newest_checkpoint(tmp_path)
    assert (found.step, found.path.name) == (100, "step-00000100.h5")
    assert abs(found.saved_at - time.time()) < 3600


def test_the_number_of_steps_is_read_from_what_a_run_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for total in (10, 20):
        lines = Lines(0, total)
        lines.step(3, {"loss": 2.0})
        lines.say("saved step 3 of something")
    (tmp_path / "out").write_text(capsys.readouterr().err)
    assert steps_of(tmp_path / "out") == 20
    (tmp_path / "empty").write_text("nothing yet")
    assert steps_of(tmp_path / "empty") is None and steps_of(tmp_path / "nowhere") is None


# ---- the tail of a file


@given(st.lists(st.text("ab ä", max_size=5), max_size=9), st.integers(0, 12), st.booleans())
def test_the_last_lines_are_those_that_tail_gives(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], count: int, ends: bool
) -> None:
    path = tmp_path_factory.mktemp("tail") / "file"
    text = "\n".join(lines) + ("\n" if ends else "")
    path.write_text(text)
    whole = io.StringIO(text).readlines()
    assert last_lines(path, count) == ("".join(whole[max(len(whole) - count, 0) :]).encode(), len(text.encode()))


def test_the_last_lines_of_a_long_file_are_found_across_blocks(tmp_path: Path) -> None:
    lines = [f"{number} " + "x" * 999 + "\n" for number in range(500)]
    (tmp_path / "file").write_text("".join(lines))
    assert last_lines(tmp_path / "file", 200)[0] == "".join(lines[-200:]).encode()


def follow(path: Path, count: int, steps: list[Callable[[], object]]) -> str:
    """All that is followed while these things are done one after the other; then it is over."""
    doing = iter(steps)

    def over() -> bool:
        """Each time it is asked, the next thing is done."""
        step = next(doing, None)
        if step:
            step()
        return step is None

    return b"".join(followed(path, count, over, 0.001)).decode()


def added(path: Path, text: str) -> Callable[[], object]:
    def add() -> None:
        with path.open("a") as file:
            file.write(text)

    return add


def test_what_is_written_while_a_file_is_followed_is_given_and_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one\ntwo\nthree\n")
    steps = [added(path, "fo"), lambda: None, added(path, "ur\n"), added(path, "five\n")]
    assert follow(path, 2, steps) == "two\nthree\nfour\nfive\n"


def test_what_is_written_just_before_the_end_is_given(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one\n")

    def over() -> bool:
        added(path, "last\n")()
        return True

    assert b"".join(followed(path, 5, over, 0.001)) == b"one\nlast\n"


def test_a_file_that_was_begun_anew_is_given_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("a long line of the first start\n")
    assert follow(path, 5, [lambda: path.write_text("anew\n")]).endswith("start\nanew\n")


def test_text_that_is_cut_within_a_letter_is_given_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes("ä".encode()[:1])

    def rest() -> None:
        with path.open("ab") as file:
            file.write("ä".encode()[1:] + b"\n")

    assert follow(path, 5, [lambda: None, rest]) == "ä\n"
