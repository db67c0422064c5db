"""Fifty kills in mid-save, at any moment, of any rank: the newest checkpoint is whole, and what is left aside goes."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.checkpoint import keep
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.verify import verify
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.lives import LAYOUTS, Life, Lives
from tests.support.saving import SAVES

ALONE = Mesh((("dp", 1),))
RANKS, KILLS = 3, 50
VICTIMS = ((0,), (1,), (2,), tuple(range(RANKS)))


@pytest.fixture
def lives() -> Iterator[Lives]:
    started = Lives()
    yield started
    started.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("save", SAVES)
def test_after_fifty_kills_the_newest_is_whole_and_nothing_is_left_aside(lives: Lives, tmp_path: Path, save: str):
    folder, moments = tmp_path / "checkpoints", random.Random(save)
    saved, torn = 0, 0
    for number in range(KILLS):
        part = (number // len(VICTIMS) + moments.random()) * len(VICTIMS) / KILLS % 1  # every part has its turn
        lines = str(tmp_path / f"told.{number}")
        told = lived(lives, Life(str(folder), lines, save, RANKS, VICTIMS[number % len(VICTIMS)], part))
        assert told["resumed"] in (saved, saved + 1), number  # its name may have come before the kill, and the line not
        torn += len(aside(folder))
        path, index = keep.newest(folder, keep.listing(folder))
        assert index.step in (told["saved"], told["saved"] + 1) and told["saved"] > told["resumed"]
        assert verify(path, index, SoloGroup()) == []
        saved = told["saved"]
    assert torn > KILLS / 5  # most of them came while a file was written
    point = Checkpoint(CheckpointConfig(keep=2, sync=False), folder, ALONE, SoloGroup())
    state = states.blank(LAYOUTS, ALONE, 0)
    newest = point.resume(state)
    assert newest in (saved, saved + 1) and states.wrong(state, ALONE, 0, newest) == []
    assert aside(folder) == []
    point.save(newest + 1, state, {})
    assert sorted(os.listdir(folder)) == ["latest", keep.file_name(newest), keep.file_name(newest + 1)]


def lived(lives: Lives, life: Life) -> dict[str, int]:
    """Let ranks come to their end, and give the last step of each word that they told."""
    folder = Path(life.folder)
    before = aside(folder)
    assert lives.live(life) == -signal.SIGKILL, life
    assert not set(before) & set(aside(folder))
    whole = [name for name in keep.listing(folder) if keep.STEP_FILE.fullmatch(name)]
    assert len(whole) <= 3  # two, and one more where the kill came between a new one and the last of the old
    return {word: int(step) for word, step in map(str.split, Path(life.told).read_text().splitlines())}


def aside(folder: Path) -> list[str]:
    """The files under names of their own that are in the folder."""
    return [name for name in keep.listing(folder) if name.endswith(".part")]
