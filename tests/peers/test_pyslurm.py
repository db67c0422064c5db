"""What is used of pyslurm is what its newest release has: read in its published sources, since it rarely can be built.

``HPCTRAIN_PYSLURM`` names a source archive (``pyslurm-25.11.2.tar.gz``); else it is fetched from the package index.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from hpctrain.cluster.slurm_library import USED

ARCHIVE = "pyslurm-25.11.2.tar.gz"
SECONDS = 30


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The text of every source file of pyslurm by its path in the archive."""
    given = os.environ.get("HPCTRAIN_PYSLURM")
    path = Path(given) if given else fetched(tmp_path_factory.mktemp("pyslurm") / ARCHIVE)
    with tarfile.open(path) as archive:
        files = [one for one in archive if one.isfile() and one.name.endswith((".pyx", ".py", ".pxd"))]
        return {one.name: archive.extractfile(one).read().decode() for one in files}


def fetched(path: Path) -> Path:
    """The archive from the index that pip uses; pip itself would start to build it."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    index = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS, check=False).stdout.strip()
    page = f"{(index or 'https://pypi.org/simple').rstrip('/')}/pyslurm/"
    try:
        links = re.findall(r'href="([^"]+)"', urllib.request.urlopen(page, timeout=SECONDS).read().decode())
        link = next(link for link in links if link.split("#")[0].endswith(ARCHIVE))
        path.write_bytes(urllib.request.urlopen(urllib.parse.urljoin(page, link), timeout=SECONDS).read())
    except (OSError, StopIteration, ValueError) as error:
        pytest.skip(f"{ARCHIVE} cannot be fetched from {page} ({error}); HPCTRAIN_PYSLURM may name it")
    return path


def members(sources: dict[str, str], name: str) -> set[str]:
    """The methods and properties of a class, and those of the classes that it is made from."""
    for text in sources.values():
        found = re.search(
            rf"^(?:cdef )?class {name}(?:\((\w*)\))?:\n(.*?)(?=^[^\s#]|\Z)", text, re.MULTILINE | re.DOTALL
        )
        if found and re.search(r"^    def ", found[2], re.MULTILINE):
            own = set(re.findall(r"^    def (\w+)\(", found[2], re.MULTILINE))
            return own | (members(sources, found[1]) if found[1] else set())
    return set()


@pytest.mark.parametrize("name", USED)
def test_pyslurm_has_what_is_used_of_it(sources: dict[str, str], name: str) -> None:
    assert not set(USED[name]) - members(sources, name)


@pytest.mark.parametrize("name", USED)
def test_pyslurm_gives_these_names_to_the_world(sources: dict[str, str], name: str) -> None:
    (package,) = (text for path, text in sources.items() if path.endswith("/pyslurm/__init__.py"))
    assert re.search(rf"^from pyslurm\.core\.[\s\S]*?\b{name}\b", package, re.MULTILINE)


def test_a_signal_goes_to_the_steps_that_are_named(sources: dict[str, str]) -> None:
    (text,) = (text for path, text in sources.items() if path.endswith("core/job/job.pyx"))
    (head,) = re.findall(r"def send_signal\((.*?)\):", text)
    assert "steps=" in head
    assert all(f"`{steps}`" in text for steps in ("batch", "children"))


def test_the_version_tells_the_release_of_slurm_that_it_is_for(sources: dict[str, str]) -> None:
    (text,) = (text for path, text in sources.items() if path.endswith("/pyslurm/version.py"))
    assert re.search(r'^__version__ = "25\.11\.\d+"$', text, re.MULTILINE)
