"""What one node measures of itself before a run: its devices, its memory, and the disks that it writes to.

``python -m hpctrain.cluster.checks ASKED`` makes all checks and prints a line of JSON after each, so that a check that
fails, or never ends, is known by its name. Lines are short: srun cuts those of more than 1,000 bytes, and mixes the
pieces. Every figure is the best of several tries, as others may use the node meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpctrain
from hpctrain.cluster.cores import usable_cores
from hpctrain.cluster.devices import visible_devices
from hpctrain.cluster.probe import memory_limit
from hpctrain.errors import EXIT_FAILED

if TYPE_CHECKING:
    import torch

MIB = 2**20
COPIED_BYTES = 128 * MIB
FILE_BYTES = 8 * MIB
TRIES = 3
PRODUCT_SECONDS = 0.3
# A side of the matrices: large enough to keep all of a device busy.
PRODUCT_SIDE = {"cpu": 1024}
PRODUCT_SIDE_OF_DEVICE = 8192
ERROR_LETTERS = 300


@dataclass(frozen=True)
class Asked:
    """What a node is to check."""

    shared: str | None
    """A folder that another node has just made where the run's folder is; None leaves that check out."""
    near: str | None
    """``checkpoint.near`` as the configuration has it, or None."""
    dtype: str
    """The format of matrix products, by torch's name."""
    seconds: float
    """How long all checks together may take."""

    def to_text(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))


