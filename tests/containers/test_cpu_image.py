"""The image that containers/cpu.def describes: made section by section, packed as a SIF file, and trained in.

``make test-containers`` runs these tests. Each image is entered as Apptainer enters one, by tests/support/enter_image.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain import __version__
from tests.containers.conftest import DEFINITION, Family
from tests.support.image import Image, dumped, listed
from tests.support.jobs import ROOT, VENVS

pytestmark = pytest.mark.containers

STEPS = 4
OWN_NAMESPACES = ("--userns",)
Srun = Callable[..., object]


@pytest.fixture
def train(tmp_path: Path) -> list[str]:
    """The command of a small run on text in the test's folder, which is all of the checkout's side that it sees."""
    shutil.copy(ROOT / "configs/tiny.toml", tmp_path)
    (tmp_path / "text").mkdir()
    for number in range(8):
        text = f"print({number}, 'ranks meet in an image, and a loss comes down')\n"
        (tmp_path / f"text/{number}.py").write_text(text * 99)
    overrides = (
        f"train.steps={STEPS}", "train.batch=8", "train.microbatch=2", "train.validate_every=0", "model.layers=1",
        "model.width=32", "model.sequence=32", "data.tokenizer=bytes", "data.text=['text']",
    )  # fmt: skip
    sets = [word for override in overrides for word in ("--set", override)]
    return ["hpctrain", "train", "tiny.toml", *sets]


@pytest.fixture
def srun(cluster, family: Family, image: Image) -> Srun:
    """``srun(*command)`` runs a command with four tasks on two nodes, each in the image, to its end."""

    def start(*argv: object, options: tuple[str, ...] = (), mpi: str | None = None):
        command = image.command(*argv, options=options)
        return cluster.srun(2, 2, *command, venv=family.venv, mpi=mpi or family.srun, timeout=240)

    return start


@pytest.fixture
def host(family: Family, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The options that bind the host's library of this family over or before the image's."""
    if family.name == "openmpi":
        found = [path for path in Path("/usr/lib").glob("*/libmpi.so.40") if path.exists()]
        if not found:
            pytest.skip("the host's Open MPI is not Debian's, which is what the image has")
        return "--bind", f"{found[0].resolve()}:{found[0].resolve()}"
    monkeypatch.setenv("APPTAINERENV_LD_LIBRARY_PATH", "/host/mpi")
    return "--bind", f"{VENVS['mpich'] / 'lib'}:/host/mpi"


