"""Peak: how much more memory some code takes than there was before it, told by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import re, sys
from pathlib import Path

def resident(which):
    return int(re.search(which + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

folder = Path(sys.argv[1])
{before}
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here; a child begins with its parent's
start = resident("VmRSS")
{code}
print(resident("VmHWM") - start)
"""


def peak(before: str, code: str, folder: Path) -> int:
    """Bytes that ``code`` had at most, in a process that ran ``before``; to both ``folder`` is known.

    What the code frees is given back to the system at once: what the allocator would keep depends on chance.
    """
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    words = [sys.executable, "-c", SCRIPT.format(before=before, code=code), str(folder)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=200, env=env)
    return int(done.stdout)
