"""Near checkpoints: a node may be lost, a part may be damaged, and a run goes on from the newest that is whole."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import disk, near_read, near_write, streams
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.inspect import find
from hpctrain.checkpoint.near_file import read_head
from hpctrain.checkpoint.state import Held
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, ConfigError, FullError
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.near import Cluster, flip

LAYOUTS = {
    "model/columns": Layout((30, 71), "float32", (Cut(1, ("dp",)),)),
    "model/copied": Layout((900_000,), "bfloat16"),
    "model/rows": Layout((301, 700), "float32", (Cut(0, ("dp",)),)),
    "model/small": Layout((7,), "float32"),
    "optim/exp_avg/flat": Layout((500, 301), "float64", (), Flat(("dp",), 3, 500 * 301 + 10)),
    "optim/none": Layout((0, 3), "float32"),
    "optim/scalar": Layout((), "int64"),
}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Four ranks on two nodes."""
    return Cluster(tmp_path, LAYOUTS, "aabb")


# ---- what is saved, and where ----------------------------------------------------------------------------------------


def test_each_part_is_on_the_rank_s_node_and_on_the_next(cluster: Cluster):
    assert cluster.save(5) == [True] * 4
    both = ["0.copy", "0.own", "1.copy", "1.own", "2.copy", "2.own", "3.copy", "3.own"]
    assert cluster.names() == {
        "a": [name for name in both if name in ("0.own", "1.own", "2.copy", "3.copy")],
        "b": [name for name in both if name in ("0.copy", "1.copy", "2.own", "3.own")],
    }
    heads = [read_head(path)[0] for path in cluster.files("a")]
    assert sum(head.nbytes for head in heads) == sum(layout.nbytes for layout in LAYOUTS.values())


def test_the_former_save_goes_when_the_next_is_whole(cluster: Cluster):
    cluster.save(5, 6)
    assert {path.name.split(".")[0] for path in cluster.files("a")} == {"step-00000006"}
    cluster.save(4)  # a run that went back leaves nothing of the life before
    assert {path.name.split(".")[0] for path in cluster.files("a")} == {"step-00000004"}


def test_with_one_copy_or_one_node_no_other_node_has_a_part(cluster: Cluster, caplog: pytest.LogCaptureFixture):
    cluster.save(5, near_copies=1)
    assert cluster.names() == {"a": ["0.own", "1.own"], "b": ["2.own", "3.own"]}
    assert "no other has a copy" not in caplog.text
    alone = Cluster(cluster.run.parent / "alone", LAYOUTS, "aaa")
    alone.save(5)
    assert alone.names() == {"a": ["0.own", "1.own", "2.own"]}
    assert "all ranks are on one node: no other has a copy" in caplog.text
    assert alone.resume() == 5


def test_only_the_user_may_enter_the_folder(cluster: Cluster):
    cluster.save(5)
    (folder,) = (cluster.disks / "a").iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in cluster.files("a"))
    folder.chmod(0o755)
    cluster.save(6)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_is_a_link_is_refused(cluster: Cluster, tmp_path: Path):
    cluster.save(5)
    (folder,) = (cluster.disks / "b").iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="rank 2 and 1 more of 4: .* is not ours") as caught:
        cluster.save(6)
    assert "give another folder (checkpoint.near)" in str(caught.value)


# ---- going on --------------------------------------------------------------------------------------------------------


def test_the_newest_is_taken_wherever_it_is(cluster: Cluster):
    cluster.save(10, 15, whole=[10])
    assert cluster.resume() == 15
    cluster.save(20, whole=[20])
    assert cluster.resume() == 20
    cluster.save(21)
    assert cluster.resume() == 21


