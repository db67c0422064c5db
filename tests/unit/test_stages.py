"""How the stages of ``make test`` are counted, and when one is not in order."""

from __future__ import annotations

from collections import Counter
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

SCRIPT = Path(__file__).resolve().parents[2] / ".ci/test"
SPEC = spec_from_loader("stages", SourceFileLoader("stages", str(SCRIPT)))
stages = module_from_spec(SPEC)
SPEC.loader.exec_module(stages)

NEEDED = stages.Stage("needed", 0, needed=True)
SPARE = stages.Stage("spare", 0, needed=False)
WORDS = ("failed", "passed", "skipped", "error")


@given(st.dictionaries(st.sampled_from(WORDS), st.integers(1, 9999), min_size=1), st.booleans())
def test_the_closing_line_is_counted_whatever_it_names(numbers: dict[str, int], framed: bool) -> None:
    line = ", ".join(f"{number} {word}" for word, number in numbers.items()) + ", 2 warnings in 61.35s (0:01:01)"
    lines = ["tests/unit/test_it.py 3 passed in no time\n", f"=== {line} ===\n" if framed else f"{line}\n", "\n"]
    failed = numbers.get("failed", 0) + numbers.get("error", 0)
    expected = Counter(passed=numbers.get("passed", 0), failed=failed, skipped=numbers.get("skipped", 0))
    assert +stages.tally(lines) == +expected


def test_no_closing_line_counts_as_nothing() -> None:
    assert not stages.tally(["no tests ran in 0.32s\n", "Killed\n"])


@pytest.mark.parametrize(
    ("stage", "code", "counts", "said"),
    [
        (NEEDED, 0, {"passed": 3}, ""),
        (NEEDED, 1, {"passed": 3, "failed": 1}, "failed (exit code 1)"),
        (NEEDED, 139, {"passed": 3}, "failed (exit code 139)"),
        (NEEDED, 1, {}, "failed (exit code 1)"),
        (NEEDED, 124, {}, "did not end in 2400 s"),
        (NEEDED, 0, {"skipped": 3}, "no test ran (exit code 0)"),
        (NEEDED, 5, {}, "no test ran (exit code 5)"),
        (SPARE, 0, {"skipped": 3}, ""),
        (SPARE, 5, {}, ""),
        (SPARE, 1, {"failed": 1}, "failed (exit code 1)"),
    ],
)
def test_a_stage_is_in_order_only_when_it_ran_and_nothing_failed(stage, code, counts, said) -> None:
    assert stages.complaint(stage, code, Counter(counts)) == said


def test_tests_run_beside_each_other_where_their_stage_says_so_up_to_a_limit(monkeypatch) -> None:
    beside = stages.Stage("beside", 0, needed=True, beside=2)
    for cores, workers in ((1, "2"), (2, "4"), (64, "8")):
        monkeypatch.setattr(stages, "CORES", cores)
        assert beside.command[beside.command.index("-n") + 1] == workers
    assert "-n" not in NEEDED.command
