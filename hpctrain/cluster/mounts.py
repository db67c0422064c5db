"""The file systems that a process sees, read from the text of ``/proc/self/mountinfo``."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Mounted:
    """One line of mountinfo: the folder ``root`` of the file system on ``device`` is seen at ``point``."""

    device: str
    root: str
    point: str
    kind: str

    def behind(self, path: str) -> str:
        """Where an absolute path under ``point`` lies in the file system itself."""
        rest = path.removeprefix(self.point.rstrip("/"))
        return self.root.rstrip("/") + rest


def mounts(mountinfo: str) -> list[Mounted]:
    """All mounts, in the order in which they were made."""
    return [_mounted(line) for line in mountinfo.splitlines() if line]


def holder(path: str, mountinfo: str) -> Mounted:
    """The mount that an absolute path lies on: the innermost above it, and of two on one point the later one."""
    best = Mounted("", "/", "/", "unknown")
    for mounted in mounts(mountinfo):
        inside = path == mounted.point or path.startswith(mounted.point.rstrip("/") + "/")
        if inside and len(mounted.point) >= len(best.point):
            best = mounted
    return best


def _mounted(line: str) -> Mounted:
    before, _, after = line.partition(" - ")
    device, root, point = before.split()[2:5]
    return Mounted(device, _unescaped(root), _unescaped(point), after.split()[0])


def _unescaped(text: str) -> str:
    """Blanks and the like stand in mountinfo as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
