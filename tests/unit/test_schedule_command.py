"""``hpctrain draw`` as a user meets it, and the pictures of the documentation, which it made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hpctrain.schedule.action import Schedule
from hpctrain.schedule.files import read, to_csv
from hpctrain.schedule.kinds import SCHEDULES, make
from hpctrain.schedule.passes import add_messages
from hpctrain.schedule.simulate import simulate
from hpctrain.watch.trace import write

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/explanation/schedules.md"
PICTURES = ROOT / "docs/explanation/pictures"
COMMAND = re.compile(r"^hpctrain (draw .*--out (\S+\.svg).*)$", re.MULTILINE)


@pytest.fixture
def run(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """``run("draw", "1f1b")`` gives the exit code and what went to the two streams, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return run


def test_a_schedule_is_drawn_and_described(run):
    assert run("draw", "1f1b", "--stages", 2, "--microbatches", 2) == (
        0,
        "time    0              5\n"
        "rank 0  F0 F1 .  .  B0--- .  B1---\n"
        "rank 1  .  F0 B0--- F1 B1--- .  .\n"
        "\n"
        "pipeline     2 ranks, 2 stages, 2 micro-batches\n"
        "time         9; a rank is at it for 9, and computes 6\n"
        "bubble       33.3% of all ranks' time\n"
        "activations  at most 2 1, rank by rank, one for each stage and micro-batch\n"
        "messages     4 between ranks\n",
        "",
    )


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_kind_is_drawn_for_4_ranks_and_8_micro_batches_when_nobody_says_how_many(kind, run):
    code, out, err = run("draw", kind, "--json")
    assert (code, err) == (0, "")
    assert Schedule.from_json(json.loads(out)["schedule"]) == make(kind, 4, 8)


def test_a_terminal_sees_colours_unless_it_asks_for_none(run, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[30;48;2;" in run("draw", "1f1b")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("draw", "1f1b")[1]


def test_stages_are_those_of_the_whole_pipeline(run):
    words = ("draw", "interleaved", "--stages", 12, "--chunks", 3, "--group", 5, "--microbatches", 10, "--json")
    found = json.loads(run(*words)[1])
    assert (found["ranks"], found["stages"]) == (4, 12)
    assert Schedule.from_json(found["schedule"]) == make("interleaved", 4, 10, 3, 5)


def test_costs_and_messages_change_times_and_not_actions(run):
    costs = ("--costs", "10,12,8", "--message", "1")
    plain, costly = (json.loads(run("draw", "zb-h1", "--json", *words)[1]) for words in ((), costs))
    assert plain["schedule"] == costly["schedule"]
    assert (plain["makespan"], costly["work"]) == (27, 240)
    assert costly["makespan"] > 240 + 3 * 14


def test_a_csv_is_written_and_drawn_again(run, tmp_path):
    first = json.loads(run("draw", "zb-v", "--csv", "it.csv", "--json")[1])
    assert (tmp_path / "it.csv").read_text() == to_csv(make("zb-v", 4, 8))
    assert json.loads(run("draw", "it.csv", "--json")[1]) == first
    (tmp_path / "it.txt").write_text(str(make("zb-v", 4, 8)))
    assert json.loads(run("draw", "it.txt", "--json")[1]) == first


def test_sends_and_receives_are_written_where_they_are_asked_for(run, tmp_path):
    told = json.loads(run("draw", "1f1b", "--messages", "--csv", "it.csv", "--json")[1])
    assert Schedule.from_json(told["schedule"]) == add_messages(make("1f1b", 4, 8)) == read(tmp_path / "it.csv")


def test_what_a_run_has_recorded_is_drawn_as_what_is_simulated(run, tmp_path):
    schedule = make("1f1b", 2, 2)
    write(tmp_path / "trace-3.json", simulate(schedule))
    assert run("draw", "trace-3.json") == run("draw", "1f1b", "--stages", 2, "--microbatches", 2)
    assert run("draw", "trace-3.json", "--out", "it.svg", "--csv", "it.csv")[0] == 0
    assert read(tmp_path / "it.csv") == schedule


def test_a_picture_is_made(run, tmp_path):
    assert run("draw", "1f1b", "--out", "it.svg")[0] == 0
    assert "1f1b: 4 ranks, 4 stages, 8 micro-batches" in (tmp_path / "it.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("interleaved", "--stages", 7),
            "7 stages, 2 on each rank\n  every rank of a pipeline has as many stages as the others\n  take 6 stages",
        ),
        (
            ("1f1b", "--costs", "1,2"),
            "--costs 1,2\n"
            "  these are the times of a forward, of the gradient of its input and of that of its weights\n"
            "  give three numbers with commas, such as 1,1,1",
        ),
        (
            ("wrong.txt",),
            "rank 0 waits for ever at 0B0\n  it needs 0F0, which it does later\n  put 0F0 first",
        ),
        (
            ("wrong.txt", "--stages", 4, "--group", 4),
            "--stages --group beside the file wrong.txt\n"
            "  a file says by itself how much there is\n"
            "  leave it out, or name a kind of schedule",
        ),
        (
            ("trace-3.json", "--costs", "1,2,1", "--chunks", 2),
            "--chunks --costs beside the file trace-3.json\n"
            "  a file says by itself how much there is\n"
            "  leave it out, or name a kind of schedule",
        ),
        (
            ("missing.csv",),
            "missing.csv cannot be read: [Errno 2] No such file or directory: 'missing.csv'\n"
            "  a schedule is a line of actions a rank, or a CSV\n"
            "  name a file with such lines",
        ),
        (
            ("1f1c",),
            "'1f1c' is not a kind of schedule\n"
            "  there are gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zb-v, dualpipe-v\n"
            "  did you mean 1f1b?",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_use_is_told_with_what_would_be_right(words, message, run, tmp_path):
    (tmp_path / "wrong.txt").write_text("0B0 0F0\n")
    assert run("draw", *words) == (2, "", f"hpctrain: {message}\n")


def test_a_csv_that_cannot_be_written_is_told(run):
    code, out, err = run("draw", "1f1b", "--csv", "missing/it.csv")
    assert (code, out) == (2, "")
    assert err.startswith("hpctrain: missing/it.csv cannot be written: ")
    assert err.endswith("\n  --csv goes there\n  name a file in a folder that is there\n")


# ---- the pictures of the documentation


@pytest.mark.parametrize(("command", "name"), COMMAND.findall(PAGE.read_text()), ids=lambda value: value.split()[-1])
def test_a_picture_of_the_page_is_what_its_command_draws(command, name, run, tmp_path):
    assert run(*command.split())[0] == 0
    assert (tmp_path / name).read_text() == (PICTURES / name).read_text(), f"draw it anew: hpctrain {command}"


def test_the_page_has_a_picture_of_every_kind_and_no_picture_is_shown_nowhere():
    page, drawn = PAGE.read_text(), {name for _, name in COMMAND.findall(PAGE.read_text())}
    there, pages = {path.name for path in PICTURES.iterdir()}, "".join(p.read_text() for p in PAGE.parent.glob("*.md"))
    assert {f"{kind}.svg" for kind in SCHEDULES} <= drawn <= there
    assert all(f"](pictures/{name})" in page for name in drawn)
    assert all(f"](pictures/{name})" in pages for name in there)
