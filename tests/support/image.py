"""Images made from definition files without Apptainer: each section is carried out as Apptainer carries it out.

The base is bootstrapped by debootstrap instead of pulled from a registry; ``%post`` runs in it as root, in namespaces
of its own; and the result is a SIF file, with the definition and the file system in it. What only Apptainer itself
could show is whether it takes that file.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tests.support.definition import Copy, Stage, read
from tests.support.jobs import ROOT

ENTER = Path(__file__).with_name("enter_image")
TOOLS = ("debootstrap", "mksquashfs", "siftool", "unshare", "setpriv", "chroot")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RELEASES = {"debian:12": "bookworm"}  # base images whose like debootstrap makes
ARCHITECTURES = {"x86_64": "2", "aarch64": "4"}  # as SIF numbers them
MACHINE = "/.machine"  # in the image while it is built: how this machine reaches package indexes
STEP_SECONDS = 1500
# Where Apptainer keeps a section for the time when the image runs, and the first line of it.
SCRIPTS = {
    "environment": (".singularity.d/env/90-environment.sh", "#!/bin/sh\n"),
    "runscript": (".singularity.d/runscript", "#!/bin/sh\n"),
    "test": (".singularity.d/test", "#!/bin/sh\n"),
    "help": (".singularity.d/runscript.help", ""),
}


@dataclass(frozen=True)
class Image:
    """A SIF file, and where the file system begins in it."""

    path: Path
    offset: int

    def command(self, *argv: object, options: Sequence[str] = ()) -> list[str]:
        """What runs a command in this image, as ``apptainer exec`` does."""
        return [*map(str, (ENTER, *options, self.path, self.offset, *argv))]

    def run(self, *argv: object, folder: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command in this image, alone, to its end."""
        return subprocess.run(
            self.command(*argv), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout,
            check=False,
        )  # fmt: skip


def missing() -> str:
    """Why no image can be made on this machine, or nothing."""
    if os.geteuid() != 0:
        return "needs root: images are made and entered with mounts"
    tools = [tool for tool in TOOLS if not shutil.which(tool, path=f"{os.environ['PATH']}:{SYSTEM_PATH}")]
    return f"{', '.join(tools)} missing: make test-containers installs them" if tools else ""


def cache_folder() -> Path:
    """Where bases and downloads are kept between runs: HPCTRAIN_IMAGE_CACHE, else with the user's other caches."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpctrain/images"
    folder = Path(os.environ.get("HPCTRAIN_IMAGE_CACHE") or own)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def build(definition: Path, arguments: Mapping[str, str], folder: Path, downloads: Path) -> Image:
    """Make the image of a definition in a folder that is empty, as ``apptainer build`` does in the checkout.

    ``downloads`` becomes pip's cache: one that no other definition and no other arguments share, since what pip builds
    depends on more than its name.
    """
    text = definition.read_text()
    roots: dict[str | None, Path] = {None: ROOT}
    for stage in read(text, arguments):
        root = roots[stage.name] = folder / stage.name
        bootstrap(stage, root)
        for copy in stage.copies:
            take(copy, roots[copy.stage], root)
        post(stage, root, downloads)
    describe(stage, text, root)
    return pack(root, definition, folder / f"{definition.stem}.sif")


# ---- a root file system


def bootstrap(stage: Stage, root: Path) -> None:
    """Fill a folder with the base that the header names."""
    name = stage.header["from"].removeprefix("docker.io/library/")
    release = next((release for prefix, release in RELEASES.items() if name.startswith(prefix)), None)
    assert stage.header["bootstrap"] == "docker" and release, f"no base like {stage.header}"
    kept = cache_folder() / f"{release}.tar"
    if not kept.exists():
        _debootstrap(release, kept)
    root.mkdir()
    with tarfile.open(kept) as tar:
        tar.extractall(root, filter="fully_trusted", numeric_owner=True)  # a root file system, with devices


def _debootstrap(release: str, kept: Path) -> None:
    """Bootstrap once and keep it as one file, which is there whole or not at all."""
    root, part = kept.with_suffix(f".{os.getpid()}"), kept.with_suffix(f".part.{os.getpid()}")
    try:
        _done(["debootstrap", "--variant=minbase", release, root, "http://deb.debian.org/debian"])
        _done(["tar", "--numeric-owner", "-C", root, "-cf", part, "."])
        part.rename(kept)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        part.unlink(missing_ok=True)


def take(copy: Copy, source: Path, root: Path) -> None:
    """Carry out one line of ``%files``. Links are followed from the host and kept from a stage."""
    found, target = source / copy.source.lstrip("/"), root / copy.target.lstrip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    _done(["cp", "-r", *(["-L"] if copy.stage is None else ["-a"]), "-T", found, target])


def post(stage: Stage, root: Path, downloads: Path) -> None:
    """Run ``%post`` in the root, each line told and an error the end, as Apptainer does.

    Nothing of the machine stays in the root: what it needs to reach package indexes is mounted over it meanwhile.
    """
    (root / "etc/resolv.conf").write_bytes(Path("/etc/resolv.conf").read_bytes())
    machine = downloads / "machine"
    binds = {**_indexes(machine), downloads: "/root/.cache/pip", machine: MACHINE}
    environment = {"PATH": SYSTEM_PATH, "HOME": "/root", "PIP_CONFIG_FILE": f"{MACHINE}/pip.conf"}
    said = downloads / f"{root.name}.log"
    with said.open("wb") as out:
        _in_root(root, ["/bin/sh", "-ex", "-c", stage.script("post")], environment, binds, out)
    for place in [*binds.values(), "/root/.cache"]:
        _remove_empty(root, root / place.lstrip("/"))


def _in_root(root: Path, command: list[str], environment: Mapping[str, str], binds: Mapping[Path, str], out) -> None:
    """Run a command in a root file system, in mount and PID namespaces that end with it, and with this process."""
    mounts = [("/dev", "/dev"), *((str(source), target) for source, target in binds.items())]
    lines = [f'mkdir -p "$0{target}"; mount --rbind "{source}" "$0{target}"' for source, target in mounts]
    script = "\n".join(['mount -t proc proc "$0/proc"', *lines, 'exec chroot "$0" "$@"'])
    start = "setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child --propagation private sh -ec".split()
    done = subprocess.run(
        [*start, script, str(root), *command], env=dict(environment), stdin=subprocess.DEVNULL, stdout=out,
        stderr=subprocess.STDOUT, timeout=STEP_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{Path(out.name).read_text(errors='replace')[-6000:]}"


def _remove_empty(root: Path, folder: Path) -> None:
    while folder != root and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


# ---- how this machine reaches package indexes


@functools.cache
def _pip_settings() -> dict[str, str]:
    """pip's settings on this machine by their last word, wherever they stand."""
    said = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    return {key: value for key, value in re.findall(r"^\S*\.(\S+?)='(.*)'$", said.stdout, re.MULTILINE)}


