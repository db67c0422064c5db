"""The list of a model's weights: names, shapes, counts, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import ModelConfig
from hpctrain.errors import ConfigError
from hpctrain.plan.rules import RULES
from hpctrain.plan.weights import FAMILIES, ModelShape, block, flops_per_token, parameters, weights

GPT2 = ModelConfig(family="gpt2", layers=12, width=768, heads=12, sequence=1024)
LLAMA_8B = ModelConfig(
    family="llama", layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, sequence=8192, rope_base=5e5
)


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Any shape that a configuration can give."""
    kv_heads, repeats, half = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    config = ModelConfig(
        family=draw(st.sampled_from(sorted(FAMILIES))),
        layers=draw(st.integers(1, 4)),
        width=kv_heads * repeats * half * 2,
        head_dim=draw(st.sampled_from([None, 2, 6])),
        heads=kv_heads * repeats,
        kv_heads=draw(st.sampled_from([None, kv_heads])),
        mlp_width=draw(st.none() | st.integers(1, 50)),
        sequence=draw(st.integers(1, 16)),
        tied=draw(st.sampled_from([None, True, False])),
    )
    if FAMILIES[config.family].experts[0]:
        experts = draw(st.integers(1, 5))
        config = config.model_copy(update={"experts": experts, "experts_per_token": draw(st.integers(1, experts))})
    return ModelShape.of(config, draw(st.integers(1, 40)))


def test_gpt2_has_the_parameters_of_the_published_model():
    assert parameters(ModelShape.of(GPT2, 50257)) == 124_439_808


def test_llama_8b_has_the_parameters_of_the_published_model():
    assert parameters(ModelShape.of(LLAMA_8B, 128256)) == 8_030_261_248


QWEN2 = ModelConfig(family="qwen2", layers=28, width=3584, heads=28, kv_heads=4, mlp_width=18944, sequence=32768)
QWEN3 = ModelConfig(
    family="qwen3", layers=28, width=1024, heads=16, head_dim=128, kv_heads=8, mlp_width=3072, tied=True, sequence=40960
)


def test_qwen_2_7b_and_qwen_3_0_6b_have_the_parameters_of_the_published_models():
    assert parameters(ModelShape.of(QWEN2, 152064)) == 7_615_616_512
    assert parameters(ModelShape.of(QWEN3, 151936)) == 596_049_920


MIXTRAL = ModelConfig(
    family="mixtral", layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, sequence=32768, rope_base=1e6
)


def test_mixtral_8x7b_has_the_parameters_of_the_published_model_and_the_work_of_two_experts():
    shape = ModelShape.of(MIXTRAL, 32000)
    assert (shape.experts, shape.experts_per_token) == (8, 2)
    assert parameters(shape) == 46_702_792_704
    # 12.9 billion of them have to do with a token; its own vector, and the norms, take no product.
    used = 12_879_925_248 - 32000 * 4096 - 65 * 4096
    assert flops_per_token(shape) == 6 * used + 12 * 32 * 4096 * 32768


def test_experts_are_stacked_and_the_router_has_a_row_for_each():
    found = {w.name.removeprefix("blocks.0.mlp."): w.shape for w in block(ModelShape.of(MIXTRAL, 32000), 0)}
    assert found["router.weight"] == (8, 4096)
    assert found["gate.weight"] == found["up.weight"] == found["down.weight"] == (8, 14336, 4096)


def test_experts_of_a_family_that_has_none_are_refused_with_their_mend():
    with pytest.raises(ConfigError, match='model.experts = 4 with model.family = "llama"') as told:
        ModelShape.of(ModelConfig(family="llama", experts=4), 257)
    assert told.value.mend == 'set model.family to "mixtral", or leave model.experts out'


def test_a_token_that_would_go_to_more_experts_than_there_are_is_refused_with_its_mend():
    with pytest.raises(ConfigError, match="model.experts_per_token = 3 is more than model.experts = 2") as told:
        ModelShape.of(ModelConfig(family="mixtral", experts=2, experts_per_token=3), 257)
    assert told.value.mend == "set model.experts_per_token to 2 or less, or model.experts to 3 or more"


