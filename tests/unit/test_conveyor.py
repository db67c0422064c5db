"""The conveyor: what is gathered when, how much of it is alive, and what happens when the order changes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.comm.group import Handle, SoloGroup
from hpctrain.errors import HpctrainError
from hpctrain.parallel.zero import Sharded, shard

WIDTH = 4
UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Recorder(SoloGroup):
    """A group of one that writes down which unit is gathered, by its number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[object] = []

    def _all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], later: bool) -> Handle:
        self.events.append(out.data_ptr())
        return super()._all_gather(out, x, sizes, later)


class Tower(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, used: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
        for index in used:
            x = torch.tanh(self.layers[index](x))
        return x.sum()


class Watched:
    """A shared tower, and what its conveyor did in a step: ``+2`` gathered unit 2, ``2`` ran it."""

    def __init__(self, gather_bytes: int | None = None, stage: int = 3) -> None:
        self.model = Tower()
        self.sharded: Sharded = shard(self.model, SoloGroup(), stage, gather_bytes=gather_bytes)
        self.events: list[str] = []
        self.alive = 0
        for index, part in enumerate(self.sharded.parts):
            self._watch(index, part)

    def _watch(self, index: int, part) -> None:
        show, hide, layer = part.show, part.hide, self.model.layers[index]

        def shown() -> None:
            self.events.append(f"+{index}")
            show()
            self.alive = max(self.alive, sum(p.full.nbytes for p in self.sharded.parts if p.whole))

        def hidden() -> None:
            self.events.append(f"-{index}")
            hide()

        part.show, part.hide = shown, hidden
        layer.register_forward_hook(lambda *_: self.events.append(str(index)))
        layer.weight.register_post_accumulate_grad_hook(lambda _: self.events.append(f"g{index}"))

    def step(self, used: Sequence[int] = (0, 1, 2, 3)) -> str:
        self.events.clear()
        self.sharded.begin()
        with self.sharded.reducing():
            self.model(torch.ones(1, WIDTH), used).backward()
        self.sharded.finish()
        return " ".join(self.events)


class Nested(nn.Module):
    """Two layers, the second inside of the first one or after it, which comes to the same."""

    nests = True

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Module()
        self.outer.layer, self.outer.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer.forward = self._outer

    def _outer(self, x: Tensor) -> Tensor:
        x = self.outer.layer(x)
        return self.outer.inner(x) if self.nests else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(x)
        return x if self.nests else self.outer.inner(x)


def train(sharded: Sharded, x: Tensor) -> Tensor:
    """Take a step that updates nothing, and give what the model made."""
    sharded.begin()
    made = sharded.module(x)
    with sharded.reducing():
        made.sum().backward()
    sharded.finish()
    return made.detach()


def places(sharded: Sharded) -> list[int]:
    """Where gathered weights lie on shelves."""
    return sorted({part.full.untyped_storage().data_ptr() for part in sharded.parts if part.shelf})


def gathered(events: str) -> list[str]:
    return [event for event in events.split() if event[0] != "g"]


def test_the_first_step_brings_each_unit_when_it_is_used() -> None:
    told = gathered(Watched().step())
    assert told[:12] == ["+0", "-0", "0", "+1", "-1", "1", "+2", "-2", "2", "+3", "-3", "3"]
    assert told[12:] == ["+3", "-3", "+2", "-2", "+1", "-1", "+0", "-0"]


def test_later_steps_bring_the_next_unit_while_one_runs_and_keep_what_is_used_at_once_again() -> None:
    watched = Watched()
    watched.step()
    told = gathered(watched.step())
    assert told[:10] == ["+0", "+1", "-0", "0", "+2", "-1", "1", "+3", "2", "3"]
    assert told[10:] == ["-3", "+1", "-2", "+0", "-1", "-0"]
    assert watched.alive == 2 * UNIT_BYTES


@pytest.mark.parametrize("units", [1, 2, 3, 4, 5])
def test_after_the_first_step_units_take_turns_in_memory_that_stays(units: int) -> None:
    watched = Watched(gather_bytes=units * UNIT_BYTES)
    assert places(watched.sharded) == []
    watched.step()
    found = places(watched.sharded)
    assert len(found) == min(units, 4)
    watched.step()
    assert places(watched.sharded) == found


def test_units_that_are_in_use_at_once_get_memory_each_time() -> None:
    model = Nested()
    sharded = shard(model, SoloGroup(), 3, units=["outer", "outer.inner"])
    for _ in range(2):
        train(sharded, torch.ones(1, WIDTH))
        assert places(sharded) == []


def test_a_unit_that_is_used_inside_of_another_one_later_on_gets_memory_of_its_own() -> None:
    model = Nested()
    model.nests = False
    sharded = shard(model, SoloGroup(), 3, units=["outer", "outer.inner"], gather_bytes=1)
    train(sharded, torch.ones(1, WIDTH))
    assert len(places(sharded)) == 1
    expected = train(sharded, torch.ones(1, WIDTH))
    model.nests = True
    with torch.no_grad():
        torch.testing.assert_close(model(torch.ones(1, WIDTH)), expected)
    torch.testing.assert_close(train(sharded, torch.ones(1, WIDTH)), expected)


def test_a_unit_whose_place_is_taken_while_its_backward_is_to_come_is_an_error() -> None:
    model = Nested()
    model.nests = False
    sharded = shard(model, SoloGroup(), 3, units=["outer", "outer.inner"], gather_bytes=1)
    train(sharded, torch.ones(1, WIDTH))
    sharded.begin()
    once = model(torch.ones(1, WIDTH))
    model.nests = True
    with pytest.raises(HpctrainError, match=r"'outer.inner' is used inside of unit 'outer', which it was not"):
        model(once)


@pytest.mark.parametrize("units", [1, 2, 3])
def test_no_more_is_alive_than_there_is_room_for(units: int) -> None:
    watched = Watched(gather_bytes=units * UNIT_BYTES)
    for _ in range(3):
        watched.step()
    assert watched.alive == units * UNIT_BYTES


def test_another_order_is_brought_on_demand_after_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.step()
    with caplog.at_level(logging.WARNING):
        for used in ((0, 2, 1, 3), (3, 2), (0, 1, 2, 3)):
            told = watched.step(used)
            assert sum(event == f"+{used[-1]}" for event in told.split()) >= 1
    assert [record.getMessage() for record in caplog.records] == [
        "unit 'layers.2' is used where the first step used another one: weights are no longer gathered ahead of their"
        " use, which is slower"
    ]
    assert gathered(told)[:3] == ["+0", "-0", "0"]


def test_resident_weights_are_brought_once_an_update() -> None:
    group = Recorder()
    sharded = shard(Tower(), group, 1)
    x = torch.ones(1, WIDTH)
    for _ in range(2):
        sharded.begin()
        assert len(group.events) == 4  # also where this rank will use none of them
        for last in (False, True):
            with sharded.reducing(last):
                sharded.module(x).backward()
        with torch.no_grad():
            sharded.module(x)
        assert len(group.events) == 4
        sharded.finish()
        group.events.clear()
    with torch.no_grad():
        sharded.module(x)
        sharded.module(x)
    assert len(group.events) == 4


def test_weights_that_are_away_are_nan_and_come_back_for_a_look() -> None:
    watched = Watched()
    expected = [torch.full((WIDTH, WIDTH), float(index)) for index in range(4)]
    for part, value in zip(watched.sharded.parts, expected, strict=True):
        part.own[: WIDTH * WIDTH] = value.view(-1)
    assert all(p.isnan().all() for p in watched.model.parameters())
    with watched.sharded.whole() as model:
        assert all(torch.equal(layer.weight, value) for layer, value in zip(model.layers, expected, strict=True))
        model(torch.ones(1, WIDTH))
        assert torch.equal(model.layers[0].weight, expected[0])
    assert all(p.isnan().all() and not p.untyped_storage().nbytes() > 4 for p in model.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_units_find_their_weights(reentrant: bool) -> None:
    torch.manual_seed(0)
    plain, shared = Tower(), Tower()
    shared.load_state_dict(plain.state_dict())
    plain(torch.ones(1, WIDTH)).backward()
    sharded = shard(shared, SoloGroup(), 3)
    for _ in range(2):
        sharded.begin()
        x = torch.ones(1, WIDTH, requires_grad=True)
        for layer in shared.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=reentrant))
        with sharded.reducing():
            x.sum().backward()
        sharded.finish()
        for part, layer in zip(sharded.parts, plain.layers, strict=True):
            torch.testing.assert_close(part.gradient[: WIDTH * WIDTH].view(WIDTH, WIDTH), layer.weight.grad)
