"""Greedy tokens and logprobs equal transformers' for every family: batches, chunks, preemption, windows, configurations."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config.families import FAMILIES
from engine.config.model import parse_model_config
from engine.loop import Engine
from engine.models.decoder import Decoder
from engine.protocol import TokenEvent
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.parity import assert_greedy
from tests.support.tiny_models import EOS, FAMILY_SETTINGS, LONGROPE, VOCAB_SIZE, greedy, make_model, saved_model

PROMPT_LENS = (1, 15, 16, 17, 33, 70)
MANY_PROMPT_LENS = (1, 2, 3, 5, 8, 13, 15, 16, 17, 21, 31, 32, 33, 47, 64, 90)
MAX_TOKENS = 24
SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "num_local_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "pad_token_id": 0,
}  # fmt: skip


def make_prompts(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def check(reference: Any, prompts: list[list[int]], engine: Engine) -> None:
    """Run `prompts` in one batch and compare greedy tokens and logprobs with transformers."""
    requests = [generation_request(str(i), prompt, max_tokens=MAX_TOKENS, logprobs=0) for i, prompt in enumerate(prompts)]
    events = run_to_end(engine, requests)
    assert_greedy(reference, prompts, [events[str(i)] for i in range(len(prompts))])


families = pytest.mark.parametrize("family", list(FAMILY_SETTINGS))


@families
def test_single_prompts_equal_transformers(family: str) -> None:
    case, prompts = saved_model(family), make_prompts((1, 17, 70))
    engine = small_engine(case.directory, max_num_seqs=1, enable_prefix_caching=False)
    events = run_to_end(engine, [generation_request(str(i), prompt, max_tokens=MAX_TOKENS) for i, prompt in enumerate(prompts)])
    assert [tokens(events[str(i)]) for i in range(3)] == [greedy(case.reference, prompt, MAX_TOKENS) for prompt in prompts]


@families
def test_sixteen_prompts_in_one_batch_equal_transformers(family: str) -> None:
    case = saved_model(family)
    check(case.reference, make_prompts(MANY_PROMPT_LENS), small_engine(case.directory))


@families
def test_prompts_in_small_chunks_equal_transformers(family: str) -> None:
    case = saved_model(family)
    check(case.reference, make_prompts(PROMPT_LENS), small_engine(case.directory, max_num_seqs=4, max_num_batched_tokens=7))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3-longrope", "qwen3_moe"])
def test_preempted_and_recomputed_requests_equal_transformers(family: str) -> None:
    case, prompts = saved_model(family), make_prompts(PROMPT_LENS)
    engine = small_engine(case.directory, enable_prefix_caching=False, max_num_batched_tokens=64)
    for index, prompt in enumerate(prompts):
        assert engine.submit(generation_request(str(index), prompt, max_tokens=MAX_TOKENS, logprobs=0)) == []
    events: list[TokenEvent] = []
    for _ in range(3):
        events += [event for _ in range(6) for event in engine.step()]
        for request in list(engine._scheduler.running):
            engine._scheduler.preempt(request)
    events += [event for of_one in run_to_end(engine, []).values() for event in of_one]
    assert_greedy(case.reference, prompts, [[e for e in events if e.request_id == str(i)] for i in range(len(prompts))])
    assert engine.status().preemptions_total >= len(prompts)
    assert engine.status().prefix_cache_hit_tokens_total == 0, "blocks were found again where they were to be computed"


@families
def test_a_cached_prefix_equals_transformers(family: str) -> None:
    case, prompt = saved_model(family), make_prompts((70,))[0]
    engine = small_engine(case.directory)
    check(case.reference, [prompt], engine)
    again = run_to_end(engine, [generation_request("again", prompt, max_tokens=MAX_TOKENS, logprobs=0)])["again"]
    assert_greedy(case.reference, [prompt], [again])
    assert again[-1].num_cached_tokens == 64


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "mistral-window", "qwen2-window"])
@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_windows_within_and_across_blocks_equal_transformers(family: str, block_size: int) -> None:
    case = saved_model(family)
    engine = small_engine(case.directory, block_size=block_size, max_num_batched_tokens=20)
    check(case.reference, make_prompts(PROMPT_LENS), engine)


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_other_block_sizes_equal_transformers(block_size: int) -> None:
    case = saved_model("llama")
    engine = small_engine(case.directory, block_size=block_size, max_num_batched_tokens=20)
    check(case.reference, make_prompts(PROMPT_LENS), engine)


def test_sharded_weights_equal_transformers(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path, sharded=True)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    check(model, make_prompts((9,)), small_engine(tmp_path))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "granite", "olmo2", "phi3"])
def test_tied_embeddings_equal_transformers(family: str) -> None:
    directory, model = saved_model(family, tie_word_embeddings=True)
    check(model, make_prompts((9,)), small_engine(directory))


def test_a_request_ends_at_the_end_of_text_token_like_transformers() -> None:
    directory, model = saved_model("llama", vocab_size=8)
    prompts = [[a, b] for a in range(3, 8) for b in range(3, 8)]
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor(prompts), attention_mask=torch.ones(len(prompts), 2, dtype=torch.int64), max_new_tokens=60,
            do_sample=False, eos_token_id=EOS, pad_token_id=0,
        )  # fmt: skip
    expected = [row[: row.index(EOS) + 1] if EOS in row else row for row in ids[:, 2:].tolist()]
    assert any(row[-1] == EOS for row in expected), "no prompt of this test reaches the end-of-sequence token"
    engine = small_engine(directory)
    events = run_to_end(engine, [generation_request(str(i), p, max_tokens=60, ignore_eos=False) for i, p in enumerate(prompts)])
    assert [tokens(events[str(i)]) for i in range(len(prompts))] == expected


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_grouped_heads_and_head_dims_equal_transformers(heads: tuple[int, int], head_dim: int) -> None:
    sizes = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": head_dim}
    directory, model = saved_model("llama", **sizes)
    prompts = make_prompts((5, 18))
    engine = small_engine(directory, max_num_batched_tokens=16)
    events = run_to_end(engine, [generation_request(str(i), prompt, max_tokens=8) for i, prompt in enumerate(prompts)])
    assert [tokens(events[str(i)]) for i in range(2)] == [greedy(model, prompt, 8) for prompt in prompts]


def test_gemma_with_an_untied_head_equals_transformers() -> None:
    directory, model = saved_model("gemma2", tie_word_embeddings=False)
    check(model, make_prompts((9,)), small_engine(directory))


def test_longrope_uses_long_factors_beyond_the_original_context() -> None:
    rope = {**LONGROPE, "partial_rotary_factor": 0.67, "original_max_position_embeddings": 32}
    directory, model = saved_model("phi3-longrope", rope_parameters=rope, original_max_position_embeddings=32)
    check(model, make_prompts((33, 70)), small_engine(directory, max_num_batched_tokens=16))


OLDER_SPELLINGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "rope_theta": 500000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 2,
    },
    "phi3": {
        "rope_theta": 20000.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5, 2.5], "long_factor": [2.0, 3.0, 5.0]},
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 16,
    },
    "qwen2": {
        "rope_theta": 20000.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "max_position_embeddings": 64,
    },
    "llama": {"rope_theta": 20000.0, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
}


@pytest.mark.parametrize("family", list(OLDER_SPELLINGS))
def test_older_spellings_of_configurations_equal_transformers(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("rope_parameters", "layer_types", "transformers_version", "_sliding_window_pattern"):
        config.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps({**config, **OLDER_SPELLINGS[family]}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    check(model, make_prompts((33, 70)), small_engine(tmp_path))


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_settings_that_config_json_leaves_out_are_those_of_transformers(architecture: str) -> None:
    shape = {**SHAPE, "num_hidden_layers": 30, "use_sliding_window": True}
    given = shape if FAMILIES[architecture].text_part is None else {"text_config": shape}
    every_key = getattr(transformers, architecture).config_class(**given).to_dict()
    generation = {"eos_token_id": EOS}
    left_out = parse_model_config({**given, "architectures": [architecture]}, generation)
    assert left_out == parse_model_config({**every_key, "architectures": [architecture]}, generation)


@pytest.mark.parametrize("architecture", sorted(name for name, family in FAMILIES.items() if family.text_part is None))
def test_a_family_has_the_biases_that_transformers_gives_it(architecture: str) -> None:
    family, device = getattr(transformers, architecture), torch.device("meta")
    config = family.config_class(**SHAPE, attention_bias=True, mlp_bias=True)
    with device:
        expected = {name for name in family(config).state_dict() if name.endswith(".bias")}
    parsed = parse_model_config({**config.to_dict(), "architectures": [architecture]}, {})
    planned = Decoder(parsed, dtype=torch.float32, device=device).weight_plan().destinations
    assert {name for name in planned if name.endswith(".bias")} == expected


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_routers_of_these_models_are_far_from_ties(family: str) -> None:
    case, gaps = saved_model(family), []

    def measure(router: Any, _: Any, output: Any) -> None:
        ordered = output[0].sort(dim=-1, descending=True).values
        gaps.append((ordered[:, router.top_k - 1] - ordered[:, router.top_k]).min().item())

    gates = [layer.mlp.gate for layer in case.reference.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(measure) for gate in gates]
    with torch.inference_mode():
        case.reference(torch.tensor([make_prompts((90,))[0]]))
    for hook in hooks:
        hook.remove()
    assert min(gaps) > 1e-3