def losses(folder: Path) -> list[float]:
    """The loss of each step in the log of the run."""
    lines = [json.loads(line) for line in (folder / "runs/tiny/log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


# ---- what is in it


def test_the_file_holds_the_definition_and_a_system_to_run(image: Image) -> None:
    lines = listed(image).splitlines()
    assert any("Def.FILE" in line for line in lines)
    assert any("FS (Squashfs/*System" in line for line in lines)
    assert dumped(image, 1) == DEFINITION.read_bytes()


def test_the_image_passes_its_own_test(image: Image, family: Family, tmp_path: Path) -> None:
    done = image.run("sh", "/.singularity.d/test", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert family.vendor in done.stdout and "the image" in done.stdout
    assert "made runs/tiny/checkpoints/step-00000001.h5" in done.stderr


def test_running_the_image_runs_hpctrain(image: Image, tmp_path: Path) -> None:
    done = image.run("sh", "/.singularity.d/runscript", "--version", folder=tmp_path)
    assert done.stdout.split()[-1] == __version__, done.stderr
    asked = image.run("sh", "/.singularity.d/runscript", "knobs", "--json", folder=tmp_path)
    assert json.loads(asked.stdout)


def test_labels_and_help_tell_the_mpi_library(image: Image, family: Family, tmp_path: Path) -> None:
    labels = json.loads(image.run("cat", "/.singularity.d/labels.json", folder=tmp_path).stdout)
    assert labels["hpctrain.mpi"] == family.name
    assert f"MPI library {family.name}" in image.run("cat", "/.singularity.d/runscript.help", folder=tmp_path).stdout


def test_the_hosts_python_packages_stay_outside(image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = image.run("python", "-c", "import hpctrain; print(hpctrain.__file__)", folder=tmp_path)
    assert done.stdout.startswith("/opt/hpctrain/lib/python3"), done.stderr


def test_its_python_packages_are_the_pinned_ones(image: Image, tmp_path: Path) -> None:
    pins = dict(line.split("==") for line in (ROOT / ".ci/constraints.txt").read_text().splitlines())
    wanted = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    said = json.loads(image.run("python", "-m", "pip", "list", "--format=json", folder=tmp_path).stdout)
    found = {package["name"].lower().replace("_", "-"): package["version"].split("+")[0] for package in said}
    assert found.pop("hpctrain") == __version__
    assert {"torch", "h5py", "mpi4py", "numpy"} <= set(found)
    assert found == {name: wanted.get(name) for name in found}


@pytest.mark.parametrize("place", ["/.machine", "/src", "/root/.cache", "/usr/bin/gcc", "/var/lib/apt/lists/lock"])
def test_what_only_building_needs_is_not_in_it(image: Image, tmp_path: Path, place: str) -> None:
    assert image.run("test", "-e", place, folder=tmp_path).returncode == 1


# ---- ranks in it


@pytest.mark.parametrize("options", [(), OWN_NAMESPACES], ids=["shared", "own-user-namespaces"])
def test_four_ranks_train_in_it_what_one_trains_outside(srun: Srun, launch, train, tmp_path: Path, options) -> None:
    done = srun(*train, options=options)
    assert done.returncode == 0, done.stderr
    assert "2 nodes x 2 ranks" in done.stderr
    inside = losses(tmp_path)
    checkpoint = f"runs/tiny/checkpoints/step-{STEPS:08}.h5"
    verified = srun("hpctrain", "ckpt", "verify", checkpoint, options=options)
    assert verified.returncode == 0, verified.stderr
    shutil.rmtree(tmp_path / "runs")
    alone = launch(0, *train)
    assert alone.returncode == 0, alone.stderr
    assert inside == pytest.approx(losses(tmp_path), rel=1e-4) and len(inside) == STEPS


def test_the_doctor_tells_that_the_mpi_library_is_the_images(srun: Srun, image: Image, family: Family) -> None:
    facts = diagnosis(srun("hpctrain", "doctor", "--json"))
    assert facts["container"] == (f"Apptainer ({image.path})", "APPTAINER_CONTAINER")
    assert facts["mpi.from"] == ("the image", "/proc/self/mountinfo")
    assert facts["mpi.vendor"][0].startswith(family.vendor)
    assert facts["hdf5.parallel"][0] is True


def test_the_hosts_mpi_library_serves_all_when_it_is_bound_in(srun: Srun, host, train, tmp_path: Path) -> None:
    facts = diagnosis(srun("hpctrain", "doctor", "--json", options=host))
    assert facts["mpi.from"][0].startswith("the host, by the mount /")
    done = srun(*train, "--set", "checkpoint.writer=mpio", options=host)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"runs/tiny/checkpoints/step-{STEPS:08}.h5").exists()


def test_the_hosts_launcher_starts_ranks_in_it(cluster, image: Image, family: Family) -> None:
    command = image.command("hpctrain", "doctor", "--json")
    facts = diagnosis(cluster.run(f"{ROOT}/.ci/mpirun 4", *command, venv=family.venv, timeout=120))
    assert facts["size"] == (4, "MPI_COMM_WORLD")
    assert facts["mpi.from"][0] == "the image"


def test_ranks_that_srun_cannot_introduce_write_nothing(srun: Srun, family: Family, train, tmp_path: Path) -> None:
    done = srun(*train, mpi="none")
    assert done.returncode != 0
    assert not (tmp_path / "runs").exists()
    if family.name == "mpich":  # Open MPI ends such ranks itself
        assert "this process is alone" in done.stderr and "or build the image with the library" in done.stderr


def diagnosis(done) -> dict[str, tuple[object, str]]:
    """The facts of a report by their names: value and source."""
    assert done.returncode == 0, done.stderr
    return {fact["name"]: (fact["value"], fact["source"]) for fact in json.loads(done.stdout)["facts"]}
