"""The command line as a user meets it: help, exit codes, what goes to which stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from hpctrain import __version__
from hpctrain.cli import app
from hpctrain.config import knobs
from hpctrain.data.tokens import Description
from hpctrain.errors import CheckpointError, ConfigError, HpctrainError

ROOT = Path(__file__).resolve().parents[2]
SMALL = "[model]\nlayers = 1\nwidth = 8\nheads = 2\nsequence = 4\n"


def commands() -> list[tuple[str, ...]]:
    """Every command with its subcommands, and the program itself."""
    found: list[tuple[str, ...]] = [()]
    for name, command in get_command(app).commands.items():
        found += [(name,), *((name, under) for under in getattr(command, "commands", {}))]
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


# ---- help


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_answers_help(words: tuple[str, ...], run) -> None:
    code, out, err = run(*words, "--help")
    assert (code, err) == (0, "")
    assert " ".join(["Usage: hpctrain", *words]) in out


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_and_option_says_what_it_is(words: tuple[str, ...]) -> None:
    command = get_command(app)
    for word in words:
        command = command.commands[word]
    assert command.help
    assert [p.name for p in command.params if p.param_type_name == "option" and not p.help] == []


def test_the_version_is_told(run) -> None:
    assert run("--version") == (0, f"hpctrain {__version__}\n", "")


def test_the_command_line_loads_neither_torch_nor_mpi_before_a_command_runs() -> None:
    program = "import sys, hpctrain.cli; print(sorted({'torch', 'mpi4py', 'h5py', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr


def test_planning_loads_neither_torch_nor_mpi(small: Path) -> None:
    program = """
import sys
from hpctrain.cli import main
try:
    main()
finally:
    print({"torch", "mpi4py"} & {*sys.modules})
"""
    words = ["plan", str(small), "--set", "data.text=['x']", "--set", "data.tokenizer=bytes"]
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nset()\n")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hpctrain", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"hpctrain {__version__}\n")


# ---- errors


@pytest.mark.parametrize(
    "words", [("nope",), ("train",), ("plan", "x.toml", "--nope"), ("plan", "x.toml", "--ranks", "0")], ids=" ".join
)
def test_wrong_use_exits_with_2_and_says_so_on_the_error_stream(words: tuple[str, ...], run) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "Error" in err


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("what", "why", "mend"), 2), (CheckpointError("what", "why", "mend"), 1)]
)
def test_an_error_is_told_on_the_error_stream_without_a_traceback(
    error: HpctrainError, code: int, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("hpctrain.cli.app", fail)
    assert run("plan", "x.toml") == (code, "", "hpctrain: what\n  why\n  mend\n")


def test_an_error_is_told_by_the_first_rank_alone(small: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setattr("hpctrain.cli.GRACE_SECONDS", 0.0)
    assert run("plan", small, "--set", "x=1") == (2, "", "")
    assert run("plan", small, "--nope") == run("nope") == (2, "", "")
    assert run("--version") == (0, f"hpctrain {__version__}\n", "")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert run("plan", small, "--set", "x=1")[2].startswith(f"hpctrain: {small}: x is not a known key\n")


# ---- plan


def plan_of(run, *words: object) -> dict:
    code, out, err = run("plan", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_a_plan_is_shown_as_lines_or_as_json(small: Path, run) -> None:
    words = ("plan", small, "--ranks", 4, "--vocabulary", 300)
    code, out, err = run(*words)
    assert (code, err) == (0, "")
    assert out.startswith("ranks     1 node x 4 ranks\nmesh      dp 4\nmodel     ")
    assert plan_of(run, *words[1:])["mesh"]["axes"] == [["dp", 4]]


def test_a_plan_takes_its_vocabulary_from_the_tokenizers_name(small: Path, run) -> None:
    text = ("--set", "data.text=['x']")
    assert plan_of(run, small, *text)["shape"]["vocabulary"] == 257
    assert plan_of(run, small, *text, "--set", "data.tokenizer=bpe:512")["shape"]["vocabulary"] == 512


def test_a_plan_takes_its_vocabulary_from_the_data(small: Path, tmp_path: Path, run) -> None:
    (tmp_path / "code.json").write_text(Description(777, 0, "bytes", 1, 1, 1, 1, 0, 0).text())
    sources = f'data.sources=[{{path="{tmp_path / "code"}"}}, {{path="{tmp_path / "megatron"}"}}]'
    assert plan_of(run, small, "--set", sources)["shape"]["vocabulary"] == 777


def test_a_plan_takes_the_vocabulary_of_the_model_or_of_the_option(small: Path, run) -> None:
    assert plan_of(run, small, "--vocabulary", 99)["shape"]["vocabulary"] == 99
    assert plan_of(run, small, "--set", "model.vocabulary=88")["shape"]["vocabulary"] == 88


@pytest.mark.parametrize("data", ["data.text=[]", "data.sources=[{path='not-there'}]"])
def test_a_plan_without_any_vocabulary_is_refused(data: str, small: Path, run) -> None:
    code, out, err = run("plan", small, "--set", data)
    assert (code, out) == (2, "")
    assert err == (
        'hpctrain: model.vocabulary = "auto", and no data tells how many tokens its tokenizer has\n'
        "  a PREFIX.json beside a token file would\n"
        "  give --vocabulary N, or set model.vocabulary to a number\n"
    )


# ---- knobs


def test_knobs_are_listed_as_a_table_and_as_json(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "800")
    code, out, err = run("knobs")
    assert (code, err) == (0, "")
    assert all(key in out and meaning in out for key, meaning in knobs().items())
    rows = json.loads(run("knobs", "--json")[1])
    assert [row["key"] for row in rows] == list(knobs())
    assert {"key", "value", "default", "meaning"} == set(rows[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.steps", "whole number, at least 0"),
        ("model.family", '"gpt2" or "llama" or "qwen2" or "qwen3" or "mixtral"'),
        ("model.kv_heads", "whole number or left out, at least 1"),
        ("data.sources", "list of tables"),
        ("data.sources[].weight", "number, more than 0"),
        ("checkpoint.hints", "table of text or whole number"),
        ("optim.cooldown", "number, more than 0, at most 1"),
    ],
)
def test_what_a_key_may_hold_is_told_in_words(key: str, value: str, run) -> None:
    rows = {row["key"]: row["value"] for row in json.loads(run("knobs", "--json")[1])}
    assert rows[key] == value


def test_the_page_of_the_configuration_is_what_is_printed(run) -> None:
    assert run("knobs", "--markdown")[1] == (ROOT / "docs/reference/configuration.md").read_text(), (
        "write it anew: hpctrain knobs --markdown > docs/reference/configuration.md"
    )
