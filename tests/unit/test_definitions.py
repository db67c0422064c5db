"""The definitions of images: what can be said of them without making one."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.definition import Stage, parts, read, variables

ROOT = Path(__file__).resolve().parents[2]
DEFINITIONS = sorted((ROOT / "containers").glob("*.def"))
BY_NAME = {path.stem: path.read_text() for path in DEFINITIONS}
EVERY = pytest.mark.parametrize("text", BY_NAME.values(), ids=BY_NAME)
SECRET = re.compile(r"(passw|secret|token|api_?key)\w*\s*=\s*\S|://[^/\s]+:[^/\s]+@|PRIVATE KEY", re.IGNORECASE)
PIN = re.compile(r"==\d[\w.+]*")
DEBIAN = re.compile(r"\d[\w.+~:-]*-\d[\w.+~]*")  # upstream's version and Debian's revision


def constraints() -> dict[str, str]:
    """The version of each Python package that an image gets."""
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def requirements(section: str, key: str) -> list[Requirement]:
    """Requirements as setup.cfg has them."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return [Requirement(line) for line in setup[section][key].strip().splitlines()]


def test_there_is_one_for_each_kind_of_device() -> None:
    assert list(BY_NAME) == ["cpu", "cuda", "rocm"]


@EVERY
def test_each_makes_one_stage_with_compilers_and_one_without(text: str) -> None:
    build, run = read(text)
    assert (build.name, run.name) == ("build", "run")
    assert {copy.stage for copy in run.copies} == {None, "build"}  # so no stage is made in vain
    assert all(run.script(name).strip() for name in ("post", "environment", "runscript", "test", "labels", "help"))


@EVERY
def test_every_variable_has_a_value_in_its_own_stage_and_every_value_is_used(text: str) -> None:
    for part, stage in zip(parts(text), read(text), strict=True):
        assert variables(part) == set(stage.defaults)


@EVERY
def test_the_stages_agree_on_what_both_use(text: str) -> None:
    build, run = read(text)
    assert run.defaults.items() <= build.defaults.items()


@EVERY
@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_the_mpi_library_can_be_chosen_and_reaches_both_stages(text: str, mpi: str) -> None:
    build, run = read(text, {"MPI": mpi})
    assert all(f"MPI={mpi} " in stage.script("post") for stage in (build, run))
    assert run.labels["hpctrain.mpi"] == mpi


@EVERY
def test_every_pin_is_exact(text: str) -> None:
    build, _ = read(text)
    values = build.defaults
    assert re.fullmatch(r"12\.\d+-slim", values["DEBIAN"])
    assert all(DEBIAN.fullmatch(values[name]) for name in ("OPENMPI", "HDF5"))
    assert all(PIN.search(word) for word in values["PYTHON_EXTRA"].split())
    assert "latest" not in text and ":stable" not in text


@EVERY
def test_no_secret_stands_in_it(text: str) -> None:
    assert SECRET.search(text.replace("data.tokenizer=", "")) is None


@EVERY
def test_all_that_it_copies_is_in_the_checkout(text: str) -> None:
    sources = [copy.source for stage in read(text) for copy in stage.copies if copy.stage is None]
    assert sources and [source for source in sources if not (ROOT / source).exists()] == []


@EVERY
def test_what_one_stage_takes_from_the_other_is_made_there(text: str) -> None:
    install = (ROOT / "containers/install").read_text()
    taken = [copy for stage in read(text) for copy in stage.copies if copy.stage]
    assert taken and all(f"={copy.source}\n" in install and copy.source == copy.target for copy in taken)


def test_every_python_package_it_installs_by_name_is_pinned() -> None:
    lines = re.findall(r"^\s*(?:\[.*\|\| )?packages (.*)$", (ROOT / "containers/install").read_text(), re.MULTILINE)
    words = [word for line in lines for word in re.sub(r"--(index-url|prefix) \S+", "", line).split()]
    named = {word for word in words if re.fullmatch(r"[a-z][\w-]*", word)}
    assert {"torch", "mpi4py", "mpich", "h5py", "numpy"} <= named <= set(constraints())


def test_the_pins_are_in_the_ranges_of_the_project() -> None:
    pins = constraints()
    wanted = requirements("options", "install_requires")
    assert [str(one) for one in wanted if Version(pins[one.name.lower()]) not in one.specifier] == []


def test_what_setup_calls_the_extra_for_gpus_is_in_the_image_for_nvidias() -> None:
    name, version = read(BY_NAME["cuda"])[0].defaults["PYTHON_EXTRA"].split("==")
    (wanted,) = requirements("options.extras_require", "gpu")
    assert name == wanted.name and Version(version) in wanted.specifier


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_an_image_for_gpus_is_made_as_the_one_for_processors_is(name: str) -> None:
    """So that a test that makes the one tries nearly all of the others: torch comes from another index."""
    assert [_recipe(stage) for stage in read(BY_NAME[name], {"TORCH_INDEX": "", "PYTHON_EXTRA": ""})] == [
        _recipe(stage) for stage in read(BY_NAME["cpu"], {"TORCH_INDEX": "", "PYTHON_EXTRA": ""})
    ]


def _recipe(stage: Stage) -> tuple[object, ...]:
    return stage.header, stage.copies, *(stage.script(name) for name in ("post", "environment", "runscript", "test"))


# ---- the reader itself


def test_a_line_of_a_comment_is_not_filled_in() -> None:
    (stage,) = read("Bootstrap: docker\nFrom: a:{{ V }}\n%arguments\n  V=1\n%post\n  # {{ W }}\n  echo {{V}}\n")
    assert stage.header["from"] == "a:1" and stage.script("post") == "  # {{ W }}\n  echo 1\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("%post\n  true\n", "begins with Bootstrap"),
        ("Bootstrap: docker\nFrom: a\n%posts\n  true\n", "no section %posts"),
        ("Bootstrap: docker\nFrom: a\n%post\n  echo {{ V }}\n", "V has no value"),
        ("Bootstrap: docker\nFrom a\n", "the header has the line"),
    ],
)
def test_what_is_no_definition_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(text)
