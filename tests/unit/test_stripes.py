"""Files that MPI-IO makes, so that they have the stripes that hints ask for."""

from __future__ import annotations

from pathlib import Path

import h5py
import pytest

from hpctrain.checkpoint import format, stripes
from hpctrain.errors import CheckpointError


@pytest.mark.parametrize("hints", [{}, {"cb_nodes": 2}])
def test_without_hints_for_stripes_no_file_is_made(hints: dict[str, int], tmp_path: Path) -> None:
    assert not stripes.make(tmp_path / "file.h5", hints)
    assert not [*tmp_path.iterdir()]


def test_a_file_with_stripes_is_filled_and_not_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "file.h5"
    assert stripes.make(path, {"striping_factor": 2, "striping_unit": "1048576", "cb_nodes": 1})
    made, size = path.stat().st_ino, path.stat().st_size
    format.lay_out(path, [format.Slot("model/a", (4,), "float32", 0)], 1, {}, "w")
    with h5py.File(path, locking=False) as file:
        assert file["model/a"].shape == (4,)
    assert (path.stat().st_ino, size) == (made, 0)


def test_a_file_that_mpi_io_cannot_make_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        stripes.make(tmp_path / "none/file.h5", {"striping_factor": 2})
    what, _, mend = str(caught.value).split("\n  ")
    assert what == f"{tmp_path}/none/file.h5 cannot be made with checkpoint.hints striping_factor = 2"
    assert mend == 'set them to what the file system takes, or writer to "auto"'
