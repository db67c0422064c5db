"""Jobs that prepare one text in one place at once: both end with the same whole tokens, and none disturbs the other."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.comm.group import SoloGroup
from hpctrain.config import DataConfig
from hpctrain.data import part as parts
from hpctrain.data import prepare as preparing
from hpctrain.data.prepare import Request, prepare, ready
from hpctrain.data.tokens import Tokens, write
from hpctrain.errors import DataError

ROOT = Path(__file__).parents[2]
MOMENTS = [(preparing, "_tokenizer"), (preparing, "_fill"), (preparing, "_join"), (preparing, "_publish")]
MOMENTS += [(preparing, "publish"), (preparing, "_settle"), (parts, "fill_index"), (os, "replace"), (os, "rename")]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    """The text of a run."""
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number:02}.txt").write_text(f"text {number} " * number)
    return DataConfig(text=(str(tmp_path / "text"),), tokenizer="bpe:300")


def prefix(config: DataConfig, folder: Path) -> str:
    """Where a job finds its tokens, or puts them."""
    (source,) = ready(config, folder, SoloGroup())
    return source.path


def before(monkeypatch: pytest.MonkeyPatch, where: object, name: str, act: Callable[[], object]) -> None:
    """Let ``act`` happen once, just before the first call of a function."""
    real, due = getattr(where, name), [act]

    def call(*args: object, **more: object) -> object:
        while due:
            due.pop()()
        return real(*args, **more)

    monkeypatch.setattr(where, name, call)


@pytest.mark.parametrize(("where", "name"), MOMENTS, ids=[name for _, name in MOMENTS])
def test_a_job_that_comes_while_another_prepares_neither_harms_nor_waits_for_it(
    tmp_path: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch, where: object, name: str
) -> None:
    found: list[tuple[str, list[tuple[int, int]]]] = []

    def second() -> None:
        path = prefix(config, tmp_path / "run")
        found.append((path, stamps(path)))

    before(monkeypatch, where, name, second)
    first = prefix(config, tmp_path / "run")
    assert (first, stamps(first)) == found[0]  # the second was ready first, and its files are used already
    assert Tokens(first).documents == 19
    alone = prefix(config, tmp_path / "alone")
    for suffix in (".bin", ".idx", ".json", ".tokenizer.json"):
        assert Path(first + suffix).read_bytes() == Path(alone + suffix).read_bytes()
    assert sorted(os.listdir(tmp_path / "run")) == [Path(first).parent.name]
    assert len(os.listdir(Path(first).parent)) == 4


def stamps(path: str) -> list[tuple[int, int]]:
    """Which files a pair's names lead to: another one under the same name has another number."""
    found = [Path(path + suffix).stat() for suffix in (".bin", ".idx", ".json", ".tokenizer.json")]
    return [(one.st_ino, one.st_mtime_ns) for one in found]


def test_processes_that_start_at_once_end_with_the_same_tokens(tmp_path: Path, config: DataConfig) -> None:
    program = f"""
import sys
from pathlib import Path
from hpctrain.comm.group import SoloGroup
from hpctrain.config import DataConfig
from hpctrain.data.prepare import ready
from hpctrain.data.tokens import Tokens
config = DataConfig.model_validate_json({config.model_dump_json()!r})
print("loaded", flush=True)
sys.stdin.readline()
(source,) = ready(config, Path({str(tmp_path / "run")!r}), SoloGroup())
print(source.path, Tokens(source.path).documents)
"""
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    jobs = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(3)]
    assert [job.stdout.readline() for job in jobs] == ["loaded\n"] * 3
    for job in jobs:
        job.stdin.write("\n")
        job.stdin.flush()
    told = {job.communicate(timeout=60)[0] for job in jobs}
    assert told == {f"{prefix(config, tmp_path / 'run')} 19\n"}
    assert len(os.listdir(tmp_path / "run")) == 1


@pytest.mark.parametrize("name", ["_fill", "_join", "_publish", "publish"])
def test_a_pair_with_a_name_may_be_made_by_two_commands_at_once(
    tmp_path: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    request = Request(config.text, config.tokenizer)
    before(monkeypatch, preparing, name, lambda: prepare(request, tmp_path / "out" / "pair"))
    prepare(request, tmp_path / "out" / "pair")
    prepare(request, tmp_path / "alone" / "pair")
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(tmp_path / "alone"))
    for file in os.listdir(tmp_path / "alone"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes()


def test_tokens_may_be_written_by_two_at_once(tmp_path: Path) -> None:
    def documents(between: Callable[[], object]):
        yield [1, 2, 3]
        between()
        yield [4]

    write(tmp_path / "pair", documents(lambda: write(tmp_path / "pair", [[1, 2, 3], [4]], "uint16")), "uint16")
    assert Tokens(tmp_path / "pair").read(0, 4).tolist() == [1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["pair.bin", "pair.idx"]


def test_what_a_dead_job_left_goes_and_what_a_living_one_makes_stays(tmp_path: Path, config: DataConfig) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here, run = socket.gethostname(), tmp_path / "run"
    for pid in (gone.pid, os.getppid()):
        (run / f".tokens.{here}.{pid}.0badcafe.tmp").mkdir(parents=True)
        (run / f".tokens.{here}.{pid}.0badcafe.tmp" / "text.bin").write_text("half")
    found = prefix(config, run)
    assert sorted(os.listdir(run)) == sorted([f".tokens.{here}.{os.getppid()}.0badcafe.tmp", Path(found).parent.name])


def test_a_run_whose_preparing_fails_leaves_nothing_and_takes_no_half(
    tmp_path: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "text.idx")

    with monkeypatch.context() as patch:
        patch.setattr(parts, "fill_index", full)
        with pytest.raises(DataError, match="No space left on device"):
            prefix(config, tmp_path / "run")
    assert os.listdir(tmp_path / "run") == []
    assert Tokens(prefix(config, tmp_path / "run")).documents == 19


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_tokens_that_somebody_removed_a_file_of_are_not_taken(tmp_path: Path, config: DataConfig, suffix: str) -> None:
    place = prefix(config, tmp_path / "run")
    Path(place + suffix).unlink()
    with pytest.raises(DataError) as told:
        prefix(config, tmp_path / "run")
    assert told.value.what == f"{Path(place).parent} lacks some of its tokens' files"
    assert told.value.why == "they were whole when it got its name: somebody has removed one since"
    assert told.value.mend == "remove it, and they are made again"
    assert len(os.listdir(tmp_path / "run")) == 1


def test_a_rank_whose_part_was_cut_short_meanwhile_is_found(tmp_path: Path, config: DataConfig, monkeypatch) -> None:
    def cut() -> None:
        (path,) = (tmp_path / "out").glob("pair.*.part0.tmp")
        os.truncate(path, path.stat().st_size - 2)

    before(monkeypatch, preparing, "_join", cut)
    with pytest.raises(DataError, match="part0.tmp has .* bytes and not the .* that were written\n.*\n.*start again"):
        prepare(Request(config.text), tmp_path / "out" / "pair")
    assert os.listdir(tmp_path / "out") == []
