"""HDF5, loaded so that no file is locked unless its opening asks for it.

The variable HDF5_USE_FILE_LOCKING wins over what each opening asks for. HDF5 reads it once, when it is loaded or, in
release 1.10, when it opens its first file; so it is kept out of sight until then.
"""

from __future__ import annotations

import os

VARIABLE = "HDF5_USE_FILE_LOCKING"
OFF = ("FALSE", "0")

_said = os.environ.get(VARIABLE, OFF[0])
if _said not in OFF:
    del os.environ[VARIABLE]

import h5py  # noqa: E402
from h5py import h5a, h5d, h5f, h5g, h5o, h5p, h5s, h5t  # noqa: E402

if _said not in OFF:
    h5py.File("in memory", "w", driver="core", backing_store=False).close()
    os.environ[VARIABLE] = _said  # for what this process starts

__all__ = ["h5a", "h5d", "h5f", "h5g", "h5o", "h5p", "h5py", "h5s", "h5t"]
