"""Rotary frequencies of every scaling equal those of transformers over random settings; tables are built in chunks."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.config.model import parse_model_config
from engine.config.rope import RopeConfig
from engine.layers import rotary
from engine.layers.rotary import RotaryTable, inverse_frequencies

SHAPE: dict[str, Any] = {
    "vocab_size": 10,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
CASES_PER_KIND = 12


def random_settings(kind: str, rng: random.Random, original: int, head_dim: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": kind, "rope_theta": rng.choice([1e4, 5e5, 1e6])}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        settings["factor"] = rng.choice([1.0, 2.0, 8.0, 40.0])
    if kind in ("llama3", "yarn", "longrope"):
        settings["original_max_position_embeddings"] = original
    if kind == "llama3":
        settings |= {"low_freq_factor": 1.0, "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "longrope":
        settings["short_factor"] = [1 + i * 0.1 for i in range(head_dim // 2)]
        settings["long_factor"] = [1 + i * 0.5 for i in range(head_dim // 2)]
        settings |= rng.choice([{}, {"factor": 4.0}, {"attention_factor": 1.2}])
    if kind == "yarn":
        settings |= rng.choice([{}, {"attention_factor": 1.3}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"mscale": 0.7}])
        settings |= rng.choice([{}, {"beta_fast": 64.0}, {"beta_slow": 0.5}, {"truncate": False}])
    return settings


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn", "longrope"])
def test_frequencies_and_attention_factor_equal_those_of_transformers(kind: str) -> None:
    rng = random.Random(kind)
    for _ in range(CASES_PER_KIND):
        original, head_dim = rng.choice([32, 512, 4096, 8192]), rng.choice([16, 64, 96, 128])
        config = {**SHAPE, "hidden_size": 2 * head_dim, "max_position_embeddings": original * rng.choice([2, 8, 32])}
        settings = random_settings(kind, rng, original, head_dim)
        expected = LlamaRotaryEmbedding(transformers.LlamaConfig(**config, rope_parameters=dict(settings)))
        found = {"architectures": ["LlamaForCausalLM"], **config, "rope_parameters": settings}
        (rope,) = parse_model_config(found, {}).ropes
        torch.testing.assert_close(inverse_frequencies(rope, original), expected.inv_freq, rtol=1e-6, atol=0)
        assert rope.attention_factor == pytest.approx(expected.attention_scaling, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_len", [1, 15, 16, 17, 33])
def test_a_table_built_in_chunks_equals_one_built_at_once(
    max_len: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotary, "CHUNK_POSITIONS", 16)
    rope = RopeConfig(kind="default", theta=1e4, rotary_dim=8, attention_factor=1.25)
    angles = torch.arange(max_len, dtype=torch.float32)[:, None] * inverse_frequencies(rope, max_len)[None, :]
    cos, sin = 1.25 * angles.cos(), 1.25 * angles.sin()
    table = RotaryTable(rope, max_len, dtype=dtype, device=torch.device("cpu"))
    found = table.at(torch.arange(max_len))
    assert torch.equal(found[0], torch.cat((cos, cos), dim=-1).to(dtype)[:, None])
    assert torch.equal(found[1], torch.cat((-sin, sin), dim=-1).to(dtype)[:, None])
    assert table.num_bytes == 2 * max_len * 8 * dtype.itemsize


def test_building_a_long_table_needs_little_memory_beside_it() -> None:
    rope = RopeConfig(kind="default", theta=1e6, rotary_dim=128)
    tables: list[RotaryTable] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        tables.append(RotaryTable(rope, 131_072, dtype=torch.bfloat16, device=torch.device("cpu")))
    results = profiler.profiler.kineto_results
    events = sorted((event for event in results.events() if event.name() == "[memory]"), key=lambda event: event.start_ns())
    peak_bytes = max(accumulate(event.nbytes() for event in events))
    assert peak_bytes - tables[0].num_bytes <= 8 * rotary.CHUNK_POSITIONS * 64 * 4