def _indexes(machine: Path) -> dict[Path, str]:
    """Write pip's settings for a build into a folder; gives the local folders of packages that they name."""
    machine.mkdir(exist_ok=True)
    settings = {name: _pip_settings().get(name) for name in ("index-url", "extra-index-url", "find-links")}
    if certificates := os.environ.get("SSL_CERT_FILE") or _pip_settings().get("cert"):
        shutil.copy(certificates, machine / "certificates")
        settings["cert"] = f"{MACHINE}/certificates"
    lines = [f"{name} = {value}\n" for name, value in settings.items() if value]
    (machine / "pip.conf").write_text("[global]\n" + "".join(lines))
    places = [Path(urlsplit(place).path) for value in settings.values() for place in (value or "").split()]
    return {_whole(place): str(_whole(place)) for place in places if place.is_dir()}


def _whole(place: Path) -> Path:
    """The folder to mount for a package index: its pages lead to files beside it."""
    return place.parent if place.name == "simple" else place


@functools.cache
def torch_index() -> str | None:
    """What to give as ``TORCH_INDEX``: the machine's own index, where its torch is a build without CUDA; else None."""
    if os.environ.get("TORCH_INDEX"):
        return os.environ["TORCH_INDEX"]
    ask = "install --quiet --dry-run --ignore-installed --report - torch --constraint".split()
    command = [sys.executable, "-m", "pip", *ask, str(ROOT / ".ci/constraints.txt")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if said.returncode or '"name": "nvidia-' in said.stdout:
        return None
    return _pip_settings().get("index-url") or "https://pypi.org/simple"


# ---- a SIF file


def describe(stage: Stage, definition: str, root: Path) -> None:
    """Write what Apptainer keeps in an image: its scripts, its labels and its definition."""
    for name, (place, first) in SCRIPTS.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(first + stage.script(name))
        path.chmod(0o755)
    (root / ".singularity.d/labels.json").write_text(json.dumps(stage.labels))
    (root / ".singularity.d/Singularity").write_text(definition)


def pack(root: Path, definition: Path, sif: Path) -> Image:
    """Make a SIF of a root file system and its definition."""
    squash = sif.with_suffix(".squashfs")
    _done(["mksquashfs", root, squash, "-comp", "zstd", "-Xcompression-level", "1", "-quiet", "-no-progress"])
    _done(["siftool", "new", sif])
    _done(["siftool", "add", "--datatype", "1", sif, definition])
    kind = ["--datatype", "4", "--parttype", "2", "--partfs", "1", "--partarch", ARCHITECTURES[platform.machine()]]
    _done(["siftool", "add", *kind, "--groupid", "1", sif, squash])
    squash.unlink()
    offset = re.search(r"Offset:\s*(\d+)", _done(["siftool", "info", "2", sif]))
    return Image(sif, int(offset[1]))


def listed(image: Image) -> str:
    """What a SIF has in it, as siftool lists it."""
    return _done(["siftool", "list", image.path])


def dumped(image: Image, number: int) -> bytes:
    """One object of a SIF, as it stands in it."""
    return subprocess.run(["siftool", "dump", str(number), image.path], capture_output=True, check=True).stdout


def _done(command: Sequence[object]) -> str:
    env = {**os.environ, "PATH": f"{os.environ['PATH']}:{SYSTEM_PATH}"}
    done = subprocess.run(
        [*map(str, command)], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=STEP_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout
