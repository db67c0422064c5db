"""What a checkpoint of many thousand ranks takes beside its data does not grow with ranks times tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hpctrain.bench import scale
from hpctrain.bench.scale import Answers, Scene, run
from hpctrain.checkpoint import checksums, format, save
from hpctrain.checkpoint.state import Entry, agree
from hpctrain.cli.bench import app
from hpctrain.comm.group import Group
from hpctrain.config import Config, load, parse
from hpctrain.plan.layout import Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.plan import decide
from hpctrain.plan.topology import Topology
from tests.support import threads

ROOT = Path(__file__).parents[2]
MANY = 16_384


def config(**changes: Any) -> Config:
    """A model of two matrices a block that any number of ranks may share."""
    model = {"family": "llama", "layers": 16, "width": 64, "heads": 8, "mlp_width": 128, "vocabulary": 512}
    parallel = {"pp": 16, "tp": 8, "zero": 1}
    train = {"batch": 2048, "microbatch": 1}
    return parse({"model": model | changes, "parallel": parallel, "train": train})


def scene(ranks: int = MANY, **changes: Any) -> Scene:
    return Scene.of(decide(config(**changes), Topology(("node",) * ranks), 512))


def agreed(scene: Scene, rank: int) -> tuple[Entry, ...]:
    mesh = scene.plan.mesh
    return agree(scene.state(rank), mesh, Answers(mesh.ranks_total, rank, scene.told))


def counted(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[int]:
    """A list that gets an item with each call of a method."""
    calls: list[int] = []
    method = getattr(kind, name)

    def call(*words: Any, **knobs: Any) -> Any:
        calls.append(1)
        return method(*words, **knobs)

    monkeypatch.setattr(kind, name, call)
    return calls


def test_ranks_that_are_values_agree_on_what_ranks_that_meet_agree_on():
    """Four stages of two ranks: the exchange that is played is the one that takes place."""
    chosen = parse(config(layers=4).model_dump(), ("parallel.pp=4", "parallel.tp=1", "train.batch=8"))
    small = Scene.of(decide(chosen, Topology(("node",) * 8), 512))

    def meet(group: Group) -> tuple[Entry, ...]:
        return agree(small.state(group.rank), small.plan.mesh, group)

    for rank, entries in enumerate(threads.run(8, meet)):
        assert agreed(small, rank) == entries


@pytest.mark.parametrize("rank", [0, 8191, MANY - 1])
def test_all_ranks_of_a_stage_have_one_mesh_and_no_tensor_has_a_list_of_ranks(rank: int):
    entries = agreed(scene(), rank)
    assert len(entries) == 3 * (16 * 9 + 3)
    assert len({id(entry.mesh) for entry in entries}) == 16
    assert all(entry.mesh.order is None and entry.mesh.ranks_total == MANY // 16 for entry in entries)


def test_places_of_ranks_are_looked_up_as_often_for_many_tensors_as_for_few(monkeypatch: pytest.MonkeyPatch):
    calls = counted(monkeypatch, Mesh, "index")

    def looked_up(layers: int) -> tuple[int, int]:
        made = scene(layers=layers)
        state, mesh = made.state(0), made.plan.mesh
        before = len(calls)
        entries = agree(state, mesh, Answers(MANY, 0, made.told))
        return len(calls) - before, len(entries)

    (few, tensors_few), (many, tensors_many) = looked_up(16), looked_up(64)
    assert tensors_many > 3 * tensors_few
    assert many - few < tensors_many - tensors_few


def test_a_list_of_tensors_is_sent_by_one_rank_of_each_stage(monkeypatch: pytest.MonkeyPatch):
    calls = counted(monkeypatch, Answers, "share")
    agreed(scene(), 5000)
    assert len(calls) == 16


def test_a_rank_plans_its_own_boxes_alone(monkeypatch: pytest.MonkeyPatch):
    made = scene()
    entries, state = agreed(made, 8191), made.state(8191)
    slots = [format.Slot(one.name, one.layout.shape, one.layout.dtype) for one in entries]
    calls = counted(monkeypatch, Layout, "box")
    written = save.parts(entries, state, slots)
    assert len(calls) <= 2 * len(state) < len(entries) / 4
    assert sum(len(pieces) for _, pieces in written) <= 3 * len(state)


@pytest.mark.parametrize("rank", [0, 1])
def test_digests_come_together_in_windows_and_the_leading_rank_alone_keeps_them(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes: list[int] = []

    class Watched(Answers):
        def _all_reduce(self, x: torch.Tensor, op: str, later: bool) -> Any:
            sizes.append(x.numel())
            return super()._all_reduce(x, op, later)

    monkeypatch.setattr(checksums, "WINDOW", 1000)
    told = checksums.met(tmp_path / "none", [], checksums.Made(2500), Watched(MANY, rank, lambda rank: {}))
    assert sizes == [2000, 2000, 1000]
    assert np.array_equal(told.view(np.int64) ^ checksums.LEAST, np.ones(0 if rank else 2500, np.int64))


def test_the_model_of_405_billion_is_played_as_published():
    chosen = load(ROOT / "configs/llama-405b.toml")
    made = Scene.of(decide(chosen, Topology(("node",) * MANY), chosen.model.vocabulary))
    assert dict(made.plan.mesh.axes) == {"pp": 16, "dp": 128, "tp": 8}
    sizes = {name: layout.size for stage in made.stages for name, layout in stage["layouts"].items()}
    assert len(sizes) == 3 * (126 * 9 + 3)
    assert sum(sizes.values()) == 3 * 405_853_388_800


def test_the_command_tells_each_part_for_each_rank():
    words = ["scale", str(ROOT / "configs/llama-405b.toml"), "--ranks", "256", "--rank", "200", "--json"]
    smaller = ["--set", "model.layers=16", "--set", "model.width=1024", "--set", "model.mlp_width=1024"]
    done = CliRunner().invoke(app, words + smaller, catch_exceptions=False)
    rows = json.loads(done.stdout)
    parts = [row["part"] for row in rows if row["rank"] == 0]
    assert parts == [
        "plan the run",
        "list every stage's tensors",
        "agree on all names",
        "lay out the file",
        "gather the checksums",
        "write them and the seal",
        "read the file's index",
        "plan what to write",
        "plan what to read",
        "all of it",
    ]
    assert [row["part"] for row in rows if row["rank"] == 200] == [parts[2], *parts[6:9]]
    tensors = [row["items"] for row in rows if row["of"] == "tensors"]
    assert set(tensors) == {3 * (16 * 9 + 3)}
    assert all(row["items"] > 0 for row in rows)


def test_where_the_kernel_counts_no_peaks_there_are_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scale, "_peak_mib", lambda: None)
    rows = run(config(), 256, 512)
    assert {row.peak_mib for row in rows} == {None}
