"""A run is asked to stop by a signal, by a file or by the end of its time; a handler does nothing but note a signal."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from hpctrain.cluster.deadline import Deadline
from hpctrain.cluster.jobs import NO_REQUEUE
from hpctrain.cluster.stop import SIGNALS, Flag, Stop, listening
from hpctrain.cluster.world import World
from hpctrain.config import RunConfig
from hpctrain.errors import EXIT_REQUEUE, ConfigError

Listen = Callable[..., AbstractContextManager[Stop]]


@contextmanager
def flag_of(*signals: str) -> Iterator[Flag]:
    flag = Flag(signals or SIGNALS)
    try:
        yield flag
    finally:
        flag.restore()


@pytest.fixture
def listen(tmp_path: Path) -> Listen:
    """``listen(ends_at, *signals)`` listens as the only rank of a run in the test's folder."""

    @contextmanager
    def start(ends_at: float | None = None, *signals: str) -> Iterator[Stop]:
        run = RunConfig(dir=str(tmp_path), margin_seconds=30)
        with flag_of(*signals) as flag, listening(run, World.of(None), flag, Deadline(ends_at)) as stop:
            yield stop

    return start


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- signals


def test_nobody_asked_and_so_nothing_stops(listen: Listen) -> None:
    with listen() as stop:
        assert not stop.agreed() and stop.why is None
        stop.heed()


@pytest.mark.parametrize("name", SIGNALS)
def test_each_signal_of_the_default_asks_to_stop_and_is_named(listen: Listen, name: str) -> None:
    with listen() as stop:
        os.kill(os.getpid(), signal.Signals["SIG" + name])
        assert stop.agreed() and stop.why == f"signal {name} at rank 0"


def test_the_default_has_the_signal_that_every_site_sends() -> None:
    assert "TERM" in RunConfig().stop_signals == SIGNALS


def test_only_the_chosen_signals_are_listened_to(listen: Listen) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with listen(None, "SIGTERM", "usr2") as stop:
        assert signal.getsignal(signal.SIGUSR1) is before
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop.agreed()


def test_a_second_signal_changes_nothing(listen: Listen) -> None:
    with listen() as stop:
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
            assert stop.agreed()
        assert stop.why == "signal USR1 at rank 0"


def test_a_handler_that_stood_before_is_called_too_and_stands_again_afterwards() -> None:
    called: list[int] = []

    def earlier(number: int, frame: object) -> None:
        called.append(number)

    before = signal.signal(signal.SIGUSR1, earlier)
    try:
        with flag_of() as flag:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert flag.heard == signal.SIGUSR1 and called == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is earlier
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_handler_opens_no_file_and_calls_nothing_but_an_earlier_handler() -> None:
    with flag_of("USR1") as flag:
        seen: list[tuple[str, str]] = []
        sys.setprofile(lambda frame, event, arg: seen.append((event, getattr(arg, "__name__", frame.f_code.co_name))))
        try:
            flag._handle(signal.SIGUSR1, None)
        finally:
            sys.setprofile(None)
        assert flag.heard == signal.SIGUSR1
    assert {name for event, name in seen if "call" in event} <= {"_handle", "get", "callable", "setprofile"}


def test_a_forked_child_can_be_ended_by_its_parent() -> None:
    with flag_of() as flag:
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)  # the parent listens all the same
        assert flag.heard == signal.SIGTERM


def test_a_process_that_is_about_to_end_heeds_no_signal() -> None:
    with flag_of() as flag:
        flag.ignore()
        os.kill(os.getpid(), signal.SIGTERM)
        assert flag.heard is None


def test_a_name_that_is_no_signal_is_refused_and_no_handler_is_set() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match="'HELLO' is not a signal") as caught:
        Flag(["TERM", "HELLO"])
    assert "TERM, USR1, USR2" in caught.value.mend
    assert signal.getsignal(signal.SIGTERM) is before


# ---- the file


def test_a_run_that_its_file_stopped_tells_the_batch_script_not_to_hand_it_in_again(listen: Listen, tmp_path) -> None:
    with listen() as stop:
        (tmp_path / "stop").touch()
        assert stop.agreed() and stop.why == f"the file {tmp_path}/stop"
    assert files(tmp_path) == [NO_REQUEUE]


def test_a_file_that_came_too_late_is_taken_away_and_the_batch_script_told_nothing(listen: Listen, tmp_path) -> None:
    with listen() as stop:
        assert not stop.agreed()
        (tmp_path / "stop").touch()
    assert files(tmp_path) == []


def test_a_run_that_a_signal_stopped_is_handed_in_again_unless_the_file_came_too(listen: Listen, tmp_path) -> None:
    for late, left in ((False, []), (True, [NO_REQUEUE])):
        with listen() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.agreed()
            if late:
                (tmp_path / "stop").touch()
        assert files(tmp_path) == left


# ---- before the first step


def test_a_run_that_is_asked_before_its_first_step_leaves_with_75_and_says_why(listen: Listen, capsys) -> None:
    with listen() as stop, pytest.raises(SystemExit) as left:
        os.kill(os.getpid(), signal.SIGUSR2)
        stop.heed()
    assert left.value.code == EXIT_REQUEUE == 75
    line = "stopped before the first step: signal USR2 at rank 0; start the same command again to go on\n"
    assert capsys.readouterr().err == line


# ---- the end of the time


def test_a_run_whose_time_is_over_takes_one_step_before_it_stops(listen: Listen) -> None:
    with listen(time.time() - 5) as stop:
        stop.heed()
        stop.pace.stepped(1.0)
        stop.pace.saved(31.0)
        assert stop.agreed() and stop.why == "the job's time ends in 0.0 s, and a save takes 31 s"


def test_a_run_goes_on_while_a_step_a_save_and_the_margin_fit(listen: Listen) -> None:
    with listen(time.time() + 130) as stop:
        stop.pace.stepped(40.0)
        stop.pace.saved(20.0)
        assert not stop.agreed()
        stop.pace.stepped(100.0)
        assert stop.agreed()
