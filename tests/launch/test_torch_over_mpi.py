"""The script of docs/how-to/torch-over-mpi.md, as a user starts it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/torch-over-mpi.md"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The page's script as a file."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    path = tmp_path / "script.py"
    path.write_text(code)
    return path


def losses(text: str, ranks: int) -> list[float]:
    return [float(loss) for loss in re.findall(rf"step \d of {ranks} ranks: loss ([\d.]+)", text)]


@pytest.mark.parametrize("mpi", ["main", "mpich"])
def test_a_script_of_torch_trains_over_mpi(launch, script: Path, mpi: str) -> None:
    done = launch(2, "python", "-m", "mpi4py", script, mpi=mpi)
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout, 2)
    assert len(found) == 5 and found[-1] < found[0]


def test_the_script_alone_is_a_job_of_one_rank(launch, script: Path) -> None:
    done = launch(0, "python", script)
    assert done.returncode == 0, done.stderr
    assert len(losses(done.stdout, 1)) == 5


def test_a_launcher_of_torch_is_refused_in_words(launch, script: Path) -> None:
    done = launch(0, "python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script)
    assert done.returncode == 1
    assert re.search(r"torch says rank [01] of 2, MPI says 0 of 1", done.stderr)
    assert "start with mpirun or srun, not torchrun" in done.stderr
