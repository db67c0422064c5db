"""Text: documents out of files, by their place."""

from __future__ import annotations

import json
import sysconfig

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.text import documents, expand, find
from hpctrain.errors import DataError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text, JSONL and empty files, with awkward ends of lines."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "b").mkdir()
    (folder / "a.txt").write_text("first\nfile\n")
    (folder / "b" / "c.txt").write_text("naïve")
    (folder / "b" / "d.txt").write_text("")
    (folder / "e.txt").write_text("")
    lines = [json.dumps({"text": text}) for text in ("one", "zwei é", "", "four\nlines", "x" * 50)]
    (folder / "f.jsonl").write_text("\n".join([lines[0], "", *lines[1:3], "  \r", *lines[3:]]))
    (folder / "g.ndjson").write_bytes(b'{"text": "dos"}\r\n{"text": "end"}\n')
    (folder / "h.txt").write_text("last")
    (folder / "z.txt").write_text("")
    return folder


ALL = ["first\nfile\n", "", "one", "zwei é", "", "four\nlines", "x" * 50, "dos", "end", "last", "", "naïve", ""]


def all_files(folder):
    names = ("a.txt", "e.txt", "f.jsonl", "g.ndjson", "h.txt", "z.txt", "b")
    return find([str(folder / name) for name in names], "*.txt")


def test_files_lie_end_to_end_in_the_order_of_the_sources(folder):
    files = all_files(folder)
    assert [file.path.rpartition("/")[2][0] for file in files] == list("aefghzcd")
    assert files[0].start == 0
    assert all(one.stop == other.start for one, other in zip(files, files[1:], strict=False))


@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_of_the_bytes_gives_every_document_once_and_in_order(folder, cuts):
    files = all_files(folder)
    places = [0, *sorted(min(cut, files[-1].stop) for cut in cuts), files[-1].stop + 1]
    found = [text for span in zip(places, places[1:], strict=False) for text in documents(files, *span)]
    assert found == ALL


def test_a_cut_at_any_byte_loses_and_repeats_nothing(folder):
    files = all_files(folder)
    end = files[-1].stop + 1
    for cut in range(end):
        assert [*documents(files, 0, cut), *documents(files, cut, end)] == ALL


def test_a_folder_is_read_to_its_depth_in_sorted_order(tmp_path):
    for name in ("b/x.txt", "a.txt", "b.txt", "b/a/y.txt", "no.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    found = [file.path.removeprefix(f"{tmp_path}/") for file in find([str(tmp_path)], "*.txt")]
    assert found == ["a.txt", "b/a/y.txt", "b/x.txt", "b.txt"]


@pytest.mark.parametrize("left_out", [".git", "__pycache__", "site-packages", "dist-packages"])
def test_folders_of_what_is_installed_or_generated_are_not_entered_unless_named(tmp_path, left_out):
    inside = tmp_path / left_out
    inside.mkdir()
    (inside / "x.txt").write_text("text")
    (tmp_path / "y.txt").write_text("text")
    assert [file.path for file in find([str(tmp_path)], "*.txt")] == [str(tmp_path / "y.txt")]
    assert [file.path for file in find([str(inside)], "*.txt")] == [str(inside / "x.txt")]


def test_the_standard_library_is_found_without_what_is_installed_in_it():
    assert expand("{stdlib}/json") == sysconfig.get_path("stdlib") + "/json"
    found = [file.path for file in find(["{stdlib}"], "*.py")]
    assert any(path.endswith("/json/decoder.py") for path in found)
    assert not any("/site-packages/" in path or "/dist-packages/" in path for path in found)


def test_the_text_lies_under_the_key_that_is_asked_for(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a", "body": "b"}\n')
    (file,) = find([str(tmp_path / "x.jsonl")], "*")
    assert list(documents([file], 0, file.size, "body")) == ["b"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"text": "a"', "it is not JSON in UTF-8: Expecting"),
        (b'{"body": "a"}', "it has no text under 'text'"),
        (b'{"text": 3}', "it has no text under 'text'"),
        (b'["text"]', "it has no text under 'text'"),
        (b"null", "it has no text under 'text'"),
        (b'{"text": "\xff"}', "it is not JSON in UTF-8: .*can't decode byte 0xff"),
        (b'{"text": "\\ud800"}', "it is not JSON in UTF-8: .*surrogates not allowed"),
        (b"[" * 200_000, "it is not JSON in UTF-8: "),
    ],
)
def test_a_line_that_cannot_be_used_is_told_with_its_number_and_why(tmp_path, line, why):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    (file,) = find([str(tmp_path / "x.jsonl")], "*")
    first, fault, last = documents([file], 0, file.size)
    assert (first, last) == ("a", "b")
    with pytest.raises(DataError, match=f"x.jsonl, line 3 cannot be used\n.*{why}(.|\n)*--json-key.*--on-error skip"):
        raise fault


def test_a_text_that_is_not_utf8_is_told_with_its_byte(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"caf\xe9 au lait")
    (file,) = find([str(tmp_path)], "*.txt")
    (fault,) = documents([file], 0, file.size)
    with pytest.raises(DataError, match="x.txt is not UTF-8 text: byte 0xe9 at 3\n.*\n.*--on-error skip"):
        raise fault


def test_a_source_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="none is neither a file nor a folder\n"):
        find([str(tmp_path / "none")], "*")


def test_a_folder_without_such_files_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no file in .* is called \*.py\n.*\n.*--pattern"):
        find([str(tmp_path)], "*.py")
