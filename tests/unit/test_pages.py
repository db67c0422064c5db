"""The pages of the documentation lead to each other, and none is left out of the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def links(page: Path) -> list[Path]:
    """Where a page's relative links lead."""
    found = LINK.findall(page.read_text())
    return [(page.parent / target).resolve() for target in found if "://" not in target]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [target for target in links(page) if not target.exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs/README.md"
    listed = {index, *links(index)}
    assert [str(page) for page in PAGES[1:] if not listed & {page, page.parent}] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_begins_with_its_title(page: Path) -> None:
    assert page.read_text().startswith("# ")
