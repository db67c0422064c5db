"""``hpctrain ckpt`` on several ranks says what it says on one, once."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.ckpt import app
from tests.support.jobs import Launch
from tests.support.weights import model_of, saved

COMMANDS = {
    "inspect": ["inspect", "RUN"],
    "inspect --stats": ["inspect", "RUN", "--stats", "--tensor", "model/*", "--json"],
    "verify": ["verify", "RUN"],
    "diff": ["diff", "RUN", "RUN"],
    "convert": ["convert", "RUN", "OUT.h5"],
    "export": ["export", "RUN", "OUT"],
    "import": ["import", "HF", "OUT.h5", "--sequence", "8"],
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved(tmp_path / "run", model_of(family="qwen3", head_dim=10), step=5)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_several_ranks_print_what_one_prints(launch: Launch, run: Path, words: list[str]):
    def filled(out: Path) -> list[str]:
        places = {"RUN": run.parent, "HF": run.parents[1] / "hf", "OUT": out, "OUT.h5": f"{out}.h5"}
        return [str(places.get(word, word)) for word in words]

    one, several = run.parents[1] / "one", run.parents[1] / "several"
    if "HF" in words:
        CliRunner().invoke(app, ["export", str(run), str(run.parents[1] / "hf")], catch_exceptions=False)
    alone = CliRunner().invoke(app, filled(one), catch_exceptions=False)
    done = launch(2, "python", "-m", "hpctrain", "ckpt", *filled(several))
    assert (alone.exit_code, done.returncode) == (0, 0), done.stderr
    assert alone.stdout and done.stdout.replace(str(several), str(one)) == alone.stdout


def test_a_mistake_is_told_once(launch: Launch, run: Path):
    done = launch(2, "python", "-m", "hpctrain", "ckpt", "inspect", run, "--tensor", "none")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.count("hpctrain: ") == 1, done.stderr
