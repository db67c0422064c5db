"""A run is asked to stop by a signal or by a file; the handler itself does nothing but note it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from hpctrain.cluster.stop import SIGNALS, Flag, listening
from hpctrain.errors import ConfigError


def test_nobody_asked_and_so_nothing_stops(tmp_path: Path) -> None:
    with listening(tmp_path) as stop_requested:
        assert not stop_requested()


@pytest.mark.parametrize("name", SIGNALS)
def test_each_signal_of_the_default_asks_to_stop(tmp_path: Path, name: str) -> None:
    with listening(tmp_path) as stop_requested:
        os.kill(os.getpid(), signal.Signals["SIG" + name])
        assert stop_requested()


def test_the_default_has_the_signal_that_every_site_sends() -> None:
    assert "TERM" in SIGNALS


def test_only_the_chosen_signals_are_listened_to(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with listening(tmp_path, ["SIGTERM", "usr2"]) as stop_requested:
        assert signal.getsignal(signal.SIGUSR1) is before
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop_requested()


def test_a_handler_that_stood_before_is_called_too_and_stands_again_afterwards(tmp_path: Path) -> None:
    called: list[int] = []

    def earlier(number: int, frame: object) -> None:
        called.append(number)

    before = signal.signal(signal.SIGUSR1, earlier)
    try:
        with listening(tmp_path) as stop_requested:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert stop_requested() and called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is earlier
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_handler_opens_no_file_and_calls_nothing_but_an_earlier_handler() -> None:
    flag, seen = Flag(), []
    flag.listen(signal.SIGUSR1)
    sys.setprofile(lambda frame, event, arg: seen.append((event, getattr(arg, "__name__", frame.f_code.co_name))))
    try:
        flag._handle(signal.SIGUSR1, None)
    finally:
        sys.setprofile(None)
        flag.restore()
    assert flag.raised
    assert {name for event, name in seen if "call" in event} <= {"_handle", "get", "callable", "setprofile"}


def test_a_stop_file_asks_to_stop_and_is_gone_afterwards(tmp_path: Path) -> None:
    with listening(tmp_path) as stop_requested:
        (tmp_path / "stop").touch()
        assert stop_requested()
    assert not (tmp_path / "stop").exists()


def test_ranks_that_do_not_look_for_the_file_listen_to_signals_all_the_same() -> None:
    with listening(None) as stop_requested:
        assert not stop_requested()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested()


def test_a_name_that_is_no_signal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'HELLO' is not a signal") as caught, listening(tmp_path, ["HELLO"]):
        pass
    assert "TERM, USR1, USR2" in caught.value.mend
