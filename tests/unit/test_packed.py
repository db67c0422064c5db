"""Long lists of numbers as short ones, and back."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plan.packed import pack, unpack


@given(st.lists(st.integers(0, 5)) | st.permutations(range(12)))
def test_numbers_come_back_from_what_they_were_packed_to(numbers: list[int]) -> None:
    assert unpack(json.loads(json.dumps(pack(numbers)))) == numbers


def test_blocks_turns_and_transposed_grids_of_many_ranks_are_short() -> None:
    blocks = [rank // 8 for rank in range(131_072)]
    turns = [rank % 16_384 for rank in range(131_072)]
    grid = [row * 8 + column for column in range(8) for row in range(16_384)]
    assert [len(json.dumps(pack(numbers))) < 200 for numbers in (blocks, turns, grid)] == [True] * 3