def test_heads_may_have_dimensions_of_their_own_number():
    size = {w.name: w.shape for w in weights(ModelShape.of(QWEN3, 300))}
    assert size["blocks.0.attention.query.weight"] == size["blocks.0.attention.out.weight"] == (2048, 1024)
    assert size["blocks.0.attention.key_norm.weight"] == (128,)
    assert (
        flops_per_token(ModelShape.of(QWEN3, 300))
        - 6 * sum(w.size for w in weights(ModelShape.of(QWEN3, 300)) if len(w.shape) == 2)
        == 12 * 28 * 2048 * 40960
    )


def test_what_a_configuration_leaves_open_is_filled_by_the_habit_of_its_family():
    gpt2, llama = (ModelShape.of(ModelConfig(family=family, width=256, heads=4), 300) for family in ("gpt2", "llama"))
    assert (gpt2.kv_heads, gpt2.mlp_width, gpt2.tied, gpt2.vocabulary) == (4, 1024, True, 300)
    assert (llama.kv_heads, llama.mlp_width, llama.tied, llama.vocabulary) == (4, 704, False, 300)


def test_a_chosen_vocabulary_may_be_larger_than_the_tokenizer_needs():
    assert ModelShape.of(ModelConfig(vocabulary=512), 300).vocabulary == 512


@given(shapes())
def test_names_are_unique_and_belong_to_one_of_three_parts(shape):
    names = [weight.name for weight in weights(shape)]
    assert len(set(names)) == len(names)
    assert {name.partition(".")[0] for name in names} == {"embed", "blocks", "head"}
    assert ("head.logits.weight" in names) == (not shape.tied)
    assert ("embed.positions" in names) == (shape.positions == "learned")


@given(shapes())
def test_every_block_has_the_same_weights_but_for_its_number(shape):
    first = [(w.name.removeprefix("blocks.0."), w.shape, w.dims) for w in block(shape, 0)]
    last = shape.layers - 1
    assert first == [(w.name.removeprefix(f"blocks.{last}."), w.shape, w.dims) for w in block(shape, last)]


@given(shapes())
def test_each_dim_name_has_one_size_through_the_whole_model(shape):
    sizes: dict[str, int] = {}
    for weight in weights(shape):
        assert len(weight.dims) == len(weight.shape)
        for dim, size in zip(weight.dims, weight.shape, strict=True):
            assert sizes.setdefault(dim, size) == size


@given(shapes())
def test_a_dim_that_may_be_cut_is_always_the_first(shape):
    assert all(not RULES.keys() & set(weight.dims[1:]) for weight in weights(shape))


@given(shapes())
def test_vectors_start_constant_without_decay_and_matrices_start_random_with_it(shape):
    for weight in weights(shape):
        assert weight.decay == (len(weight.shape) > 1) == (weight.std > 0)
        assert weight.mean == (1.0 if weight.name.endswith("norm.weight") else 0.0)


def test_the_last_matrix_of_each_residual_branch_starts_smaller_by_the_root_of_the_branches():
    std = {w.name: w.std for w in weights(ModelShape.of(GPT2, 50257))}
    assert std["blocks.3.attention.out.weight"] == std["blocks.3.mlp.down.weight"] == 0.02 / 24**0.5
    assert std["blocks.3.attention.query.weight"] == std["embed.tokens"] == 0.02


def test_flops_count_the_head_but_not_the_lookup():
    shape = ModelShape.of(GPT2, 50257)
    matrices = 12 * 12 * 768**2 + 50257 * 768
    assert flops_per_token(shape) == 6 * matrices + 12 * 12 * 768 * 1024


def test_tying_the_head_saves_parameters_but_no_flops():
    tied, untied = (ModelShape.of(GPT2.model_copy(update={"tied": tied}), 50257) for tied in (True, False))
    assert parameters(untied) - parameters(tied) == 50257 * 768
    assert flops_per_token(untied) == flops_per_token(tied)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_with_its_mend():
    with pytest.raises(ConfigError, match=r"model.vocabulary = 100 is less than the tokenizer's 257 tokens") as told:
        ModelShape.of(ModelConfig(vocabulary=100), 257)
    assert "257 or more" in told.value.mend


def test_rotary_heads_of_an_odd_size_are_refused_with_their_mend():
    with pytest.raises(ConfigError, match=r"model.width / model.heads, = 5 is odd") as told:
        ModelShape.of(ModelConfig(family="llama", width=20, heads=4), 257)
    assert "even multiple" in told.value.mend


def test_listing_weights_loads_neither_torch_nor_mpi():
    code = "import sys, hpctrain.plan.weights; assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