@pytest.mark.parametrize("lost", ["a", "b"])
def test_the_loss_of_one_node_loses_nothing(cluster: Cluster, lost: str, caplog: pytest.LogCaptureFixture):
    cluster.save(10, 15, whole=[10])
    shutil.rmtree(cluster.disks / lost)
    assert cluster.resume() == 15
    ranks = "[0, 1]" if lost == "a" else "[2, 3]"
    assert (
        f"took step 15 from the nodes' own disks; the parts of ranks {ranks} from their partners' nodes" in caplog.text
    )
    cluster.save(16)
    assert len(cluster.names()[lost]) == 4


def test_the_loss_of_two_neighbours_leaves_the_older_one_in_the_run_s_folder(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
):
    cluster.save(10, 15, whole=[10])
    for host in "ab":
        shutil.rmtree(cluster.disks / host)
    assert cluster.resume() == 10


@pytest.mark.parametrize("hosts", ["abcd", "aab", "abab", "c", "abcabca", "bbaa"])
def test_any_number_of_ranks_on_any_nodes_goes_on(cluster: Cluster, hosts: str):
    cluster.save(15)
    if hosts in ("c", "aab"):  # what the lost node had is on the other
        hosts = hosts.replace("c", "b")
        shutil.rmtree(cluster.disks / "a")
    assert cluster.resume(hosts) == 15


@pytest.mark.parametrize(("hosts", "lost"), [("abcd", "a"), ("abcd", "ac"), ("abacbdcd", "bd"), ("aaabc", "b")])
def test_nodes_that_are_not_neighbours_may_be_lost_together(tmp_path: Path, hosts: str, lost: str):
    cluster = Cluster(tmp_path, LAYOUTS, hosts)
    cluster.save(15)
    for host in lost:
        shutil.rmtree(cluster.disks / host)
    assert cluster.resume() == 15


def test_a_part_that_is_nowhere_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cluster = Cluster(tmp_path, LAYOUTS, "abcd")
    cluster.save(10, 15, whole=[10])
    for host in "bc":
        shutil.rmtree(cluster.disks / host)
    assert cluster.resume() == 10
    assert "the near checkpoint of step 15 was skipped: the parts of ranks [1] are whole on no node" in caplog.text


@pytest.mark.parametrize("at", [3, 40, 70, -1, -300_000], ids=["magic", "numbers", "text", "end", "data"])
def test_a_byte_that_changes_costs_no_more_than_the_partner_s_copy(
    cluster: Cluster, at: int, caplog: pytest.LogCaptureFixture
):
    cluster.save(10, 15, whole=[10])
    (own,) = [path for path in cluster.files("a") if path.name.endswith("1.own")]
    flip(own, at)
    assert cluster.resume() == 15
    assert f"skipped: {own}" in caplog.text and "the parts of ranks [1] from their partners' nodes" in caplog.text
    (copy,) = [path for path in cluster.files("b") if path.name.endswith("1.copy")]
    flip(copy, -1)
    assert cluster.resume() == 10


def test_a_file_that_was_cut_off_costs_no_more_than_the_partner_s_copy(cluster: Cluster):
    cluster.save(15)
    for path in cluster.files("a"):
        os.truncate(path, 0 if "0.own" in path.name else path.stat().st_size - 1)
    assert cluster.resume() == 15


