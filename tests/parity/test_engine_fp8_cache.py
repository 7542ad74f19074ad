"""The fp8 KV cache equals transformers with a cache that rounds keys and values, for any chunks, batches and block moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.errors import WeightsError
from engine.runner.model_runner import ModelRunner
from tests.support.engines import (
    KV_CACHE_BYTES,
    evict_all,
    generation_request,
    overlapped_engine,
    preempt_all,
    run_to_end,
    small_engine,
    tokens,
)
from tests.support.quantised_checkpoints import to_e4m3
from tests.support.tiny_models import VOCAB_SIZE, make_model, saved_model

PROMPTS = [[(5 * i * i + 7 * i + seed) % (VOCAB_SIZE - 3) + 3 for i in range(length)] for seed, length in ((1, 70), (2, 17))]
TOLERANCE, MEAN_TOLERANCE = 0.4, 0.02
"""Sums in another order may round a key to the neighbouring number of the format, which moves some logprobs but few."""

SCALES = (0.03, 0.011)
SPELLINGS = {
    "llm-compressor": ("k_scale", "v_scale"),
    "vllm": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "autofp8": ("k_proj.output_scale", "v_proj.output_scale"),
}


class RoundingCache(transformers.DynamicCache):  # type: ignore[misc]
    """Keeps each key and value as the nearest number of E4M3 after division by its scale."""

    def __init__(self, scales: tuple[float, float]) -> None:
        super().__init__()
        self._scales = scales

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        rounded = [
            to_e4m3(states / scale).float() * scale
            for states, scale in zip((key_states, value_states), self._scales, strict=True)
        ]
        return super().update(*rounded, *arguments, **options)


def expected_logprobs(model: Any, scales: tuple[float, float]) -> torch.Tensor:
    rows = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt]), past_key_values=RoundingCache(scales), use_cache=True).logits[0]
        rows.append(logits[:-1].log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.cat(rows)


def engine_logprobs(directory: Path, **options: Any) -> torch.Tensor:
    engine = small_engine(directory, **{"kv_cache_dtype": "fp8", **options})
    requests = [generation_request(str(i), prompt, max_tokens=1, prompt_logprobs=0) for i, prompt in enumerate(PROMPTS)]
    events = run_to_end(engine, requests)
    engine.close()
    return torch.tensor(
        [entry.logprob for i in range(len(PROMPTS)) for event in events[str(i)] for entry in event.prompt_logprobs or []]
    )


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=TOLERANCE)
    assert float((ours - theirs).abs().mean()) < MEAN_TOLERANCE


def add_scales(directory: Path, names: tuple[str, str], scales: tuple[float, float] = SCALES) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for layer in range(2):
        for name, scale in zip(names, scales, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(scale)
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_without_scales_keys_and_values_are_rounded_directly(family: str) -> None:
    directory, model = saved_model(family, num_hidden_layers=2)
    assert_near(engine_logprobs(directory), expected_logprobs(model, (1.0, 1.0)))


@pytest.mark.parametrize("maker", SPELLINGS)
def test_scales_of_the_checkpoint_are_read_under_every_spelling(maker: str, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path)
    add_scales(tmp_path, SPELLINGS[maker])
    engine = small_engine(tmp_path, kv_cache_dtype="fp8_e4m3")
    assert (engine.info.kv_cache_dtype, engine.info.kv_scales) == ("fp8_e4m3", "checkpoint")
    assert_near(engine_logprobs(tmp_path), expected_logprobs(model, SCALES))


def test_scales_of_the_checkpoint_are_ignored_without_an_fp8_cache(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    plain = engine_logprobs(tmp_path, kv_cache_dtype="auto")
    add_scales(tmp_path, SPELLINGS["vllm"])
    assert torch.equal(engine_logprobs(tmp_path, kv_cache_dtype="auto"), plain)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_invalid_scale_is_refused_by_name(scale: float, tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    add_scales(tmp_path, SPELLINGS["vllm"], (1.0, scale))
    with pytest.raises(
        WeightsError, match=r"self_attn\.attn\.v_scale (is zero|holds negative scales|holds scales that are not finite)"
    ):
        small_engine(tmp_path)


def test_logprobs_do_not_depend_on_the_chunks_of_the_prompt() -> None:
    llama = saved_model("llama").directory
    assert_near(engine_logprobs(llama, max_num_batched_tokens=16), engine_logprobs(llama))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_batch_invariant_logprobs_are_bit_identical_in_any_batch(family: str) -> None:
    directory = saved_model(family).directory
    together = engine_logprobs(directory, batch_invariant=True)
    alone = engine_logprobs(directory, batch_invariant=True, max_num_seqs=1, max_num_batched_tokens=7)
    assert torch.equal(together, alone)


def test_the_cache_has_four_times_as_many_blocks_as_in_float32() -> None:
    llama = saved_model("llama").directory
    plain, rounded = small_engine(llama), small_engine(llama, kv_cache_dtype="fp8")
    assert (plain.info.kv_cache_dtype, rounded.info.kv_cache_dtype) == ("float32", "fp8_e4m3")
    assert rounded.info.kv_scales == "unit"
    assert rounded.info.num_kv_blocks // 4 == plain.info.num_kv_blocks
    for engine in (plain, rounded):
        assert isinstance(engine.runner, ModelRunner)
        num_bytes = sum(cache.nbytes for cache in engine.runner.target.kv_caches)
        assert num_bytes == engine.info.kv_bytes <= KV_CACHE_BYTES


def test_fp8_blocks_survive_swapping_preemption_and_copies() -> None:
    llama = saved_model("llama").directory
    options = {"kv_cache_dtype": "fp8", "swap_space": 0.001}
    request = generation_request("a", PROMPTS[0], max_tokens=12, n=2, temperature=1.0)
    undisturbed = run_to_end(small_engine(llama, **options), [request])
    engine = small_engine(llama, **options)
    events = engine.submit(request)
    for step in range(8):
        events += engine.step()
        if step % 3 == 2:
            preempt_all(engine)
            evict_all(engine)
    assert engine.status().swapped_out_blocks_total > 0
    events += run_to_end(engine, []).get("a", [])
    for index in range(2):
        assert tokens([event for event in events if event.index == index]) == tokens(
            [event for event in undisturbed["a"] if event.index == index]
        )
    assert engine.status().swapped_in_blocks_total > 0


def test_steps_launched_ahead_give_the_tokens_of_the_plain_runner(tmp_path: Path) -> None:
    make_model("llama", tmp_path)
    add_scales(tmp_path, SPELLINGS["vllm"])
    requests = [generation_request(str(i), prompt, max_tokens=12) for i, prompt in enumerate(PROMPTS)]
    options: dict[str, Any] = {"kv_cache_dtype": "fp8", "quantization": "int8"}
    plain, ahead = (run_to_end(make(tmp_path, **options), requests) for make in (small_engine, overlapped_engine))
    assert [tokens(ahead[key]) for key in "01"] == [tokens(plain[key]) for key in "01"]
