"""The log line of an engine's start: its times add up, and it names how steps run."""

from __future__ import annotations

import logging
from functools import partial
from itertools import count
from typing import Any

import pytest

from engine.build import NOT_OVER_PAGES, NOT_RECORDED
from engine.speculation.options import SpeculativeOptions
from engine.start_times import StartTimes
from tests.support.engines import generation_request, run_to_end, small_engine
from tests.support.tiny_models import saved_model

PARTS = {"plain": ["kernels", "weights", "cache", "speed"], "recorded": ["kernels", "weights", "cache", "graphs", "speed"]}


@pytest.mark.parametrize(
    ("runner", "options"),
    [
        ("plain", {"enforce_eager": True}),
        ("recorded", {"enforce_eager": False}),
        (f"plain ({NOT_OVER_PAGES})", {"enforce_eager": False, "kv_cache_dtype": "fp8"}),
        ("recorded", {"enforce_eager": False, "batch_invariant": True}),
    ],
    ids=lambda value: str(value)[:50],
)
def test_the_times_of_all_parts_add_up_to_the_load_time(
    runner: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = saved_model("llama", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64).directory
    monkeypatch.setattr("engine.build.StartTimes", partial(StartTimes, clock=partial(next, count())))
    with caplog.at_level(logging.INFO):
        engine = small_engine(directory, **options)
    parts = PARTS[runner.partition(" ")[0]]
    part_times = " ".join(f"{part}_s=1.000" for part in parts)
    started = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("started"))
    assert f"runner={runner} " in started
    assert part_times in started, "and compiling is no part of reading weights"
    assert engine.info.load_s > len(parts)


@pytest.mark.parametrize(("draft", "runner_name"), [("llama", "recorded "), ("qwen3_moe", f"over slots ({NOT_RECORDED}) ")])
def test_the_log_says_if_a_draft_model_prevents_recorded_steps(
    draft: str, runner_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    target, drafting = (saved_model(family, **sizes).directory for family in ("llama", draft))
    speculation = SpeculativeOptions(method="draft_model", model=drafting, num_speculative_tokens=2)
    with caplog.at_level(logging.INFO):
        engine = small_engine(target, enforce_eager=False, speculative_config=speculation)
    messages = [record.getMessage() for record in caplog.records if record.getMessage().startswith("started")]
    assert [f"runner={runner_name}" in line for line in messages] == [True]
    assert run_to_end(engine, [generation_request("a", [5, 6], max_tokens=4)])["a"][-1].finish_reason
