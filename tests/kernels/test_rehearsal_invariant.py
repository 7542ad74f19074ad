"""Batch-invariant steps over slots on an emulated GPU: captured, launched ahead, bit-identical to the plain runner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.loop import Engine
from engine.runner import slot_warm_up
from kernels.triton.invariant import attention as invariant_attention
from kernels.triton.invariant import linear as invariant_linear
from kernels.triton.products.tiles import Tiles
from tests.support.engines import generation_request, run_to_end, small_engine
from tests.support.interpreted_rows import make_dot_row_invariant
from tests.support.rehearsal import rehearsal
from tests.support.tiny_models import saved_model

SMALL: dict[str, Any] = {
    "max_num_seqs": 4, "max_model_len": 32, "num_kv_blocks": 16, "max_num_batched_tokens": 16, "enable_prefix_caching": False,
}  # fmt: skip
PROMPTS = {"a": list(range(3, 20)), "b": [5, 6], "c": [8]}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and columns in parts that programs share, as large models have them, and no more graphs than are asked for; experts
    in float32, which cards refuse and the interpreter computes right."""
    monkeypatch.setattr("engine.resolved_options.check_formats", lambda *_: None)
    make_dot_row_invariant(monkeypatch)
    monkeypatch.setattr(invariant_attention, "SPLIT", 16)
    monkeypatch.setattr(invariant_attention, "rows_tiling", lambda *_: invariant_attention.RowsTiling(16, 16, 4, 2))
    monkeypatch.setattr(invariant_attention, "_num_programs", lambda _, splits, __: min(splits, 2))
    tiles = Tiles(16, 64, 32, num_warps=4, num_stages=2, splits=2)
    monkeypatch.setattr(invariant_linear, "invariant_tiles", lambda *_: tiles)
    monkeypatch.setattr(slot_warm_up, "WARM_ROWS", ())
    monkeypatch.setattr(slot_warm_up, "compiles_at_first_use", lambda _: False)


def engine_of(model: Path, **options: Any) -> Engine:
    return small_engine(model, device="cuda", dtype="float32", batch_invariant=True, **SMALL, **options)


def bits(engine: Engine, names: str) -> dict[str, list[tuple[int, float]]]:
    """Tokens and their log-probabilities; one request draws."""
    asked = [
        generation_request(name, PROMPTS[name], max_tokens=3, logprobs=1, seed=1, temperature=float(name == "b"))
        for name in names
    ]
    scored = {
        name: [pair for event in events for pair in zip(event.token_ids, event.logprobs or [], strict=True)]
        for name, events in run_to_end(engine, asked).items()
    }
    assert all(len(pairs) == 3 for pairs in scored.values())
    return {name: [(token, entry.logprob) for token, entry in pairs] for name, pairs in scored.items()}


def test_captured_steps_of_experts_are_bit_identical_to_the_plain_runner_also_with_padding() -> None:
    """In steps of one row, and of four rows with three requests. Steps wait only for tokens."""
    model = saved_model("qwen3_moe", num_hidden_layers=1, head_dim=16, vocab_size=64).directory
    with rehearsal() as card:
        plain = bits(engine_of(model, enforce_eager=True), "abc")
    assert not card.num_captures
    with rehearsal() as card:
        engine = engine_of(model)
        card.syncs.clear()
        assert bits(engine, "a")["a"] == plain["a"]
        assert bits(engine, "abc") == plain
    assert card.num_replays
    assert {sync.kind for sync in card.syncs} == {"event"}
