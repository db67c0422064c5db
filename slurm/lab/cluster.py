"""A Slurm cluster on one machine: each node is a slurmd in namespaces of its own, in one folder that goes with it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from string import Template

from install import PATH, Unavailable

HERE = Path(__file__).resolve().parent
MARK = "lab.json"  # a folder without it is no lab, and is never removed
LOGIN = "login"
LOGIN_ADDRESS = "127.0.1.254"
NAMESPACES = ("--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")
# Slurm and munge put sockets under the folder, and the name of a socket has 107 characters at most.
LONGEST_FOLDER = 70
START_SECONDS = 20
STOP_SECONDS = 10
CLIENTS = ("srun", "salloc", "sbatch")


@dataclass(frozen=True)
class Size:
    """What the cluster claims to have."""

    nodes: int = 4
    cpus: int = 16
    """Processors of a node; they need not exist."""
    gpus: int = 4
    """GPUs of a node: devices that do nothing."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))

    @property
    def addresses(self) -> dict[str, str]:
        """Each machine's own loopback address. Linux answers on all of 127.0.0.0/8."""
        return {name: f"127.0.1.{number}" for number, name in enumerate(self.names, 1)} | {LOGIN: LOGIN_ADDRESS}


class LabError(Exception):
    """The cluster did not come up, or the folder is not one that it can use."""


def start(folder: Path, size: Size) -> None:
    """Bring the cluster up in ``folder``, which is empty; returns when every node is idle."""
    folder.chmod(0o700)
    (folder / MARK).write_text(json.dumps(asdict(size)))
    try:
        _check(folder)
        furnish(folder, size)
        _machine(folder, "munge", *_munged(folder))
        _wait(folder, "munged opens its socket", (folder / "run/munge.socket").is_socket)
        _machine(folder, LOGIN, "slurmctld", "-D")
        for name in size.names:
            _machine(folder, name, "slurmd", "-D", "-N", name)
        _wait(folder, f"all {size.nodes} nodes are idle", lambda: states(folder) == [f"idle {size.nodes}"])
    except BaseException:
        stop(folder)
        raise


def stop(folder: Path) -> None:
    """End every process of the cluster and of its jobs, and remove its folder."""
    if not (folder / MARK).exists():
        raise LabError(f"{folder} holds no lab")
    for number in _clients(folder):
        _kill(number)
    if not _until(lambda: _end_machines(folder), STOP_SECONDS):
        raise LabError(f"{folder}: processes {_machines(folder)} did not end in {STOP_SECONDS} s")
    shutil.rmtree(folder)


def exports(folder: Path) -> str:
    """Shell lines after which Slurm's commands speak to this cluster."""
    here = os.environ.get("PATH", "").split(":")
    more = "".join(f":{place}" for place in ("/usr/bin", "/usr/sbin") if place not in here)
    return f"export SLURM_CONF='{folder}/slurm.conf'\n" + (f'export PATH="$PATH{more}"\n' if more else "")


def states(folder: Path) -> list[str]:
    """What sinfo says of the nodes, such as ``idle 4``. Its filter by state will not do: it takes unknown for idle."""
    done = subprocess.run(
        ["sinfo", "-h", "-o", "%T %D"],
        env=_environment(folder), capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip
    return done.stdout.split("\n")[:-1]


# ---- the folder


def furnish(folder: Path, size: Size) -> None:
    """Write all that the daemons read, and make the devices."""
    own = (f"{place}/{name}" for place in ("spool", "tmp") for name in size.names)
    for place in ("run", "log", "state", "dev", *own):
        (folder / place).mkdir(parents=True)
    (folder / "munge.key").touch(0o600)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "hosts").write_text(hosts(size))
    _devices(folder, size.gpus)
    control, *ports = free_ports(size.nodes + 1)
    head = Template((HERE / "slurm.conf").read_text()).substitute(folder=folder, control_port=control)
    (folder / "slurm.conf").write_text(head + "".join(f"{line}\n" for line in node_lines(size, ports)))
    (folder / "topology.conf").write_text(topology(size))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/gpu[0-{size.gpus - 1}]\n" if size.gpus else "")


def node_lines(size: Size, ports: list[int]) -> list[str]:
    """The nodes as slurm.conf has them. Each has a port of its own: with one for all, the first slurmd answers for
    every node, all look idle, and every step fails as a replayed credential."""
    gres = f"Gres=gpu:{size.gpus} " if size.gpus else ""
    return [
        f"NodeName={name} NodeHostname={name} NodeAddr={size.addresses[name]} Port={port} CPUs={size.cpus} "
        f"RealMemory=4000 {gres}State=UNKNOWN"
        for name, port in zip(size.names, ports, strict=True)
    ]


