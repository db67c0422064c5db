"""Parallel layers one by one: their gradients, how often ranks talk, and what they compute meanwhile."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group, Handle, SoloGroup
from hpctrain.parallel import linear
from hpctrain.parallel.linear import ColumnLinear, Room, RowLinear
from tests.support import threads
from tests.support.layers import LAYERS, check
from tests.support.tensors import Case, run

BIG = 100  # elements: collectives of fewer are not of activations


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_gradients_are_those_of_one_rank(name: str, sequence: bool, ranks: int) -> None:
    threads.run(ranks, lambda group: check(name, sequence, group))


@pytest.mark.parametrize("sequence", [False, True])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(sequence: bool) -> None:
    def rank(group: Group) -> None:
        first, last = ColumnLinear(6, 8, True, group, sequence), RowLinear(8, 6, True, group, sequence)
        for one in (*first.parameters(), *last.parameters()):
            torch.nn.init.constant_(one, 0.1)
        found = []
        for frozen in (False, True):
            first.weight.requires_grad_(not frozen)
            last.bias.requires_grad_(not frozen)
            x = torch.ones(4, 6, requires_grad=not frozen)
            last(first(x)).square().sum().backward()
            found.append((last.weight.grad.clone(), first.bias.grad.clone()))
            assert (x.grad is None) == frozen
            for one in (*first.parameters(), *last.parameters()):
                one.grad = None
        assert all(map(torch.equal, *found))

    threads.run(2, rank)


# ---- what ranks say, and when ----------------------------------------------------------------------------------------


class Told(Handle):
    """A handle that tells when it is waited for."""

    def __init__(self, events: list[str], what: str, inner: Handle) -> None:
        self._events, self._what, self._inner = events, what, inner

    def wait(self) -> None:
        self._events.append(f"end {self._what}")
        self._inner.wait()


class Telling(threads.ThreadGroup):
    """A group that keeps what it was asked for: collectives of activations, and others as "small"."""

    def __init__(self, room: threads.Room, rank: int) -> None:
        super().__init__(room, rank)
        self.events: list[str] = []

    def all_reduce(self, x: Tensor, *more: Any, later: bool = False) -> Handle:
        return self._told("all_reduce", x, later, super().all_reduce(x, *more))

    def all_gather(self, out: Tensor, x: Tensor, *, later: bool = False, **more: Any) -> Handle:
        return self._told("all_gather", out, later, super().all_gather(out, x, **more))

    def reduce_scatter(self, out: Tensor, x: Tensor, *more: Any, later: bool = False, **named: Any) -> Handle:
        return self._told("reduce_scatter", x, later, super().reduce_scatter(out, x, *more, **named))

    def _told(self, what: str, x: Tensor, later: bool, handle: Handle) -> Handle:
        what = what if x.numel() >= BIG else f"small {what}"
        self.events.append(f"begin {what}")
        if later:
            return Told(self.events, what, handle)
        self.events.append(f"end {what}")
        return handle


EXPECTED = {
    # forward, then backward; a model has one collective of activations before the blocks and one behind them
    False: ({"all_reduce": 2}, {"all_reduce": 2}),
    True: ({"all_gather": 2, "reduce_scatter": 2}, {"all_gather": 4, "reduce_scatter": 2}),
}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_block_has_two_sums_forwards_and_two_backwards(family: str, sequence: bool) -> None:
    counts = [talk(Case(dict(family=family, layers=layers), sequence)) for layers in (1, 3)]
    for passed, expected in zip(zip(*counts, strict=True), EXPECTED[sequence], strict=True):
        less, more = passed
        assert {what: (more[what] - less[what]) / 2 for what in more if what in expected} == expected
        small = (more - less).keys() - expected.keys()
        assert small <= {"small all_reduce"}
        assert (more["small all_reduce"] - less["small all_reduce"]) / 2 in ([0, 2] if sequence else [0])


def talk(case: Case) -> tuple[Counter[str], Counter[str]]:
    """How many collectives of each kind begin in the forward and in the backward of one micro-batch."""

    def rank(group: Telling, copies: Group) -> tuple[Counter[str], Counter[str]]:
        model = case.shared(group, copies)
        tokens = torch.zeros(3, 7, dtype=torch.int64)
        loss, _ = model.loss(tokens, tokens)
        forward, group.events = begun(group.events), []
        loss.backward()
        return forward, begun(group.events)

    first, second = run(case, 2, rank, Telling)
    assert first == second
    return first


def begun(events: list[str]) -> Counter[str]:
    return Counter(event.removeprefix("begin ") for event in events if event.startswith("begin"))


BACKWARD = {
    False: ["input gradient", "begin all_reduce", "weight gradient", "weight gradient", "end all_reduce"],
    True: [
        "begin all_gather", "input gradient", "begin reduce_scatter", "end all_gather",
        "weight gradient", "weight gradient", "end reduce_scatter",
    ],
}  # fmt: skip


@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_talk_while_they_compute_gradients(sequence: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    here = threading.local()
    for name in ("input_gradient", "weight_gradient"):
        monkeypatch.setattr(linear, name, partial(told, here, name, getattr(linear, name)))

    def rank(group: Telling, copies: Group) -> list[str]:
        maps = [ColumnLinear(20, 12, True, group, sequence) for _ in range(2)]
        x = torch.ones(5 if sequence else 10, 20, requires_grad=True)
        outputs = linear.column(x, maps, 10)
        here.events = group.events = []
        torch.autograd.backward(outputs, [torch.ones_like(one) for one in outputs])
        return group.events

    assert run(Case(), 2, rank, Telling) == [BACKWARD[sequence]] * 2


def told(here: threading.local, name: str, act: Callable[..., Tensor], *given: Any) -> Tensor:
    here.events.append(name.replace("_", " "))
    return act(*given)


# ---- where activations lie on their way ------------------------------------------------------------------------------


def test_what_was_gathered_stays_until_the_next_gathering_but_one() -> None:
    room, x = Room(SoloGroup()), torch.zeros(2, 3)
    places = [room.gathered(4, x) for _ in range(4)]
    assert [place.shape for place in places] == [(4, 3)] * 4
    first, second, *again = (place.data_ptr() for place in places)
    assert first != second and again == [first, second]
    places[0].fill_(1.0)
    assert not places[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_places_grow_with_what_is_to_lie_there(dtype: torch.dtype) -> None:
    room = Room(SoloGroup())
    for tokens in (2, 5, 3):
        x = torch.ones(tokens, 3, dtype=dtype)
        assert (room.gathered(2 * tokens, x).shape, room.summed(x, x.t()).shape) == ((2 * tokens, 3), (tokens, tokens))
        assert room.gathered(tokens, x).dtype == room.summed(x, x.t()).dtype == dtype


def test_ranks_that_share_no_memory_gather_in_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    group, asked = SoloGroup(), []
    monkeypatch.setattr(group, "common", lambda *size: asked.append(size))
    room, x = Room(group), torch.zeros(2, 3)
    first, second = room.gathered(4, x), room.gathered(400, x)
    assert first.data_ptr() != second.data_ptr()
    assert asked == [(2 * 12, torch.float32)]  # once, as asking is collective
