"""The image of containers/cpu.def, made once for each MPI library, and the cluster that its ranks run on."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch.conftest import launch  # noqa: F401  # a fixture
from tests.slurm.conftest import cluster, lab  # noqa: F401  # fixtures
from tests.support.definition import read
from tests.support.image import Image, build, cache_folder, missing, torch_index
from tests.support.jobs import ROOT

DEFINITION = ROOT / "containers/cpu.def"


@dataclass(frozen=True)
class Family:
    """An MPI library: what it is called, how srun introduces its ranks, and the environment that has the host's."""

    name: str
    vendor: str
    srun: str
    venv: str


FAMILIES = (Family("openmpi", "Open MPI", "pmix", "main"), Family("mpich", "MPICH", "pmi2", "mpich"))


@pytest.fixture(scope="session", params=FAMILIES, ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    """The MPI library of the image; the tests of one image follow each other."""
    return request.param


@pytest.fixture(scope="session")
def image(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """The image with this MPI library. It takes some minutes, mostly h5py's, whose build is kept for the next time."""
    if why := missing():
        pytest.skip(why)
    index = torch_index()
    arguments = {"MPI": family.name, **({"TORCH_INDEX": index} if index else {})}
    folder = tmp_path_factory.mktemp(family.name)
    try:
        yield build(DEFINITION, arguments, folder, downloads(family, arguments))
    finally:
        shutil.rmtree(folder)  # gigabytes
    left = subprocess.run(["losetup", "--list"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in left


def downloads(family: Family, arguments: Mapping[str, str]) -> Path:
    """pip's cache for this way to build: h5py depends on the MPI library and on HDF5, which pip does not know."""
    script = read(DEFINITION.read_text(), arguments)[0].script("post")
    files = [(ROOT / name).read_text() for name in ("containers/install", ".ci/constraints.txt")]
    folder = cache_folder() / f"{family.name}-{hashlib.sha256(''.join([script, *files]).encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    return folder