def examine(asked: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    """Make all checks; gives the name of each with its figures, or with ``error``. Imports torch."""
    for name, check in CHECKS.items():
        try:
            yield name, check(asked)
        except Exception as error:  # whatever it is, it is this node's answer
            yield name, {"error": f"{type(error).__name__}: {error}"[:ERROR_LETTERS]}


def tell(check: str, **value: Any) -> None:
    """Print a line of what this node found."""
    print(json.dumps({"node": node_name(), "check": check, **value}), flush=True)


def node_name() -> str:
    """This node as Slurm calls it, or as it calls itself."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def end_after(seconds: float, last: Callable[[], None] = lambda: None) -> threading.Timer:
    """End this process after so long, whatever it waits for; ``last`` is called before. Cancel it to live on."""

    def end() -> None:
        last()
        os._exit(EXIT_FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


# ---- the checks


def versions(asked: Asked) -> dict[str, Any]:
    """What must be the same on all nodes, or they would compute different things."""
    import torch

    return {"python": platform.python_version(), "torch": torch.__version__, "hpctrain": hpctrain.__version__,
            "mpi4py": version("mpi4py")}  # fmt: skip


def devices(asked: Asked) -> dict[str, Any]:
    """The accelerators that torch sees, and how much of their memory is free."""
    found = visible_devices()
    told = {"kind": found.kind, "count": len(found.ids)}
    if not found.ids:
        return told
    import torch

    layer = getattr(torch, found.kind)
    host = torch.zeros(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    return told | {
        "free_bytes": [layer.mem_get_info(index)[0] for index in range(len(found.ids))],
        "bytes_per_second": [_copied(host, device) for device in _devices()],
    }


def memory(asked: Asked) -> dict[str, Any]:
    """The host's memory: how much is free, and the bytes that are read and written in a copy."""
    import psutil

    torch = _with_all_cores()
    host = torch.zeros(COPIED_BYTES, dtype=torch.uint8)
    free = min(psutil.virtual_memory().available, memory_limit()[0])
    return {"free_bytes": free, "bytes_per_second": 2 * _copied(host, torch.device("cpu"))}


def products(asked: Asked) -> dict[str, Any]:
    """FLOP/s of square matrix products, of each device; of all usable cores together where there is none."""
    torch = _with_all_cores()
    return {"flops": [_flops(device, getattr(torch, asked.dtype)) for device in _devices()]}


def shared(asked: Asked) -> dict[str, Any]:
    """The run's folder: whether this node sees what another has made there, and can write, sync and read back."""
    return _disk(Path(asked.shared)) if asked.shared else {}


def near(asked: Asked) -> dict[str, Any]:
    """The node's own disk, likewise."""
    if asked.near is None:
        return {}
    folder = os.path.expandvars(asked.near.replace("{host}", socket.gethostname()))
    if "$" in folder:
        raise OSError(f"checkpoint.near = {asked.near}: a variable in it is not set here")
    Path(folder).mkdir(parents=True, exist_ok=True)
    return _disk(Path(folder))


# The quick ones first, and those last that hang where a file system does.
CHECKS: dict[str, Callable[[Asked], dict[str, Any]]] = {
    "versions": versions,
    "devices": devices,
    "memory": memory,
    "products": products,
    "near": near,
    "shared": shared,
}


def _with_all_cores() -> Any:
    """torch, on all cores that this process may use: it is alone on the node."""
    import torch

    torch.set_num_threads(max(1, len(usable_cores())))
    return torch


def _devices() -> list[torch.device]:
    import torch

    found = visible_devices()
    return [torch.device(found.kind, index) for index in range(len(found.ids))] or [torch.device("cpu")]


def _copied(host: torch.Tensor, device: torch.device) -> float:
    """Bytes/s from the host's memory to that of a device."""
    import torch

    there = torch.zeros_like(host, device=device)
    return host.nbytes / _best(lambda: there.copy_(host, non_blocking=True), device)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    side = PRODUCT_SIDE.get(device.type, PRODUCT_SIDE_OF_DEVICE)
    a, b = (torch.ones(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    seconds = _best(lambda: torch.mm(a, b, out=out), device, PRODUCT_SECONDS)
    if out[0, 0].item() != side:  # a sum of so many ones, exact in every format here
        raise ArithmeticError(f"{device} made {out[0, 0].item()} of a product whose elements are {side}")
    return 2 * side**3 / seconds


def _best(work: Callable[[], object], device: torch.device, seconds: float = 0.0) -> float:
    """The shortest time of a work on a device, in at least TRIES tries and about ``seconds``."""
    import torch

    layer, taken, until = torch.get_device_module(device), [], time.perf_counter() + seconds
    layer.synchronize(device)
    while len(taken) < TRIES or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        layer.synchronize(device)
        taken.append(time.perf_counter() - began)
    return min(taken)


def _disk(folder: Path) -> dict[str, Any]:
    """Write a file, sync it, read it back from the disk and compare; bytes/s of both, at their best."""
    content = os.urandom(FILE_BYTES)
    tries = [_written_and_read(folder, content) for _ in range(TRIES)]
    best_write, best_read = (min(column) for column in zip(*tries, strict=True))
    return {"write_bytes_per_second": FILE_BYTES / best_write, "read_bytes_per_second": FILE_BYTES / best_read}


def _written_and_read(folder: Path, content: bytes) -> tuple[float, float]:
    """The seconds of each; the file goes."""
    with ExitStack() as stack:
        file, path = tempfile.mkstemp(prefix=f"check-{node_name()}-", dir=folder)
        stack.callback(os.unlink, path)
        stack.callback(os.close, file)
        began = time.perf_counter()
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        os.fsync(file)
        written = time.perf_counter()
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # so that the disk is read, and not the node's memory
        found = os.pread(file, FILE_BYTES + 1, 0)
        read = time.perf_counter()
    if hashlib.blake2b(found).digest() != hashlib.blake2b(content).digest():
        raise OSError(f"{folder} gives back other bytes than were written")
    return written - began, read - written


def main(text: str) -> None:
    """Tell of every check, a line each, the first before anything that could hang."""
    asked = Asked(**json.loads(text))
    end_after(asked.seconds)
    tell("here")
    for name, value in examine(asked):
        tell(name, **value)
    tell("done")


if __name__ == "__main__":
    main(sys.argv[1])
