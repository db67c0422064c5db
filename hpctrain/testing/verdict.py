"""One verdict on a test from the verdicts of all ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.testing.watchdog import Watchdog

if TYPE_CHECKING:
    import pytest
    from _pytest._io import TerminalWriter
    from mpi4py import MPI

OUTCOMES = ("passed", "skipped", "failed")
SAY_SECONDS = 2.0  # ranks that fail alike come within this; else the failure is said before they come


class Failure(NamedTuple):
    """How a test failed on one rank."""

    rank: int
    message: str
    text: str
    sections: Sequence[tuple[str, str]]


class Everywhere:
    """The failures of all ranks in the place of pytest's own account of one, under the names that its reporter uses."""

    def __init__(self, failures: Sequence[Failure], size: int) -> None:
        alike: dict[str, list[Failure]] = {}
        for failure in failures:
            alike.setdefault(failure.message, []).append(failure)
        parts = [(f"failed on {_ranks([one.rank for one in same])} of {size}", same[0]) for same in alike.values()]
        self.text = "\n\n".join(f"{where}\n{failure.text}" for where, failure in parts)
        where, failure = parts[0]
        self.reprcrash = SimpleNamespace(message=f"{where}: {failure.message.splitlines()[0]}")

    def __str__(self) -> str:
        return self.text

    def toterminal(self, out: TerminalWriter) -> None:
        """Print every different failure once, in full, under the ranks that had it."""
        out.line(self.text)


class Verdict:
    """Makes the ranks agree on each phase of each test. ``patience`` is how long a failed rank waits for the others."""

    def __init__(self, comm: MPI.Comm, watchdog: Watchdog, patience: float) -> None:
        self.comm, self.watchdog, self.patience = comm, watchdog, patience

    def agree(self, report: pytest.TestReport) -> None:
        """Give ``report`` the outcome that holds for all ranks, and the failures of whichever ranks failed.

        Collective. A test that failed anywhere failed everywhere. One that ran on some ranks and was skipped on
        others passed; but the ranks must set it up alike, because a rank that skips there never reaches the test.
        """
        outcomes = self._gather(report)
        if "failed" in outcomes:
            self._fail(report)
        elif len(set(outcomes)) > 1 and report.when == "setup":
            skipped = [rank for rank, outcome in enumerate(outcomes) if outcome == "skipped"]
            report.outcome = "failed"
            report.longrepr = f"skipped before it began, but only on {_ranks(skipped)}: skip on all ranks or on none"
        elif len(set(outcomes)) > 1:
            report.outcome, report.longrepr = "passed", None

    def _gather(self, report: pytest.TestReport) -> list[str]:
        codes = bytearray(self.comm.size)
        request = self.comm.Iallgather(bytearray([OUTCOMES.index(report.outcome)]), codes)
        began, said = time.monotonic(), False
        while not request.Test():
            time.sleep(0.0005)
            waited = time.monotonic() - began
            if report.failed and not said and waited > SAY_SECONDS:
                self.watchdog.say(f"{report.nodeid} failed here in its {report.when}\n{report.longreprtext}")
                said = True
            if report.failed and waited > self.patience:
                self.watchdog.end(f"{report.nodeid} failed here, and other ranks did not come to its end")
        return [OUTCOMES[code] for code in codes]

    def _fail(self, report: pytest.TestReport) -> None:
        own = _failure(self.comm.rank, report) if report.failed else None
        failures = [failure for failure in self.comm.allgather(own) if failure]
        report.outcome = "failed"
        report.longrepr = Everywhere(failures, self.comm.size)
        report.sections = [(f"{name} (rank {rank})", text) for rank, _, _, kept in failures for name, text in kept]


def _failure(rank: int, report: pytest.TestReport) -> Failure:
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else report.longreprtext or "it said nothing"
    return Failure(rank, message, report.longreprtext, report.sections)


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
