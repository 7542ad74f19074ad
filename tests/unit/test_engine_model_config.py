"""Interpretation of config.json by family: defaults, older spellings, refused settings, and sliding windows per layer."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest

from engine.config.families import FAMILIES
from engine.config.model import EMBEDDERS, ModelConfig, parse_model_config
from engine.errors import EngineConfigError, UnsupportedModel
from engine.memory.kv_plan import check_context
from engine.options import EngineOptions

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def parse(architecture: str, **changes: Any) -> ModelConfig:
    return parse_model_config({"architectures": [architecture], **SHAPE, **changes}, {})


def windows(config: ModelConfig) -> list[int | None]:
    return [config.windows[layer.window_idx] for layer in config.layers]


def test_settings_of_a_multimodal_config_take_precedence_over_its_text_part() -> None:
    """As in transformers. A text part saved with its own defaults has only `<eos>` of Gemma, not its end-of-turn token."""
    text = {"num_hidden_layers": 6, "eos_token_id": 1, "torch_dtype": "float32", "architectures": ["Gemma3ForCausalLM"]}
    name = "Gemma3ForConditionalGeneration"
    config = parse(name, text_config=text, eos_token_id=[1, 106], torch_dtype="bfloat16", vocab_size=1000)
    assert (config.eos_token_ids, config.torch_dtype, config.family.architecture) == ((1, 106), "bfloat16", name)
    alone = parse(name, text_config=text)
    assert (alone.eos_token_ids, alone.torch_dtype) == ((1,), "float32")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_the_stored_format_has_an_older_key_and_may_be_named_as_torch_prints_it(key: str, value: str) -> None:
    assert parse("LlamaForCausalLM", **{key: value}).torch_dtype == "bfloat16"
    assert parse("LlamaForCausalLM").torch_dtype == "float32"


def test_the_documented_architectures_are_those_that_load() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")
    assert set(re.findall(r"`(\w+(?:ForCausalLM|ForConditionalGeneration|Model))`", text)) == {*FAMILIES, *EMBEDDERS}


def test_gemma_2_has_alternating_windows_and_softcaps_by_default() -> None:
    config = parse("Gemma2ForCausalLM")
    assert windows(config) == [4096, None] * 3
    assert (config.attention_softcap, config.logits_softcap, config.attention_scale) == (50.0, 30.0, 256**-0.5)
    assert (config.head_dim, config.embedding_multiplier, config.activation) == (256, 8.0, "gelu_pytorch_tanh")
    assert parse("Gemma2ForCausalLM", attn_logit_softcapping=None).attention_softcap is None


def test_the_older_spelling_of_gemma_3_settings_is_read() -> None:
    config = parse(
        "Gemma3ForCausalLM",
        rope_theta=2e6,
        rope_local_base_freq=3e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=16,
        sliding_window_pattern=3,
    )
    assert windows(config) == [16, 16, None] * 2
    ropes = [config.ropes[layer.rope_idx] for layer in config.layers]
    assert [(rope.kind, rope.theta, rope.factor) for rope in ropes[1:3]] == [("default", 3e4, 1.0), ("linear", 2e6, 8.0)]
    assert config.logits_softcap is None


def test_qwen_has_windows_only_with_use_sliding_window_and_from_max_window_layers_on() -> None:
    assert windows(parse("Qwen2ForCausalLM", sliding_window=32)) == [None] * 6
    on = {"use_sliding_window": True, "sliding_window": 32}
    assert windows(parse("Qwen2ForCausalLM", max_window_layers=4, **on)) == [None] * 4 + [32] * 2
    assert windows(parse("Qwen2ForCausalLM", max_window_layers=0, **on)) == [32] * 6
    assert windows(parse("Qwen3ForCausalLM", **on)) == [None] * 6
    assert windows(parse("Qwen3MoeForCausalLM", **on)) == [32] * 6


def test_mistral_has_a_window_unless_it_is_null() -> None:
    assert windows(parse("MistralForCausalLM")) == [4096] * 6
    assert windows(parse("MistralForCausalLM", sliding_window=None)) == [None] * 6
    assert windows(parse("MistralForCausalLM", sliding_window=32, layer_types=["sliding_attention"] * 6)) == [32] * 6


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi_3_accepts_several_names_of_longrope(name: str) -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
    config = parse(
        "Phi3ForCausalLM",
        partial_rotary_factor=0.75,
        original_max_position_embeddings=128,
        rope_scaling={"type": name, **factors},
    )
    (rope,) = config.ropes
    assert (rope.kind, rope.rotary_dim, rope.factor, rope.original_max_len) == ("longrope", 12, 4.0, 128)
    assert rope.attention_factor == pytest.approx((1 + 2 / 7) ** 0.5)


def test_yarn_extends_a_context_that_was_left_at_its_original_length() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "finetuned": True}
    assert parse("Qwen2ForCausalLM", rope_scaling=scaling).max_position_len == 2048
    assert parse("Qwen2ForCausalLM").max_position_len == 512


def test_a_context_beyond_the_model_is_refused_with_dynamic_rope_scaling() -> None:
    config = parse("LlamaForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0})
    options = EngineOptions(model=None, max_model_len=513, num_kv_blocks=100)  # type: ignore[arg-type]
    with pytest.raises(EngineConfigError, match=r"max_model_len \(513\) .* rope type 'dynamic' is not computed beyond"):
        check_context(config, options)


def test_only_granite_reads_its_multipliers() -> None:
    keys = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.1, "logits_scaling": 8.0}
    granite, llama = parse("GraniteForCausalLM", **keys), parse("LlamaForCausalLM", **keys)
    read = [(c.embedding_multiplier, c.residual_multiplier, c.attention_scale, c.logits_divisor) for c in (granite, llama)]
    assert read == [(12.0, 0.22, 0.1, 8.0), (1.0, 1.0, 16**-0.5, 1.0)]


def test_the_largest_values_are_accepted_and_keys_and_values_have_all_heads_by_default() -> None:
    config = parse("MixtralForCausalLM", vocab_size=2**31 - 1, num_local_experts=4096, num_experts_per_tok=4096)
    assert config.experts is not None
    assert (config.vocab_size, config.experts.num_experts, config.experts.num_chosen) == (2**31 - 1, 4096, 4096)
    assert parse("LlamaForCausalLM", num_key_value_heads=None).num_kv_heads == 4


def test_sparse_layers_follow_the_step_except_for_mlp_only_layers() -> None:
    config = parse("Qwen3MoeForCausalLM", num_hidden_layers=9, decoder_sparse_step=3, mlp_only_layers=[5])
    assert [index for index, layer in enumerate(config.layers) if layer.is_sparse] == [2, 8]
    assert not any(layer.is_sparse for layer in parse("LlamaForCausalLM").layers)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation 'relu'"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be a positive number"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window is not set"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a positive integer"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"] * 5}, "list of 6 entries"),
        ("Qwen2ForCausalLM", {"is_causal": False}, "is_causal"),
        ("Qwen2ForCausalLM", {"max_window_layers": -1}, "max_window_layers must be an integer from 0 on, not -1"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 6}, "sliding_window is not set"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) must be at most num_local_experts"),
        ("MixtralForCausalLM", {"num_local_experts": 4097}, "num_local_experts must be at most 4096, not 4097"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": ["1"]}, "mlp_only_layers must be an integer or a list of them"),
        ("MixtralForCausalLM", {"num_experts_per_tok": None}, "num_experts_per_tok must be a positive integer"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.1}, "partial_rotary_factor 0.1 rotates 1 of 16"),
        ("Phi3ForCausalLM", {"lm_head_bias": True}, "lm_head_bias"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "logits_scaling must be a positive number"),
        ("Olmo2ForCausalLM", {"clip_qkv": 8.0}, "clip_qkv 8.0"),
        ("LlamaForCausalLM", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
        ("LlamaForCausalLM", {"attention_bias": "yes"}, "attention_bias must be true or false, not 'yes'"),
        ("LlamaForCausalLM", {"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
        ("LlamaForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5 is not supported"),
        ("LlamaForCausalLM", {"architectures": [["LlamaForCausalLM"], {"a": 1}]}, r"architecture \['LlamaForC.* not supported"),
        (
            "LlamaForCausalLM",
            {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_theta must not be 1 with yarn",
        ),
        (
            "Phi3ForCausalLM",
            {
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
                "original_max_position_embeddings": 1,
            },
            "original_max_position_embeddings must be at least 2 with longrope",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_that_a_family_does_not_support_is_refused_by_name(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse(architecture, **changes)


ODD_VALUES: tuple[Any, ...] = (
    None, "x", -1, 0, 1.5, [], {}, True, [1], {"a": 1}, "", 10**12, float("nan"), float("inf"), [None], "1"
)  # fmt: skip
ROPE: dict[str, Any] = {
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
}
KEYS = (
    *SHAPE, "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types", "sliding_window_pattern", "attention_bias", "mlp_bias", "hidden_act",
    "hidden_activation", "tie_word_embeddings", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "partial_rotary_factor",
    "original_max_position_embeddings", "num_experts", "mlp_only_layers", "decoder_sparse_step", "norm_topk_prob",
    "quantization_config", "dtype", "eos_token_id", "rope_local_base_freq", "is_causal", "architectures", "clip_qkv",
)  # fmt: skip


def parse_or_refuse(architecture: str, changes: dict[str, Any]) -> None:
    """Parse settings; any exception but UnsupportedModel fails the test."""
    with contextlib.suppress(UnsupportedModel):
        parse(architecture, **{"use_sliding_window": True, "sliding_window": 8, **changes})


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_odd_values_raise_nothing_but_unsupported_model(architecture: str) -> None:
    for key in KEYS:
        for value in ODD_VALUES:
            parse_or_refuse(architecture, {key: value})


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope"])
def test_odd_rope_values_raise_nothing_but_unsupported_model(kind: str) -> None:
    for key in (*ROPE, "rope_theta", "attention_factor", "beta_fast", "mscale", "mscale_all_dim", "truncate", "type"):
        for value in ODD_VALUES:
            parse_or_refuse("LlamaForCausalLM", {"rope_parameters": {"rope_type": kind, **ROPE, key: value}})
