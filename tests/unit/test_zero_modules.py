"""Sharing anybody's module: frozen, empty, odd and unused parameters, what is kept of them, and what they weigh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import Held
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.config import OptimConfig
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.optim.adamw import AdamW
from hpctrain.optim.clip import global_norm, scale_
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.parallel.zero import Formats, Sharded, shard
from hpctrain.plan.mesh import Mesh
from tests.support import saving, threads

STAGES = [0, 1, 2, 3]
OPTIM = OptimConfig(decay=0.1)


class Lot(nn.Module):
    """Layers that a subclass makes, one after another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(self.make()).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().sum()


class Frozen(Lot):
    def make(self) -> list[nn.Module]:
        layers = [nn.Linear(4, 4) for _ in range(3)]
        layers[1].requires_grad_(False)
        layers[2].weight.requires_grad_(False)
        return layers


class Buffers(Lot):
    def make(self) -> list[nn.Module]:
        return [nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 4)]


class Empty(Lot):
    def make(self) -> list[nn.Module]:
        return [nn.Linear(4, 0), nn.Linear(0, 4), nn.Linear(4, 4)]


class NotContiguous(Lot):
    def make(self) -> list[nn.Module]:
        layers = [nn.Linear(4, 4) for _ in range(4)]
        both = torch.randn(8, 4)
        layers[0].weight = nn.Parameter(torch.randn(4, 4).t())
        layers[1].weight, layers[2].weight = nn.Parameter(both[::2]), nn.Parameter(both[1::2])
        layers[3].weight = nn.Parameter(both[4:])
        return layers


class Nested(Lot):
    """Each layer gives a dict, and some of its outputs have no gradient."""

    def make(self) -> list[nn.Module]:
        return [nn.Linear(4, 4) for _ in range(3)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.layers[0](x.detach()).detach().sum()


class Few(Lot):
    """Fewer elements in a unit than there are ranks."""

    def make(self) -> list[nn.Module]:
        return [nn.Linear(4, 1), nn.Linear(1, 4, bias=False), nn.LayerNorm(4)]


KINDS = [Frozen, Buffers, Empty, NotContiguous, Nested, Few]


def batches(steps: int = 3) -> Tensor:
    return torch.randn(steps, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_torch(kind: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """Three steps of plain torch; batch norms see a third of the batch at once, as each of three ranks does."""
    model = kind()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1], "weight_decay": OPTIM.decay},
              {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0}]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.epsilon, foreach=False)
    for x in batches():
        optimizer.zero_grad()
        for third in x.split(2):
            model(third).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def by_us(kind: Callable[[], nn.Module], group: Group, stage: int) -> tuple[Sharded, AdamW]:
    sharded = shard(kind(), group, stage)
    optimizer = AdamW(sharded.flats(), OPTIM, sharded.group)
    for step, x in enumerate(batches()):
        sharded.begin()
        with sharded.reducing():
            sharded.module(x.split(2)[group.rank]).backward()
        sharded.finish()
        optimizer.update(0.01, step)
    return sharded, optimizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks_do_what_torch_does_with_any_parameters(stage: int, kind: type[Lot]) -> None:
    models = [kind() for _ in range(3)]  # made here, since threads share torch's random numbers

    def act(group: Group) -> dict[str, Tensor]:
        sharded, _ = by_us(lambda: models[group.rank], group, stage)
        with sharded.whole() as model:
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    expected = by_torch(kind)
    for found in threads.run(3, act):
        assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in expected.items()}
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", STAGES)
def test_everything_of_the_module_is_kept_and_every_element_once(stage: int) -> None:
    models = [Buffers() for _ in range(3)]
    models[0].layers[0].weight.requires_grad_(False)
    for model in models[1:]:
        model.layers[0].weight.requires_grad_(False)

    def act(group: Group) -> dict[str, tuple[object, Tensor]]:
        sharded, optimizer = by_us(lambda: models[group.rank], group, stage)
        return sharded.state(optimizer)

    ranks, mesh = threads.run(3, act), Mesh((("dp", 3),))
    names = {f"model/{name}" for name in models[0].state_dict()}
    trained = {name for name, p in models[0].named_parameters() if p.requires_grad}
    assert ranks[0].keys() == names | {f"optim/{kind}/{name}" for kind in ("exp_avg", "exp_avg_sq") for name in trained}
    for name in ranks[0]:
        assert len({rank[name][0] for rank in ranks}) == 1
        for rank, (layout, tensor) in enumerate(state[name] for state in ranks):
            start, stop = layout.interval(mesh, rank)
            assert tensor.numel() == stop - start
    running = [state["model/layers.1.running_mean"][1] for state in ranks]
    assert all(torch.equal(one, running[0]) for one in running)  # of the first rank, wherever it is read


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_small_gradients_are_not_lost_in_bf16(stage: int, ranks: int) -> None:
    """1 and then 511 times 2^-9 is 1.998; a sum in bf16 stays at 1."""
    models = [nn.Linear(1, 1, bias=False) for _ in range(ranks)]
    last = 512 // ranks - 1

    def act(group: Group) -> list[float]:
        sharded = shard(models[group.rank], group, stage, formats=Formats(torch.bfloat16))
        sharded.begin()
        for number in range(last + 1):
            one = 2.0**-9 if number or group.rank else 1.0
            with sharded.reducing(last=number == last):
                sharded.module(torch.full((1, 1), one, dtype=torch.bfloat16)).sum().backward()
        sharded.finish()
        return sharded.flats()[0].gradient.tolist()  # of its owner

    found = [gradient for rank in threads.run(ranks, act) for gradient in rank]
    assert found == pytest.approx([1 + 511 * 2**-9] * len(found), abs=1e-6) and found


