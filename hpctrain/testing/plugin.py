"""A pytest plugin for tests that run under mpirun, beside pytest-mpi and its ``--only-mpi``.

    pytest_plugins = ["hpctrain.testing.plugin"]                            # in the topmost conftest.py
    mpirun -n 4 python -m pytest --only-mpi tests/mpi

All ranks agree on each test's outcome, so that a failure on one rank is a failure of the run; rank 0 alone prints the
report, with the tracebacks of the ranks that failed. A test has ``mpi_limit_seconds`` (an ini value; the marker
``mpi_limit(seconds)`` for one test); when it takes longer, or when a rank failed and the others do not come to the
test's end within ``mpi_patience_seconds``, the tracebacks of all ranks are printed and the whole job is aborted.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator

import pytest
from _pytest.terminal import TerminalReporter

from hpctrain.testing.verdict import Verdict
from hpctrain.testing.watchdog import Watchdog


def pytest_addoption(parser: pytest.Parser) -> None:
    """Name the ini values."""
    parser.addini("mpi_limit_seconds", "time that a test under MPI has, set-up and tear-down included", default="120")
    parser.addini("mpi_patience_seconds", "how long a failed rank waits for the others", default="15")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Bring the ranks together when pytest-mpi's options say that there are ranks."""
    config.addinivalue_line("markers", "mpi_limit(seconds): time that this test has under MPI")
    if config.getoption("only_mpi", False) or config.getoption("with_mpi", False):
        config.pluginmanager.register(Together(config), "hpctrain-together")


class Together:
    """The hooks of a run in which all ranks take part. Live: it owns the watchdog and counts what passed."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD.Dup()  # no message of a test can be mistaken for one of ours
        self.watchdog = Watchdog(self.comm)
        self.verdict = Verdict(self.comm, self.watchdog, float(config.getini("mpi_patience_seconds")))
        self.limit_seconds = float(config.getini("mpi_limit_seconds"))
        self.passed = 0
        if self.comm.rank:
            _silence(config)

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        """Collect, and stop when the ranks did not find the same tests."""
        with self.watchdog.limit("the collection of tests", self.limit_seconds):
            try:
                return (yield)
            finally:
                self._compare_tests(session)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Run one test within its limit."""
        mark = item.get_closest_marker("mpi_limit")
        with self.watchdog.limit(item.nodeid, mark.args[0] if mark else self.limit_seconds):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Turn this rank's report into that of all ranks."""
        report = yield
        self.verdict.agree(report)
        self.passed += report.when == "call" and report.passed
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A run in which every test was skipped has shown nothing, and says so by its exit code."""
        if exitstatus == pytest.ExitCode.OK and not self.passed:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED

    def pytest_unconfigure(self) -> None:
        """Let the job end by itself."""
        self.watchdog.close()

    def _compare_tests(self, session: pytest.Session) -> None:
        names = "\n".join(item.nodeid for item in getattr(session, "items", []))
        found = (session.testsfailed, hashlib.sha256(names.encode()).hexdigest())
        if len(set(self.comm.allgather(found))) > 1:
            pytest.exit("the ranks found different tests, or could not import them alike", pytest.ExitCode.USAGE_ERROR)


def _silence(config: pytest.Config) -> None:
    """Send this rank's report nowhere; plugins still find a reporter to write to."""
    manager = config.pluginmanager
    manager.unregister(name="terminalreporter")
    nowhere = open(os.devnull, "w")  # open until the process ends, as the stream it stands for
    manager.register(TerminalReporter(config, nowhere), "terminalreporter")
