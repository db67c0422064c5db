"""Recomputation: equal gradients, the same dropout, and fewer bytes kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks

from hpctrain.config import ModelConfig, parse
from hpctrain.errors import ConfigError
from hpctrain.model.init import initialise
from hpctrain.model.noise import Noise
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.recompute import KINDS, Aside, recompute
from hpctrain.plan.weights import ModelShape

KNOBS = ["none", "selective", "every:2", "full", "offload"]
LENGTH = 24


def model_of(kind: str, dtype: torch.dtype = torch.float32, **knobs) -> Transformer:
    shape = ModelShape.of(ModelConfig(layers=4, width=32, heads=4, sequence=LENGTH, dropout=0.2, **knobs), 50)
    model = Transformer(shape).to(dtype)
    initialise(model, shape, seed=1)
    recompute(model, kind)
    return model


def tokens_of() -> torch.Tensor:
    return torch.randint(50, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def loss_of(model: Transformer, documents: torch.Tensor | None = None, step: int = 1) -> torch.Tensor:
    return model.loss(tokens_of(), tokens_of().roll(-1, 1), documents, Noise(7, step, (0, 1, 2)), balanced=True)[0]


def course(kind: str, documents: torch.Tensor | None = None, **knobs) -> list[torch.Tensor]:
    """The loss, then all gradients of two micro-batches."""
    model = model_of(kind, **knobs)
    losses = [loss_of(model, documents, step) for step in range(2)]
    for loss in losses:
        loss.backward()
    return [*(loss.detach() for loss in losses), *(parameter.grad for parameter in model.parameters())]


def kept_bytes(act: Callable[[], torch.Tensor], model: Transformer) -> int:
    """What the graph keeps beside the weights; memory that is saved twice counts once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def put(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(put, lambda tensor: tensor):
        loss = act()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_every_kind_is_tried_here() -> None:
    assert {kind.partition(":")[0] for kind in KNOBS} == set(KINDS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral"])
@pytest.mark.parametrize("kind", KNOBS[1:])
def test_loss_and_gradients_are_bit_for_bit_those_without_it(kind: str, family: str, dtype: torch.dtype) -> None:
    expected = course("none", family=family, dtype=dtype)
    found = course(kind, family=family, dtype=dtype)
    assert all(map(torch.equal, found, expected))
    assert all(bool(one.any()) for one in found)


@pytest.mark.parametrize("kind", KNOBS[1:])
def test_attention_within_documents_is_recomputed_alike(kind: str) -> None:
    documents = torch.arange(LENGTH).div(7, rounding_mode="floor").expand(3, -1)
    assert all(map(torch.equal, course(kind, documents, kv_heads=2), course("none", documents, kv_heads=2)))


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 9))
def test_any_distance_between_recomputed_blocks_gives_the_same_gradients(every: int) -> None:
    assert all(map(torch.equal, course(f"every:{every}"), course("none")))


def test_dropout_repeats_its_numbers_and_leaves_torchs_own_alone() -> None:
    torch.manual_seed(3)
    drawn = torch.random.get_rng_state()
    course("full")
    assert torch.equal(torch.random.get_rng_state(), drawn)
    model = model_of("full")
    losses = [loss_of(model, step=step).item() for step in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_each_kind_keeps_fewer_bytes_than_the_one_before() -> None:
    models = [model_of(kind) for kind in KNOBS]
    kept = [kept_bytes(lambda model=model: loss_of(model), model) for model in models]
    assert kept == sorted(kept, reverse=True) and len(set(kept)) == len(kept)


def test_a_mask_is_kept_once_for_all_blocks() -> None:
    model, documents = model_of("none"), torch.zeros(3, LENGTH, dtype=torch.int64)
    more = kept_bytes(lambda: loss_of(model, documents), model) - kept_bytes(lambda: loss_of(model), model)
    assert more == 3 * LENGTH * LENGTH * 4


def test_a_recomputed_block_keeps_its_input_alone() -> None:
    models = {kind: model_of(kind, family="llama") for kind in ("full", "offload")}
    kept = {kind: kept_bytes(lambda model=model: loss_of(model), model) for kind, model in models.items()}
    assert kept["full"] - kept["offload"] == 4 * (3 * LENGTH * 32) * 4  # layers x elements x bytes


def test_what_is_laid_aside_comes_back_as_it_was_even_if_its_memory_was_used_again() -> None:
    store = Aside(set())
    values = torch.arange(12.0).view(3, 4)
    expected = values.clone()
    saved = [store.put(values), store.put(values.t()[1:]), store.put(values[2])]
    values.fill_(-1)
    found = [store.get(one) for one in saved]
    assert all(map(torch.equal, found, [expected, expected.t()[1:], expected[2]]))
    assert found[1].stride() == values.t()[1:].stride()


def test_memory_that_two_tensors_share_is_laid_aside_once() -> None:
    store, x = Aside(set()), torch.ones(4, 4)
    assert store.put(x)[0] is store.put(x.t())[0]


def test_what_is_to_stay_is_not_laid_aside() -> None:
    weight = torch.ones(3)
    store = Aside({weight.untyped_storage().data_ptr()})
    assert store.put(weight[1:]).data_ptr() == weight[1:].data_ptr()


def test_the_mask_that_all_blocks_share_stays_and_those_of_dropout_go(monkeypatch: pytest.MonkeyPatch) -> None:
    put, stayed, went = Aside.put, set(), []

    def told(self: Aside, tensor: torch.Tensor) -> torch.Tensor | tuple:
        saved = put(self, tensor)
        if saved is tensor and tensor.shape[-1] == LENGTH:
            stayed.add((tensor.data_ptr(), tensor.numel()))
        if saved is not tensor and tensor.dtype == torch.bool:
            went.append(tuple(tensor.shape))
        return saved

    monkeypatch.setattr(Aside, "put", told)
    loss_of(model_of("offload"), torch.zeros(3, LENGTH, dtype=torch.int64))
    assert [size for _, size in stayed] == [3 * LENGTH * LENGTH] and went == [(3, LENGTH, 32)] * 8


def test_parameters_keep_their_names_and_validation_its_loss() -> None:
    names = [name for name, _ in model_of("none").named_parameters()]
    plain = model_of("none").loss(tokens_of(), tokens_of())[0]
    for kind in KNOBS[1:]:
        model = model_of(kind)
        assert [name for name, _ in model.named_parameters()] == names and list(model.state_dict()) == names
        with torch.no_grad():
            assert torch.equal(model.loss(tokens_of(), tokens_of())[0], plain)


@pytest.mark.parametrize("kind", ["all", "every", "every:0", "every:x", "full:2"])
def test_a_kind_that_there_is_not_is_refused_with_those_that_there_are(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"train.recompute = '{kind}' cannot be") as told:
        parse({}, (f"train.recompute={kind}",))
    assert "every:K" in told.value.mend
