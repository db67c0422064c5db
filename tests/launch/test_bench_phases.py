"""Every phase of a start is timed, for each number of ranks."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.jobs import ROOT, Launch


def test_the_phases_of_a_start_are_told_for_each_number_of_ranks(launch: Launch, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("ranks meet, tokens flow, a loss comes down\n" * 999)
    config = tmp_path / "small.toml"
    config.write_text(f"""
        model = {{layers = 1, width = 32, sequence = 32}}
        data = {{text = ["{text}"]}}
        train = {{batch = 4, microbatch = 2}}
    """)
    launcher = f"{ROOT}/.ci/mpirun {{ranks}}"
    done = launch(0, "hpctrain", "bench", "phases", config, "--ranks", "1,2", "--turns", "1", "--launcher", launcher,
                  "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["ranks"], row["of"]) for row in rows] == [(n, of) for n in (1, 2) for of in ("wall", "processor")]
    phases = set(rows[0]) - {"ranks", "of"}
    assert all(row[phase] >= 0 for row in rows for phase in phases)
    assert all(row[phase] > 0 for row in rows for phase in ("python", "torch", "model", "step"))


def test_what_is_no_number_of_ranks_is_told(launch: Launch) -> None:
    done = launch(0, "hpctrain", "bench", "phases", ROOT / "configs/tiny.toml", "--ranks", "2,x")
    assert done.returncode == 2
    assert "--ranks 2,x: not numbers of ranks" in done.stderr
