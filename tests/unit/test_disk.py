"""Byte ranges on disk: any pieces, however they lie, and the file around them untouched."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from threading import Lock
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.disk import BEGIN, CHUNK, PAGE, READ, Piece
from hpctrain.errors import IncompleteError

PLACES = st.lists(
    st.tuples(st.sampled_from([0, 1, 7, 100, PAGE - 1, PAGE, PAGE + 1, 70_000]), st.integers(0, 3 * PAGE)), max_size=30
)

NONE, ALL = range(0), range(1 << 64)  # file systems that are written through the page cache


def pieces_at(places: list[tuple[int, int]]) -> list[Piece]:
    """Random pieces, by (gap before, length), shuffled."""
    generator, at, made = torch.Generator().manual_seed(len(places)), 0, []
    for gap, length in places:
        at += gap
        made.append(Piece(at, torch.randint(0, 256, (length,), generator=generator, dtype=torch.uint8)))
        at += length
    return [made[number] for number in torch.randperm(len(made), generator=generator)]


def expected(before: bytes, pieces: list[Piece]) -> bytes:
    content = bytearray(before)
    for piece in pieces:
        content[piece.at : piece.end] = piece.memory.numpy().tobytes()
    return bytes(content)


@settings(max_examples=100)
@given(PLACES, st.sampled_from([NONE, ALL]), st.floats(0, 1))
def test_pieces_come_to_their_places_and_back_and_nothing_else_changes(
    tmp_path_factory, places: list[tuple[int, int]], through: range, begin: float
):
    path = tmp_path_factory.mktemp("disk") / "file"
    pieces = pieces_at(places)
    before = os.urandom(max([piece.end for piece in pieces], default=0) + 100)
    path.write_bytes(before)
    with patch.object(disk, "THROUGH", through):
        disk.write(path, pieces, sync=False, begin=begin)
    assert path.read_bytes() == expected(before, pieces)
    back = [Piece(piece.at, torch.zeros_like(piece.memory)) for piece in pieces]
    disk.read(path, back, begin=begin)
    assert all(torch.equal(one.memory, other.memory) for one, other in zip(pieces, back, strict=True))
    path.unlink()


@pytest.mark.parametrize(
    ("begin", "places"), [(0, [0, 100, 200, 300, 400]), (0.5, [200, 300, 400, 0, 100]), (0.99, [400, 0, 100, 200, 300])]
)
def test_a_rank_begins_where_it_is_told_and_ends_with_what_is_before(begin: float, places: list[int]):
    pieces = [Piece(at, torch.zeros(80, dtype=torch.uint8)) for at in (300, 0, 400, 100, 200)]
    assert [piece.at for piece in disk.order(pieces, begin)] == places
    assert disk.order([], begin) == []


@pytest.mark.parametrize("start", [0, 1, PAGE, CHUNK - 5, CHUNK + 12345])
def test_a_piece_of_many_chunks_comes_whole(tmp_path: Path, start: int):
    path = tmp_path / "file"
    piece = pieces_at([(start, 3 * CHUNK + 777)])[0]
    disk.write(path.with_name(_made(path, piece.end)), [piece], sync=True)
    assert path.read_bytes() == bytes(start) + piece.memory.numpy().tobytes()


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the file system is, what can goes past the page cache."""
    monkeypatch.setattr(disk, "THROUGH", NONE)


@pytest.mark.usefixtures("past")
def test_whole_pages_go_past_the_page_cache_and_torn_ones_do_not(tmp_path: Path, monkeypatch):
    path, seen, real = tmp_path / "file", [], os.pwrite
    pieces = pieces_at([(PAGE - 10, 10), (0, 3 * PAGE), (0, 20), (5 * PAGE, 100)])

    def pwrite(opened: int, data: memoryview, at: int) -> int:
        unbuffered = bool(fcntl_flags(opened) & os.O_DIRECT)
        seen.append((at, len(data), unbuffered))
        return real(opened, data, at)

    monkeypatch.setattr(os, "pwrite", pwrite)
    _made(path, 20 * PAGE)
    disk.write(path, pieces, sync=False)
    edge = pieces[0].end if len(pieces) == 1 else max(piece.end for piece in pieces)
    assert sorted(seen) == [
        (PAGE - 10, 10, False),
        (PAGE, 3 * PAGE, True),
        (4 * PAGE, 20, False),
        (edge - 100, 100, False),
    ]


def test_neighbours_go_out_in_one_write(tmp_path: Path, monkeypatch):
    path, written, real = tmp_path / "file", [], os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda opened, data, at: written.append(len(data)) or real(opened, data, at))
    pieces = pieces_at([(0, 100)] * 10_000)
    _made(path, 1_000_000)
    disk.write(path, pieces, sync=False)
    assert sum(written) == 1_000_000
    assert len(written) <= 3


