"""The transformer: its parameters, what each token may see, its loss, and its dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import ModelConfig
from hpctrain.errors import ShapeError
from hpctrain.model.attention import rotate
from hpctrain.model.frame import Tokens
from hpctrain.model.init import initialise
from hpctrain.model.loss import IGNORE, ROWS, cross_entropy
from hpctrain.model.noise import Noise, number
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import FAMILIES, ModelShape, weights

VOCABULARY, LENGTH = 50, 12
SHAPES = [
    dict(family="gpt2"),
    dict(family="llama"),
    dict(family="llama", kv_heads=2),
    dict(family="gpt2", kv_heads=1, tied=False),
    dict(family="llama", tied=True, mlp_width=40),
    dict(family="qwen2", kv_heads=2),
    dict(family="qwen3", kv_heads=2, head_dim=6, rope_scaling=(4, 1, 4, 6)),
]
every_shape = pytest.mark.parametrize("knobs", SHAPES, ids=lambda knobs: "-".join(str(v) for v in knobs.values()))
every_family = pytest.mark.parametrize("knobs", [dict(family=family) for family in FAMILIES], ids=list(FAMILIES))


def shape_of(**knobs) -> ModelShape:
    return ModelShape.of(ModelConfig(layers=2, width=32, heads=4, sequence=LENGTH, init_std=0.2, **knobs), VOCABULARY)


def model_of(**knobs) -> Transformer:
    shape = shape_of(**knobs)
    model = Transformer(shape).double()
    initialise(model, shape, seed=1)
    return model


def tokens_of(rows: int = 3, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))


def gradients(model: Transformer) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


@every_shape
def test_the_parameters_are_those_of_the_list_of_weights(knobs):
    shape = shape_of(**knobs)
    with torch.device("meta"):
        model = Transformer(shape)
    assert [(n, tuple(p.shape)) for n, p in model.named_parameters()] == [(w.name, w.shape) for w in weights(shape)]
    assert not list(model.buffers())


@every_shape
def test_a_token_sees_itself_and_those_before_it_and_no_other(knobs):
    model, tokens = model_of(**knobs), tokens_of()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % VOCABULARY
    moved = (model(tokens) != model(changed)).any(-1)
    assert not moved[:, :7].any() and moved[:, 7:].all()


@every_shape
def test_with_documents_a_token_sees_only_its_own(knobs):
    model, tokens = model_of(**knobs), tokens_of()
    documents = torch.tensor([0] * 5 + [1] * 4 + [0] * 3).expand_as(tokens)
    documents = documents + torch.tensor([0] * 9 + [2] * 3)
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % VOCABULARY
    moved = (model(tokens, documents) != model(changed, documents)).any(-1)
    assert moved[:, 3:5].all() and not moved[:, :3].any() and not moved[:, 5:].any()


@every_shape
def test_one_document_is_the_same_as_none_named(knobs):
    model, tokens = model_of(**knobs), tokens_of()
    torch.testing.assert_close(model(tokens, torch.zeros_like(tokens)), model(tokens), rtol=1e-12, atol=1e-12)


@every_shape
def test_every_parameter_gets_a_gradient_that_agrees_with_small_steps(knobs):
    model, tokens, targets = model_of(**knobs), tokens_of(), tokens_of().roll(1, 1)
    make = torch.Generator().manual_seed(1)
    model.loss(tokens, targets)[0].backward()
    for name, gradient in gradients(model).items():
        parameter, way = model.get_parameter(name), torch.randn(gradient.shape, dtype=gradient.dtype, generator=make)
        way /= way.norm()
        losses = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(way, alpha=step)
                losses.append(model.loss(tokens, targets)[0])
                parameter.sub_(way, alpha=step)
        slope = (losses[0] - losses[1]) / 2e-5
        assert gradient.any(), name
        torch.testing.assert_close((gradient * way).sum(), slope, rtol=1e-5, atol=1e-6, msg=name)


@every_shape
def test_rows_do_not_mix_and_their_gradients_add_up(knobs):
    model, tokens, targets = model_of(**knobs), tokens_of(4), tokens_of(4).roll(1, 1)
    model.loss(tokens, targets)[0].backward()
    whole = gradients(model)
    for part in (slice(0, 1), slice(1, 4)):
        model.loss(tokens[part], targets[part])[0].backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-10, atol=1e-12)


@every_shape
def test_gradients_lie_in_memory_as_their_parameters_do(knobs):
    model, tokens = model_of(**knobs), tokens_of()
    strides = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: strides.update({name: gradient.stride()}))
    model.loss(tokens, tokens)[0].backward()
    assert strides == {name: parameter.stride() for name, parameter in model.named_parameters()}


@every_family
def test_single_and_double_precision_agree(knobs):
    double, tokens = model_of(**knobs), tokens_of()
    single = Transformer(double.shape)
    single.load_state_dict(double.state_dict())
    assert single(tokens).dtype == torch.float32
    torch.testing.assert_close(single(tokens).double(), double(tokens), rtol=1e-4, atol=1e-4)


def test_more_tokens_than_learned_positions_are_refused_with_their_mend():
    with pytest.raises(ShapeError, match=f"has {LENGTH + 1} tokens, but the model has learned {LENGTH} pos") as told:
        model_of(family="gpt2")(tokens_of(1, LENGTH + 1))
    assert "longer model.sequence" in told.value.mend


def test_rotary_positions_go_on_beyond_the_trained_length():
    assert model_of(family="llama")(tokens_of(1, LENGTH + 9)).isfinite().all()


# ---- rotary positions --------------------------------------------------------------------------------------------


def test_rotation_keeps_lengths_and_products_depend_only_on_distance():
    q, k = torch.randn(2, 8, dtype=torch.float64)
    many = rotate(torch.stack([q, k]).expand(30, 2, 8)[None], base=100.0)[0]  # [position, which, E]
    torch.testing.assert_close(many.norm(dim=-1), torch.stack([q.norm(), k.norm()]).expand(30, 2))
    products = many[:, 0] @ many[:, 1].T
    for distance in range(-29, 30):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(products[0, 1:], products[0, :1].expand(29))


def test_rotation_has_the_gradient_of_its_formula():
    x = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, 100.0), (x,))


# ---- loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, 2 * ROWS + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_and_its_gradients_are_those_of_torch(rows, dtype):
    make = torch.Generator().manual_seed(rows)
    hidden, weight = (torch.randn(n, 16, dtype=dtype, generator=make).requires_grad_() for n in (rows, 40))
    targets = torch.randint(40, (rows,), generator=make)
    targets[::3] = IGNORE
    ours, count = cross_entropy(hidden, weight, targets)
    theirs = F.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    tolerance = dict(rtol=1e-4, atol=1e-4) if dtype == torch.float32 else dict(rtol=1e-12, atol=1e-12)
    assert ours.dtype == torch.float64 and count == (targets != IGNORE).sum()
    torch.testing.assert_close(ours.to(dtype), theirs, **tolerance)
    for a, b in zip(*(torch.autograd.grad(l * 0.3, (hidden, weight)) for l in (ours, theirs)), strict=True):  # noqa: E741
        torch.testing.assert_close(a, b, **tolerance)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(hidden, weight, targets)[0], ours, rtol=1e-12, atol=0)


def loss_of_torch(hidden, weight, targets, smoothing, z_loss):
    logits = hidden @ weight.T
    levels = logits.logsumexp(-1)[targets != IGNORE]
    cross = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
    return cross + z_loss * levels.square().sum()


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 0.01), (0.3, 0.1)])
def test_label_smoothing_and_z_loss_are_those_of_their_formulas(smoothing, z_loss):
    make = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 16, dtype=torch.double, generator=make).requires_grad_() for n in (ROWS + 9, 40))
    targets = torch.randint(40, (ROWS + 9,), generator=make)
    targets[::3] = IGNORE
    ours, _ = cross_entropy(hidden, weight, targets, smoothing, z_loss)
    theirs = loss_of_torch(hidden, weight, targets, smoothing, z_loss)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    for a, b in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(cross_entropy(hidden, weight, targets, smoothing, z_loss)[0], ours)


def test_a_micro_batch_without_any_target_has_loss_zero_and_gradients_zero():
    model, tokens = model_of(family="gpt2"), tokens_of()
    loss, count = model.loss(tokens, torch.full_like(tokens, IGNORE))
    loss.backward()
    assert loss == 0 and count == 0
    assert not any(gradient.any() for gradient in gradients(model).values())


def test_large_logits_do_not_overflow():
    hidden, weight = torch.full((1, 1), 1e4, requires_grad=True), torch.tensor([[1.0], [-1.0]])
    loss, _ = cross_entropy(hidden, weight, torch.tensor([1]))
    assert loss == 2e4


def test_a_second_backward_pass_is_an_error_and_not_a_wrong_gradient():
    model, tokens = model_of(family="gpt2"), tokens_of()
    loss, _ = model.loss(tokens, tokens)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- dropout -----------------------------------------------------------------------------------------------------


def test_without_dropout_noise_changes_nothing():
    model, tokens = model_of(family="gpt2"), tokens_of()
    assert torch.equal(model(tokens, noise=Noise(1, 2, (0, 1, 2))), model(tokens))


def test_without_noise_nothing_is_dropped():
    tokens = tokens_of()
    assert torch.equal(model_of(family="gpt2", dropout=0.3)(tokens), model_of(family="gpt2")(tokens))


@every_family
@given(cut=st.integers(1, 3), step=st.integers(0, 9))
def test_every_cut_of_a_batch_drops_the_same(knobs, cut, step):
    model, tokens = model_of(dropout=0.3, **knobs), tokens_of(4)
    whole = model(tokens, noise=Noise(1, step, (6, 7, 8, 9)))
    parts = [model(tokens[:cut], noise=Noise(1, step, (6, 7, 8, 9)[:cut]))]
    parts += [model(tokens[cut:], noise=Noise(1, step, (6, 7, 8, 9)[cut:]))]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-10, atol=1e-12)


@given(rows=st.integers(1, 4), length=st.integers(1, 9), data=st.data())
def test_a_part_of_the_tokens_drops_what_the_whole_would(rows, length, data):
    noise, x = Noise(1, 2, tuple(range(rows))), torch.ones(rows, length, 16)
    start = data.draw(st.integers(0, rows * length))
    stop = data.draw(st.integers(start, rows * length))
    whole = noise.drop(x, 0.5, "a").flatten(0, 1)
    part = noise.drop(x.flatten(0, 1)[start:stop], 0.5, "a", Tokens(rows, length, start, stop))
    assert torch.equal(part, whole[start:stop])


def test_other_seeds_steps_samples_and_sites_drop_other_elements():
    x = torch.ones(1, 64, 64)
    masks = [Noise(*key, (sample,)).drop(x, 0.5, site).bool() for key, sample, site in KEYS]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert 0.4 < (mask == other).double().mean() < 0.6


KEYS = [((1, 1), 1, "a"), ((2, 1), 1, "a"), ((1, 2), 1, "a"), ((1, 1), 2, "a"), ((1, 1), 1, "b"), ((1, 11), 1, "a")]


def test_dropout_drops_its_part_and_keeps_the_mean():
    x = Noise(1, 1, (0, 1)).drop(torch.ones(2, 200, 200, dtype=torch.float64), 0.2, "a")
    assert set(x.unique().tolist()) == {0.0, 1.25}
    assert abs(x.mean() - 1) < 0.01


def test_single_and_double_precision_drop_the_same():
    masks = [Noise(1, 1, (0,)).drop(torch.ones(1, 50, 50, dtype=d), 0.5, "a") == 0 for d in (torch.float, torch.double)]
    assert torch.equal(*masks)


def test_rows_without_their_sample_numbers_are_refused_with_their_mend():
    with pytest.raises(ShapeError, match="dropout at embed: 3 rows, but 2 sample numbers") as told:
        model_of(family="gpt2", dropout=0.1)(tokens_of(3), noise=Noise(1, 1, (0, 1)))
    assert "numbers of the samples" in told.value.mend


def test_keys_that_look_alike_have_different_numbers():
    assert len({number("a", 1), number("a1"), number("a", "1"), number(1, "a")}) == 4