def topology(size: Size) -> str:
    """Two levels of switches: pairs of nodes on a leaf, all leaves on the spine."""
    leaves = [size.names[first : first + 2] for first in range(0, size.nodes, 2)]
    lines = [f"SwitchName=leaf{number} Nodes={','.join(names)}\n" for number, names in enumerate(leaves, 1)]
    return "".join(lines) + f"SwitchName=spine Switches=leaf[1-{len(leaves)}]\n"


def hosts(size: Size) -> str:
    """The host's own /etc/hosts with the lab's machines behind it."""
    own = Path("/etc/hosts")
    lab = "".join(f"{address} {name}\n" for name, address in size.addresses.items())
    return (own.read_text().rstrip("\n") + "\n" if own.exists() else "127.0.0.1 localhost\n") + lab


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, below those that Linux hands out to clients by itself."""
    first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = random.sample(range(10_000, max(first_handed_out, 20_000)), 50 * count)
    return [port for port, _ in zip((p for p in candidates if _free(p)), range(count), strict=False)]


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _check(folder: Path) -> None:
    if len(str(folder)) > LONGEST_FOLDER:
        raise LabError(f"{folder}: the path of the lab's folder may have {LONGEST_FOLDER} characters")
    trial = ["unshare", *NAMESPACES, "mount", "-t", "proc", "proc", "/proc"]
    done = subprocess.run(trial, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode:
        raise Unavailable(f"no namespaces can be made here (a container without SYS_ADMIN?): {done.stderr.strip()}")


def _devices(folder: Path, count: int) -> None:
    """Null devices as GPUs: Slurm counts a node's GPUs by their files and takes nothing but character devices."""
    try:
        for number in range(count):
            device = folder / f"dev/gpu{number}"
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            device.chmod(0o666)
    except PermissionError as error:
        raise Unavailable(f"no devices can be made here (a container without MKNOD?): {error}") from error


# ---- the processes


def _munged(folder: Path) -> list[str]:
    """Forced: it wants a socket that every user can reach, and this one is root's alone."""
    run = folder / "run"
    return [
        "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", f"--socket={run}/munge.socket",
        f"--pid-file={run}/munged.pid", f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/munge.seed",
    ]  # fmt: skip


def _machine(folder: Path, name: str, *program: str) -> None:
    """Start a program as the one of a machine of this name."""
    with (folder / f"log/{name}.out").open("wb") as out:
        subprocess.Popen(
            ["unshare", *NAMESPACES, str(HERE / "enter"), name, str(folder), *program],
            env=_environment(folder), cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of the caller's: jobs get the environment of the srun or sbatch that starts them."""
    return {"PATH": PATH, "HOME": os.environ.get("HOME", "/root"), "SLURM_CONF": str(folder / "slurm.conf")}


def _machines(folder: Path) -> list[int]:
    """The processes that are the machines of this lab: of each, ``unshare`` and the first one inside."""
    words = {str(HERE / "enter"), str(folder)}
    return [number for number in _processes() if words <= set(_read(number, "cmdline"))]


def _end_machines(folder: Path) -> bool:
    """Kill the first process of each machine, and with it the kernel ends the others; whether all have ended.

    ``unshare`` stays until the last of them is gone, so that its end is the machine's.
    """
    found = _machines(folder)
    for number in found:
        if _program(number) != "unshare":
            _kill(number)
    return not found


def _clients(folder: Path) -> list[int]:
    """Commands of Slurm outside the machines that speak to this cluster."""
    conf = f"SLURM_CONF={folder}/slurm.conf"
    return [number for number in _processes() if _program(number) in CLIENTS and conf in _read(number, "environ")]


def _processes() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _program(number: int) -> str:
    try:
        return Path(f"/proc/{number}/exe").readlink().name
    except OSError:
        return ""


def _read(number: int, name: str) -> list[str]:
    """The words of a process's command or environment; none when it has ended, also while nobody has collected it."""
    try:
        return Path(f"/proc/{number}/{name}").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _kill(number: int) -> None:
    try:
        os.kill(number, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _wait(folder: Path, what: str, done: Callable[[], bool]) -> None:
    if not _until(done, START_SECONDS):
        raise LabError(f"not within {START_SECONDS} s: {what}\n{said(folder)}")


def said(folder: Path) -> str:
    """The last lines of every log, and what sinfo shows."""
    logs = sorted(path for path in (folder / "log").iterdir() if path.stat().st_size)
    tails = [f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-8:]) for path in logs]
    return "\n".join([*tails, "--- sinfo", *states(folder)])


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Whether ``done`` became true within ``seconds``."""
    limit = time.monotonic() + seconds
    while not done():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True
