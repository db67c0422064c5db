"""The limits of the house: short files, short functions, and a linter that finds nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("hpctrain", "tests", "docs", "slurm")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
FILE_LINES, FUNCTION_LINES = 400, 60


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_ends_before_400_lines_and_a_function_before_60(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) < FILE_LINES
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {node.name: node.end_lineno - node.lineno + 1 for node in nodes}
    assert {name: lines for name, lines in long.items() if lines >= FUNCTION_LINES} == {}


@pytest.mark.parametrize("path", sorted((ROOT / "hpctrain").rglob("*.py")), ids=name_of)
def test_a_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_linter_finds_nothing() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--quiet", "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