@pytest.mark.parametrize(("through", "step"), [(NONE, CHUNK), (ALL, BEGIN)])
def test_every_byte_is_seen_once_as_it_is_written_and_read(tmp_path: Path, monkeypatch, through: range, step: int):
    path, lock = tmp_path / "file", Lock()
    monkeypatch.setattr(disk, "THROUGH", through)
    places = pieces_at([(5, 3 * CHUNK + 777), (0, 10), (70_000, PAGE)])
    pieces = [Piece(piece.at, piece.memory, PAGE, number) for number, piece in enumerate(places)]

    def look(seen: list, part: Piece) -> None:
        with lock:
            seen.append((part.of, part.at, part.memory.clone()))

    _made(path, 4 * CHUNK)
    written, read = [], []
    disk.write(path, pieces, False, partial(look, written))
    disk.read(path, [Piece(one.at, torch.zeros_like(one.memory), PAGE, one.of) for one in pieces], partial(look, read))
    for piece in pieces:
        for seen, each in ((written, step), (read, READ)):
            parts = sorted(((at, memory) for of, at, memory in seen if of == piece.of), key=lambda part: part[0])
            assert torch.equal(torch.cat([memory for _, memory in parts]), piece.memory)
            assert all((at - PAGE) % each == 0 for at, _ in parts[1:])


def test_a_disk_that_cannot_be_told_to_begin_gets_all_by_fsync(tmp_path: Path, monkeypatch):
    path = tmp_path / "file"
    monkeypatch.setattr(disk, "THROUGH", ALL)
    monkeypatch.setattr(disk, "LIBC", _Without(disk.LIBC))
    pieces = pieces_at([(5, 3 * CHUNK)])
    _made(path, 5 * CHUNK)
    disk.write(path, pieces, sync=True)
    assert path.read_bytes() == expected(bytes(5 * CHUNK), pieces)


class _Without:
    """A C library whose sync_file_range does nothing but fail."""

    def __init__(self, real) -> None:
        self.fstatfs, self.sync_file_range = real.fstatfs, lambda *args: -1


@pytest.mark.parametrize("through", [NONE, ALL])
def test_a_file_system_that_takes_a_little_at_a_time_gets_all(tmp_path: Path, monkeypatch, through: range):
    path, real = tmp_path / "file", os.pwrite
    monkeypatch.setattr(disk, "THROUGH", through)
    monkeypatch.setattr(os, "pwrite", lambda opened, data, at: real(opened, data[: 3 * 512], at))
    pieces = pieces_at([(5, 3 * PAGE), (10, PAGE)])
    _made(path, 5 * PAGE)
    disk.write(path, pieces, sync=False)
    assert path.read_bytes() == expected(bytes(5 * PAGE), pieces)


@pytest.mark.usefixtures("past")
def test_a_file_system_that_refuses_unbuffered_writes_gets_buffered_ones(tmp_path: Path, monkeypatch):
    path, real_open, real_write = tmp_path / "file", os.open, os.pwrite

    def refuse_open(name, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no", str(name))
        return real_open(name, flags, *rest)

    def refuse_write(opened, data, at):
        if fcntl_flags(opened) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real_write(opened, data, at)

    for name, stub in (("open", refuse_open), ("pwrite", refuse_write)):
        with monkeypatch.context() as patch:
            _made(path, 9 * PAGE)
            patch.setattr(os, name, stub)
            pieces = pieces_at([(5, 3 * PAGE), (10, 2 * PAGE)])
            disk.write(path, pieces, sync=False)
        assert path.read_bytes() == expected(bytes(9 * PAGE), pieces)
        path.unlink()


def test_the_first_error_stops_the_writing_and_names_the_file(tmp_path: Path, monkeypatch):
    path, calls = tmp_path / "file", []

    def full(opened, data, at):
        calls.append(at)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _made(path, 1)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left") as caught:
        disk.write(path, pieces_at([(PAGE, 10)] * 1000), sync=False)
    assert caught.value.filename == str(path)
    assert len(calls) <= disk.WRITERS


def test_a_file_that_ends_early_is_told_with_its_name(tmp_path: Path):
    path = tmp_path / "file"
    _made(path, 100)
    beyond = [Piece(200, torch.zeros(1, dtype=torch.uint8))]
    for pieces in ([Piece(50, torch.zeros(51, dtype=torch.uint8))], pieces_at([(0, 60), (3, 60)]), beyond):
        with pytest.raises(IncompleteError, match=f"{path} ends at byte 100, before its tensors do"):
            disk.read(path, pieces)


def test_room_is_set_aside_for_the_whole_file(tmp_path: Path):
    path = tmp_path / "file"
    _made(path, 3 * CHUNK)
    disk.reserve(path)
    assert path.stat().st_blocks * 512 >= 3 * CHUNK
    assert path.read_bytes() == bytes(3 * CHUNK)


def fcntl_flags(opened: int) -> int:
    """The flags that a file was opened with."""
    import fcntl

    return fcntl.fcntl(opened, fcntl.F_GETFL)


def _made(path: Path, length: int) -> str:
    path.write_bytes(b"")
    os.truncate(path, length)
    return path.name
