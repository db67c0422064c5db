"""Whole jobs, started as a user starts them and watched from outside."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts whole jobs in a process group of their own, and ends whatever is left of them."""
    starter = Launch(tmp_path)
    yield starter
    starter.close()
