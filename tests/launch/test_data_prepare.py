"""``hpctrain data prepare`` as a user starts it."""

from __future__ import annotations

import json
import re

import pytest

from hpctrain.data.tokenizer import beside
from hpctrain.data.tokens import Tokens, describe


@pytest.fixture
def command(tmp_path):
    """The command line that prepares two lines of JSON and a text."""
    (tmp_path / "x.jsonl").write_text('{"body": "one"}\n{"body": ""}\n')
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "y.md").write_text("two")
    options = ["--tokenizer", "bpe:257", "--pattern", "*.md", "--json-key", "body", "--out", "out/pair"]
    return ["python", "-m", "hpctrain", "data", "prepare", "x.jsonl", "text", *options]


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_pair_is_made_and_described_once(launch, command, tmp_path, ranks):
    done = launch(ranks, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out/pair.bin: 8 tokens in 2 documents of 2 files; left out: 1 empty, 0 not read")
    assert done.stderr.count("prepare 100%") == 1
    tokens, made = Tokens(tmp_path / "out/pair"), describe(tmp_path / "out/pair")
    tokenizer = beside(tmp_path / "out/pair", made)
    assert [tokenizer.decode(tokens.document(i)) for i in range(tokens.documents)] == ["one", "two"]


def test_the_result_may_be_had_as_json(launch, command):
    done = launch(0, *command, "--json")
    assert json.loads(done.stdout)["tokens"] == 8


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_fault_in_the_text_is_told_once_without_a_traceback(launch, command, tmp_path, ranks):
    (tmp_path / "text" / "z.md").write_bytes(b"\xff")
    done = launch(ranks, *command)
    assert done.returncode == 1
    told = re.findall(r"^hpctrain: (?:rank \d: )?text/z.md is not UTF-8 text: byte 0xff at 0$", done.stderr, re.M)
    assert len(told) == 1
    assert "Traceback" not in done.stderr
