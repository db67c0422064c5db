"""Every command and every block of code in the README and in docs/ runs as it stands.

A page's blocks run in order in one fresh folder that sees the project's ``configs``: ``python`` blocks as scripts,
``sh`` blocks in one shell each, with the project's commands on PATH. What cannot run everywhere (a site's batch
system, a GPU) is marked ``text``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TIMEOUT_SECONDS = 240
# Set up the project itself, or start the whole suite: the machine that runs this test has done so.
DONE_ALREADY = ("git clone", "make ", "pip install", "sbatch ")


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if page.exists() and BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for kind, text in BLOCK.findall(page.read_text()):
        done = subprocess.run(
            _command(kind, text), cwd=tmp_path, env=_environment(), capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=TIMEOUT_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{page.name}:\n{text}\n{done.stdout}\n{done.stderr}"


def _command(kind: str, text: str) -> list[str]:
    if kind == "python":
        return [sys.executable, "-c", text]
    lines = [line for line in text.splitlines() if not line.strip().startswith(DONE_ALREADY)]
    return ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]


def _environment() -> dict[str, str]:
    tools = [str(Path(sys.executable).parent), str(ROOT / ".ci")]
    return os.environ | {"PATH": os.pathsep.join([*tools, os.environ["PATH"]]), "COLUMNS": "120"}
