"""Whether shared memory has room is decided before it is written to."""

from __future__ import annotations

from hpctrain.comm.meet import own_cores, room_to_spin
from hpctrain.comm.room import SPARE_BYTES, backing, fits, room


def test_a_window_that_would_fill_the_folder_does_not_fit():
    assert fits(10, SPARE_BYTES + 10)
    assert not fits(10, SPARE_BYTES + 9)


def test_the_folder_that_the_user_named_to_mpi_is_looked_at(tmp_path):
    assert backing({"OMPI_MCA_osc_sm_backing_directory": str(tmp_path)}) == str(tmp_path)


def test_without_a_name_it_is_where_linux_keeps_shared_memory(tmp_path):
    assert backing({}) == "/dev/shm"
    assert backing({"OMPI_MCA_osc_sm_backing_directory": str(tmp_path / "gone")}) == "/dev/shm"


def test_room_is_what_the_folder_has_free(tmp_path):
    assert room(str(tmp_path)) > 0


def test_ranks_spin_only_when_each_has_a_core():
    assert room_to_spin([{0, 1}, {0, 1}])
    assert not room_to_spin([{0}, {0}])
    assert not room_to_spin([{0, 1}] * 3)
    assert own_cores()
