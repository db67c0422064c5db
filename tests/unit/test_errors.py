"""The tree of errors: three lines each, and an exit code."""

from __future__ import annotations

import pickle

import pytest

from hpctrain import errors
from hpctrain.errors import CheckpointError, CommError, HpctrainError, IncompleteError, LateError, UsageError

CLASSES = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, HpctrainError)]


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("what", "why", "mend"), "what\n  why\n  mend"),
        (("what", "", "mend"), "what\n  mend"),
        (("what", "why"), "what\n  why"),
        (("what",), "what"),
    ],
)
def test_a_message_has_a_line_for_each_part_that_there_is(parts: tuple[str, ...], text: str) -> None:
    error = HpctrainError(*parts)
    assert str(error) == text
    assert (error.what, error.why, error.mend) == (*parts, "", "")[:3]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_keeps_its_parts_on_its_way_to_another_process(kind: type[HpctrainError]) -> None:
    again = pickle.loads(pickle.dumps(kind("what", "why", "mend")))
    assert type(again) is kind and str(again) == "what\n  why\n  mend"


@pytest.mark.parametrize("kind", CLASSES)
def test_wrong_use_exits_with_2_and_all_else_with_1(kind: type[HpctrainError]) -> None:
    assert kind.exit_code == (2 if issubclass(kind, UsageError) else 1)


@pytest.mark.parametrize("kind", CLASSES)
def test_the_tree_in_the_docstring_is_the_tree(kind: type[HpctrainError]) -> None:
    assert kind.__name__ in errors.__doc__
    assert kind.__doc__ and kind.__doc__.endswith(".")


def test_narrow_errors_are_caught_by_their_wide_names() -> None:
    assert issubclass(LateError, CommError) and issubclass(IncompleteError, CheckpointError)