def test_a_disk_that_cannot_be_read_costs_no_more_than_the_partner_s_copy(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    cluster.save(15)
    read = disk.read

    def failing(path: Path, pieces: list) -> None:
        if "/a/" in str(path) and "own" in path.name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        read(path, pieces)

    monkeypatch.setattr(disk, "read", failing)
    assert cluster.resume() == 15


def test_without_looking_at_checksums_only_lengths_and_heads_are_checked(cluster: Cluster):
    cluster.save(15)
    (own,) = [path for path in cluster.files("a") if path.name.endswith("0.own")]
    flip(own, -1)
    with pytest.raises(AssertionError):
        cluster.resume(verify=False)


def test_a_newer_near_one_is_taken_where_a_whole_one_is_damaged(cluster: Cluster):
    cluster.save(10, 15, 20, whole=[10, 20])
    flip(cluster.run / "step-00000020.h5", -1)
    assert cluster.resume() == 15
    flip(cluster.run / "step-00000010.h5", -1)
    assert cluster.resume() == 15


def test_a_near_one_saves_the_run_whose_only_whole_one_is_cut_off(cluster: Cluster):
    cluster.save(10, 15, whole=[10])
    os.truncate(cluster.run / "step-00000010.h5", 100)
    assert cluster.resume() == 15


# ---- what must not be taken ------------------------------------------------------------------------------------------


def test_what_another_run_has_left_is_never_taken(cluster: Cluster, tmp_path: Path):
    cluster.save(15)
    other = Cluster(tmp_path, LAYOUTS, "aabb")
    other.run = tmp_path / "other"
    assert other.resume() == 0
    shutil.rmtree(cluster.run)  # the same name, begun anew
    assert cluster.resume() == 0
    assert cluster.save(3) == [True] * 4 and cluster.resume() == 3


def test_a_part_that_was_put_into_another_run_s_folder_is_not_taken(cluster: Cluster, tmp_path: Path):
    cluster.save(15)
    other = Cluster(tmp_path / "other", LAYOUTS, "aabb")
    other.save(3)
    for host in "ab":
        for path in cluster.files(host):
            shutil.copy(path, other.files(host)[0].parent)
    assert other.resume() == 3


def test_who_removes_checkpoints_to_go_back_does_go_back(cluster: Cluster, caplog: pytest.LogCaptureFixture):
    cluster.save(10, 20, 25, whole=[10, 20])
    (cluster.run / "step-00000020.h5").unlink()
    assert cluster.resume() == 10
    assert "it came after that of step 20, which is no longer in" in caplog.text


def test_parts_of_two_saves_of_one_step_are_never_mixed(tmp_path: Path):
    cluster = Cluster(tmp_path, LAYOUTS, "ab", near_copies=1)
    cluster.save(15)
    (before,) = cluster.files("a")
    kept = before.read_bytes()
    cluster.save(15)
    cluster.files("a")[0].unlink()
    before.write_bytes(kept)
    assert cluster.resume() == 0


def test_a_checkpoint_of_other_tensors_is_refused_with_their_list(cluster: Cluster):
    cluster.save(15)
    cluster.layouts = LAYOUTS | {"model/small": Layout((8,), "float32")}
    with pytest.raises(CheckpointError, match=r"model/small: float32 \[7\] in the file, this run wants float32 \[8\]"):
        cluster.resume()


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_full", ["go on", "stop"])
def test_a_disk_that_fills_on_one_node_is_met_by_all_and_the_former_save_stays(
    cluster: Cluster, on_full: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cluster.save(10, 15, whole=[10])
    before = {host: cluster.files(host) for host in "ab"}
    write = disk.write

    def failing(path: Path, pieces: list, sync: bool) -> None:
        if "/b/" in str(path) and "copy" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, pieces, sync)

    monkeypatch.setattr(disk, "write", failing)
    if on_full == "go on":
        assert cluster.save(16, on_full=on_full) == [False] * 4
        assert "step 16 was not saved near: " in caplog.text
    else:
        with pytest.raises(FullError, match="has no room") as caught:
            cluster.save(16, on_full=on_full)
        assert "give another folder (checkpoint.near), or set checkpoint.near_copies to 1" in str(caught.value)
    monkeypatch.undo()
    assert {host: cluster.files(host) for host in "ab"} == before
    assert cluster.resume() == 15


@pytest.mark.parametrize("where", ["_reserve", "_publish"])
def test_an_error_of_one_node_leaves_nothing_of_that_save_on_any(
    cluster: Cluster, where: str, monkeypatch: pytest.MonkeyPatch
):
    cluster.save(15)
    before = {host: cluster.files(host) for host in "ab"}
    real = getattr(near_write, where)

    def failing(one: near_write.Coming) -> None:
        if one.path.name.endswith("3.copy"):
            raise OSError(errno.EIO, "Input/output error", str(one.path))
        real(one)

    monkeypatch.setattr(near_write, where, failing)
    with pytest.raises(CheckpointError, match="rank 1: .* failed"):
        cluster.save(16)
    monkeypatch.undo()
    assert {host: cluster.files(host) for host in "ab"} == before
    assert cluster.resume() == 15


def test_a_read_that_fails_on_one_node_lets_all_go_back_to_the_older_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cluster.save(10, 15, whole=[10])

    def failing(self: near_read.Serving, to: int, start: int, into: torch.Tensor) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(near_read.Serving, "give", failing)
    assert cluster.resume() == 10
    assert "the near checkpoint of step 15 was skipped: rank 0: reading " in caplog.text


def test_what_dead_ranks_left_aside_goes_with_the_next_save(cluster: Cluster):
    cluster.save(15)
    folder = cluster.files("a")[0].parent
    (folder / ".step-00000016.0123abcd.0.own.aside").write_bytes(bytes(1000))
    cluster.save(17)
    assert len(cluster.files("a")) == 4


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NODE_DISK", str(tmp_path / "disk"))
    cluster = Cluster(tmp_path, LAYOUTS, "a", near="${NODE_DISK}/x")
    cluster.save(1)
    assert list((tmp_path / "disk/x").iterdir())
    monkeypatch.delenv("NODE_DISK")
    with pytest.raises(ConfigError, match="checkpoint.near = .* names no folder") as caught:
        cluster.resume()
    assert "a variable in it is not set on a" in str(caught.value)


def test_saving_near_needs_a_folder():
    with pytest.raises(ConfigError, match="checkpoint.near_every = 5, and there is no folder to save to"):
        CheckpointConfig(near_every=5)


def test_inspecting_a_part_says_what_it_is(cluster: Cluster):
    cluster.save(15)
    with pytest.raises(CheckpointError, match="is a part of a checkpoint: what rank 0 of 4 had at step 15"):
        find(next(path for path in cluster.files("a") if path.name.endswith("0.own")))


# ---- the rest --------------------------------------------------------------------------------------------------------


def test_a_run_that_saves_nothing_near_makes_no_folder_and_no_mark(tmp_path: Path):
    cluster = Cluster(tmp_path, LAYOUTS, "ab", near=None, near_every=0)
    cluster.save(3, whole=[3])
    assert cluster.resume() == 3
    assert sorted(os.listdir(cluster.run)) == ["latest", "step-00000003.h5"] and not cluster.disks.exists()


def test_a_run_that_is_over_leaves_nothing_on_the_nodes(cluster: Cluster):
    cluster.save(15)
    cluster.each(lambda point, rank: point.near.clear())
    assert not list(cluster.disks.glob("*/*"))
    assert cluster.save(16) == [True] * 4


def test_tensors_that_do_not_lie_in_one_run_are_filled_too(tmp_path: Path):
    config = CheckpointConfig(near=str(tmp_path / "near"), sync=False)
    mesh = Mesh((("dp", 1),))
    layout = Layout((5, 7), "float32")
    value = states.whole(layout, 3)
    Checkpoint(config, tmp_path / "run", mesh, SoloGroup()).near.save(4, {"model/a": Held(layout, value)})
    target = torch.zeros(7, 5).t()
    assert Checkpoint(config, tmp_path / "run", mesh, SoloGroup()).resume({"model/a": Held(layout, target)}) == 4
    assert torch.equal(target, value)


def test_streams_of_any_lengths_arrive_in_rounds_of_any_size(cluster: Cluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "ROUND_BYTES", 100_001)
    cluster.save(15)
    shutil.rmtree(cluster.disks / "a")
    assert cluster.resume("abc") == 15
