"""How far long work is: a bar on a terminal, lines now and then elsewhere, nothing from ranks that do not speak."""

from __future__ import annotations

import pytest

from hpctrain.cli.bar import bar
from hpctrain.watch import progress


def told(speaks: bool) -> None:
    with bar("verify", speaks, ranks=2) as tell:
        for done in (25, 50, 100):
            tell(done << 20, 100 << 20)


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(progress, "columns", lambda: 80)
    told(True)
    seen = capsys.readouterr()
    assert "verify" in seen.err and "209.7/209.7 MB" in seen.err and seen.out == ""


def test_a_log_gets_lines_once_work_is_long(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(progress, "columns", lambda: None)
    told(True)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    told(True)
    assert capsys.readouterr().err == "verify  25% of 200.0 MiB\nverify  50% of 200.0 MiB\nverify 100% of 200.0 MiB\n"


def test_a_rank_that_does_not_speak_shows_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(progress, "columns", lambda: 80)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    told(False)
    assert capsys.readouterr().err == ""