def test_masters_are_the_weights_before_rounding() -> None:
    model = nn.Linear(7, 5)
    expected = model.weight.detach().clone()
    sharded = shard(model, SoloGroup(), 1, formats=Formats(torch.bfloat16))
    assert torch.equal(sharded.state()["model/weight"][1].view(5, 7), expected)
    with sharded.whole():
        assert torch.equal(model.weight, expected.bfloat16())


@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_is_that_of_all_ranks_together_and_clips_alike_on_each(stage: int) -> None:
    """Two parameters whose gradients are 3 and 4, of which each rank has one where they are shared."""
    models = [nn.Linear(1, 1) for _ in range(2)]

    def act(group: Group) -> tuple[float, dict[str, float]]:
        sharded = shard(models[group.rank], group, stage)
        sharded.begin()
        with sharded.reducing():
            (sharded.module(torch.tensor([[0.75]])).sum() * 2).backward()
        sharded.finish()
        gradients = [flat.gradient for flat in sharded.flats()]
        norm = global_norm(gradients, sharded.group)
        scale_(gradients, norm, 1.0)
        return norm, {p.name: float(f.gradient[p.start]) for f in sharded.flats() for p in f.pieces}

    for norm, clipped in threads.run(2, act):
        assert norm == pytest.approx(5, rel=1e-6)
        assert clipped == pytest.approx({name: {"weight": 0.6, "bias": 0.8}[name] for name in clipped}, rel=1e-6)


class Odd(Empty):
    """Parameters without elements, and one that never meets the loss."""

    def make(self) -> list[nn.Module]:
        self.unused = nn.Linear(4, 4).double()
        return super().make()


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_without_elements_and_unused_ones_are_saved_and_loaded(stage: int, tmp_path: Path) -> None:
    models = [[Odd() for _ in range(3)] for _ in range(2)]

    def act(point: Checkpoint, rank: int) -> list[dict[str, Tensor]]:
        found = []
        for turn in range(2):
            sharded, optimizer = by_us(lambda turn=turn: models[turn][rank], point.group, stage)
            state = {name: Held(*kept) for name, kept in sharded.state(optimizer).items()}
            if turn == 0:
                point.save(3, state, {})
            else:
                for held in state.values():
                    held.tensor.zero_()
                assert point.resume(state) == 3
            found.append({name: held.tensor.clone() for name, held in state.items()})
            assert state["model/layers.0.weight"].layout.shape == (0, 4)
        return found

    for saved, loaded in saving.each(tmp_path, Mesh((("dp", 3),)), act):
        assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert {"model/layers.1.weight", "model/unused.weight", "optim/exp_avg/unused.weight"} < saved.keys()


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_module_with_nothing_to_train_takes_its_steps(stage: int, kind: str) -> None:
    models = [nn.Linear(3, 3).requires_grad_(False) for _ in range(2)]

    def act(group: Group) -> float:
        sharded = shard(models[group.rank], group, stage)
        optimizer = OPTIMIZERS[kind](sharded.flats(), OPTIM, sharded.group)
        sharded.begin()
        with sharded.reducing():
            sharded.module(torch.ones(1, 3, requires_grad=True)).sum().backward()
        sharded.finish()
        optimizer.update(0.1, 0)
        assert not any(optimizer.states().values())
        return global_norm([flat.gradient for flat in sharded.flats()], sharded.group)

    assert threads.run(2, act) == [0.0, 0.0]


# ---- what is chosen


def units_of(module: nn.Module, units: object) -> list[str]:
    return [part.unit.name for part in shard(module, SoloGroup(), 3, units=units).parts if not part.unit.held]


def test_units_are_members_of_lists_or_what_a_user_names() -> None:
    def tower() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.Linear(2, 2))

    assert units_of(tower(), None) == ["1.a"]
    assert units_of(tower(), nn.Linear) == ["0", "1.a", "2"]
    assert units_of(tower(), (nn.Linear, nn.ModuleDict)) == ["0", "1.a", "2"]
    assert units_of(tower(), ["2", "0"]) == ["0", "2"]


def test_a_unit_that_is_not_there_is_refused() -> None:
    with pytest.raises(ShapeError) as caught:
        shard(nn.Linear(2, 2), SoloGroup(), units=["block"])
    assert str(caught.value).split("\n  ") == [
        "the module has no part named 'block'", "a unit is a module inside of it", "see named_modules()",
    ]  # fmt: skip


def test_a_stage_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        shard(nn.Linear(2, 2), SoloGroup(), 4)
    assert str(caught.value).split("\n  ") == ["stage = 4 is none of ZeRO's", "use one of 0, 1, 2, 3"]


def test_decay_is_for_matrices_or_what_a_user_says() -> None:
    def decayed(**more: object) -> list[bool]:
        return [flat.decay for flat in shard(nn.Linear(2, 2), SoloGroup(), 1, **more).flats()]

    assert decayed() == [True, False]
    assert decayed(decay=lambda name, parameter: False) == [False]


def test_a_rank_has_its_pieces_of_each_parameter() -> None:
    def act(group: Group) -> list[tuple[str, int, int, bool]]:
        flats = shard(nn.Linear(3, 2), group, 1).flats()
        assert all(sum(p.stop - p.start for p in flat.pieces) == flat.parameter.numel() for flat in flats)
        return [(p.name, p.first, p.stop - p.start, p.whole) for flat in flats for p in flat.pieces]

    assert threads.run(3, act) == [
        [("weight", 0, 3, False)],
        [("weight", 3, 3, False)],
        [("bias", 0, 2, True)],
    ]
