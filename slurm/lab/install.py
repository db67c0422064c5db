"""Install Slurm with apt where it is missing, without starting the services that its packages bring."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

POLICY = Path("/usr/sbin/policy-rc.d")
# What must be there -> the package that brings it.
COMMANDS = {
    "munged": "munge",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "unshare": "util-linux",
    "hostname": "hostname",
}
# Slurm's PMIx plugin opens libpmix.so without a version, which only the package for developers has.
PMIX, PMIX_PLACES = "libpmix-dev", ("/usr/lib/*/libpmix.so", "/usr/lib/*/pmix2/lib/libpmix.so", "/usr/lib64/libpmix.so")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATH = f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}"  # a user's PATH may lack sbin, where the daemons are


class Unavailable(Exception):
    """The lab cannot be had on this machine."""


def install() -> None:
    """Make sure that all of Slurm that the lab needs is there. Raises Unavailable where it cannot be had."""
    packages = missing()
    if os.geteuid() != 0:
        raise Unavailable("needs root: each node gets namespaces and devices of its own")
    if not packages:
        return
    if not shutil.which("apt-get", path=SYSTEM_PATH):
        if packages == [PMIX]:  # a Slurm from elsewhere, which brings PMIx with it or does without
            return
        raise Unavailable(f"{', '.join(packages)} missing, and there is no apt-get to install them with")
    with no_services():
        # The lists of a fresh image are empty or old, those of a machine in use mostly serve: look first, then update.
        if _apt("install", *packages):
            _apt("update")
            if said := _apt("install", *packages):
                raise Unavailable(f"apt-get could not install {', '.join(packages)}\n{said}")


def missing() -> list[str]:
    """The packages whose commands or libraries are not here."""
    commands = [package for command, package in COMMANDS.items() if not shutil.which(command, path=PATH)]
    return commands + ([] if any(glob.glob(place) for place in PMIX_PLACES) else [PMIX])


@contextlib.contextmanager
def no_services() -> Iterator[None]:
    """Keep packages from starting their services meanwhile: Debian asks this script, and 101 forbids."""
    if POLICY.exists():  # a container's image mostly has one that forbids already; anyhow it is not ours to change
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _apt(*words: str) -> str:
    """What apt-get says when it fails; nothing when all went well."""
    env = {**os.environ, "PATH": SYSTEM_PATH, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(
        ["apt-get", "-qq", "-y", "--no-install-recommends", "-o", "DPkg::Lock::Timeout=300", *words],
        env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900,
        check=False,
    )  # fmt: skip
    return done.stdout[-2000:] or f"exit code {done.returncode}" if done.returncode else ""
