"""Packed: long lists of whole numbers as short ones, for what is written down of every rank of a large job.

Numbers that repeat are told once, with how often; of what is left, numbers at equal distances are told as the first,
the distance and the count. Ranks in blocks, dealt out in turn, or mixed by an order of axes come out as a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

Run = tuple[int, int, int]
"""The first number, the distance to the next, and how many there are."""


def pack(numbers: Sequence[int]) -> list[list[int]]:
    """Two lists that ``unpack`` makes the numbers of again: runs of the different ones, and runs of their repeats."""
    told = [(number, len(list(same))) for number, same in groupby(numbers)]
    values, repeats = [number for number, _ in told], [count for _, count in told]
    return [[part for run in _runs(column) for part in run] for column in (values, repeats)]


def unpack(packed: Sequence[Sequence[int]]) -> list[int]:
    """The numbers that were packed."""
    values, repeats = (_numbers(flat) for flat in packed)
    return [value for value, count in zip(values, repeats, strict=True) for _ in range(count)]


def _runs(numbers: Sequence[int]) -> Iterator[Run]:
    at = 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 0
        stop = at + 1
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        yield numbers[at], step, stop - at
        at = stop


def _numbers(flat: Sequence[int]) -> list[int]:
    runs = zip(*[iter(flat)] * 3, strict=True)
    return [first + step * place for first, step, count in runs for place in range(count)]
