"""``config.json`` as our section ``[model]`` and back: published models, and what is refused with its reason."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from hpctrain.config import ModelConfig, parse
from hpctrain.errors import ConfigError
from hpctrain.plan import hub, hub_config
from hpctrain.plan.weights import ModelShape, parameters

# What the config.json of published models say, in the words of the releases that they were saved with.
GPT2 = dict(
    architectures=["GPT2LMHeadModel"], model_type="gpt2", activation_function="gelu_new", attn_pdrop=0.1,
    embd_pdrop=0.1,
    resid_pdrop=0.1, n_ctx=1024, n_positions=1024, n_embd=768, n_head=12, n_layer=12, vocab_size=50257,
    initializer_range=0.02, layer_norm_epsilon=1e-05,
)  # fmt: skip
LLAMA_2_7B = dict(
    architectures=["LlamaForCausalLM"], hidden_act="silu", hidden_size=4096, initializer_range=0.02,
    intermediate_size=11008, max_position_embeddings=4096, num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=32, pretraining_tp=1, rms_norm_eps=1e-05, rope_scaling=None, tie_word_embeddings=False,
    vocab_size=32000,
)  # fmt: skip
LLAMA_31 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
LLAMA_31_8B = LLAMA_2_7B | dict(
    attention_bias=False, mlp_bias=False, intermediate_size=14336, max_position_embeddings=131072, vocab_size=128256,
    num_key_value_heads=8, rope_theta=500000.0, rope_scaling=LLAMA_31,
)  # fmt: skip
MISTRAL_7B = LLAMA_2_7B | dict(
    architectures=["MistralForCausalLM"], intermediate_size=14336, max_position_embeddings=32768, rope_theta=10000.0,
    num_key_value_heads=8, sliding_window=4096,
)  # fmt: skip
QWEN2_05B = dict(
    architectures=["Qwen2ForCausalLM"], hidden_act="silu", hidden_size=896, initializer_range=0.02,
    max_window_layers=24,
    intermediate_size=4864, max_position_embeddings=131072, num_attention_heads=14, num_hidden_layers=24,
    num_key_value_heads=2, rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=131072, tie_word_embeddings=True,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
QWEN3_06B = QWEN2_05B | dict(
    architectures=["Qwen3ForCausalLM"], attention_bias=False, head_dim=128, hidden_size=1024, intermediate_size=3072,
    max_position_embeddings=40960, num_attention_heads=16, num_hidden_layers=28, num_key_value_heads=8,
    sliding_window=None,
)  # fmt: skip
MIXTRAL_8X7B = MISTRAL_7B | dict(
    architectures=["MixtralForCausalLM"], rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2,
    output_router_logits=False, router_aux_loss_coef=0.02, sliding_window=None,
)  # fmt: skip
PUBLISHED = {  # with the number of parameters that they are known to have
    "GPT-2": (GPT2, 124_439_808),
    "Llama 2 7B": (LLAMA_2_7B, 6_738_415_616),
    "Llama 3.1 8B": (LLAMA_31_8B, 8_030_261_248),
    "Mistral 7B": (MISTRAL_7B | dict(sliding_window=None), 7_241_732_096),
    "Qwen 2 0.5B": (QWEN2_05B, 494_032_768),
    "Qwen 3 0.6B": (QWEN3_06B, 596_049_920),
    "Mixtral 8x7B": (MIXTRAL_8X7B, 46_702_792_704),
}
every_model = pytest.mark.parametrize("name", PUBLISHED)


def refused(config: dict[str, Any], sequence: int | None = None) -> list[str]:
    with pytest.raises(ConfigError) as told:
        hub_config.ours(config, sequence)
    return str(told.value).split("\n  ")


@every_model
def test_published_models_have_their_number_of_parameters(name: str):
    config, expected = PUBLISHED[name]
    model = hub_config.ours(config)
    assert parameters(ModelShape.of(model, model.vocabulary)) == expected


@every_model
def test_a_model_that_goes_out_comes_back(name: str):
    model = hub_config.ours(PUBLISHED[name][0])
    told = hub_config.theirs(model, model.vocabulary, "float32")
    shape = ModelShape.of(model, model.vocabulary)
    assert ModelShape.of(hub_config.ours(told), model.vocabulary) == shape


def test_the_keys_of_our_section_are_those_of_the_model():
    assert hub_config.ours(LLAMA_31_8B) == ModelConfig(
        family="llama", layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, sequence=131072,
        vocabulary=128256, tied=False, rope_base=500000.0, rope_scaling=(8.0, 1.0, 4.0, 8192), norm_epsilon=1e-5,
    )  # fmt: skip
    assert hub_config.ours(QWEN3_06B).head_dim == 128
    mixtral = hub_config.ours(MIXTRAL_8X7B)
    assert (mixtral.experts, mixtral.experts_per_token, mixtral.balance_loss, mixtral.rope_base) == (8, 2, 0.02, 1e6)
    assert hub_config.ours(GPT2).dropout == 0.1 and hub_config.ours(GPT2).tied


def test_positions_are_told_in_the_words_of_old_and_new_releases():
    old = hub_config.ours(LLAMA_31_8B)
    new = LLAMA_31_8B | {"rope_parameters": LLAMA_31 | {"rope_theta": 500000.0}}
    assert hub_config.ours({k: v for k, v in new.items() if k not in ("rope_theta", "rope_scaling")}) == old
    plain = LLAMA_31_8B | {"rope_scaling": {"type": "default"}}
    assert hub_config.ours(plain).rope_scaling is None


def test_without_architectures_the_type_of_the_model_decides():
    config = {key: value for key, value in GPT2.items() if key != "architectures"}
    assert hub_config.ours(config) == hub_config.ours(GPT2)


@every_model
def test_the_section_is_toml_that_gives_the_model_again(name: str):
    model = hub_config.ours(PUBLISHED[name][0])
    assert parse(tomllib.loads(hub_config.toml(model))).model == model


def test_what_a_mixtral_leaves_out_is_what_transformers_takes():
    short = {key: value for key, value in MIXTRAL_8X7B.items() if not key.startswith(("num_", "ro", "rms", "sli"))}
    found = hub_config.ours(short | dict(num_attention_heads=32, num_hidden_layers=32))
    assert found == hub_config.ours(MIXTRAL_8X7B).model_copy(update={"balance_loss": 0.001})


def test_a_window_is_no_matter_where_samples_are_no_longer():
    assert hub_config.ours(MISTRAL_7B, sequence=4096).sequence == 4096
    assert refused(MISTRAL_7B) == [
        "config.json: sliding_window = 4096 is shorter than the sequence of 32768 tokens",
        "our attention sees every token before it in the sample",
        "import it with --sequence 4096 or less, where both are the same",
    ]
    assert (
        "sliding_window = 100 is shorter" in refused(QWEN2_05B | dict(use_sliding_window=True, sliding_window=100))[0]
    )
    unsaid = {key: value for key, value in MISTRAL_7B.items() if key != "sliding_window"}
    assert "sliding_window = 4096" in refused(unsaid)[0]


def test_other_experts_and_unknown_architectures_are_refused():
    choose = f"choose one of {', '.join(hub_config.ARCHITECTURES)}"
    assert refused({"architectures": ["Qwen3MoeForCausalLM"]}) == [
        "config.json: the architecture Qwen3MoeForCausalLM cannot be imported",
        "its experts are not Mixtral's, which are the only ones that our models have",
        choose,
    ]
    assert refused({"model_type": "bert"}) == [
        "config.json: the architecture bert cannot be imported", "no family of ours computes it", choose
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (GPT2, "activation_function", "gelu"),
        (GPT2, "scale_attn_weights", False),
        (GPT2, "scale_attn_by_inverse_layer_idx", True),
        (GPT2, "add_cross_attention", True),
        (LLAMA_31_8B, "hidden_act", "gelu"),
        (LLAMA_31_8B, "attention_bias", True),
        (LLAMA_31_8B, "mlp_bias", True),
        (LLAMA_31_8B, "partial_rotary_factor", 0.5),
        (LLAMA_31_8B, "rope_scaling", {"type": "linear", "factor": 2.0}),
        (LLAMA_31_8B, "rope_parameters", {"full_attention": {"rope_type": "default"}}),
        (QWEN3_06B, "attention_bias", True),
        (QWEN2_05B, "quantization_config", {"bits": 4}),
        (MIXTRAL_8X7B, "router_jitter_noise", 0.1),
    ],
)  # fmt: skip
def test_what_our_models_do_not_compute_is_refused_with_its_reason(config: dict, key: str, value: Any):
    what, why, mend = refused(config | {key: value})
    assert what.startswith(f"config.json: {'rope_scaling' if key.startswith('rope') else key} = ")
    assert why and mend == "choose another model"


def test_a_key_without_which_there_is_no_model_is_named():
    config = {key: value for key, value in LLAMA_2_7B.items() if key != "hidden_size"}
    assert refused(config) == [
        "config.json has no hidden_size", "model.width is not known without it", "take a complete config.json"
    ]  # fmt: skip


def test_a_value_that_cannot_be_names_our_key():
    assert refused(GPT2 | dict(n_head="many"))[0] == "configuration: model.heads = 'many' cannot be"
    assert refused(GPT2 | dict(n_head=7))[0] == "model.heads = 7 does not divide model.width = 768"


def test_a_gpt2_of_shared_heads_is_no_gpt2_of_theirs():
    with pytest.raises(ConfigError, match="a gpt2 of 4 heads of 8 dimensions, 2 of keys and values, and the width 32"):
        hub_config.theirs(ModelConfig(width=32, heads=4, kv_heads=2), 61, "float32")


def test_files_are_cut_where_the_next_tensor_would_be_too_much():
    assert hub.shards([4, 4, 4, 20, 1], 8) == [[0, 1], [2], [3], [4]]
    assert hub.shards([1, 2], 100) == [[0, 1]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_each_tensor_is_the_share_of_one_rank_and_bytes_are_spread(ranks: int):
    sizes = [5, 1, 1, 0, 8, 3, 9, 1, 1, 1]
    shares = [hub.share(sizes, ranks, rank) for rank in range(ranks)]
    assert [number for one in shares for number in one] == list(range(len(sizes)))
    assert max(sum(sizes[number] for number in one) for one in shares) < sum(sizes) / ranks + max(sizes)
