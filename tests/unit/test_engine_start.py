"""What an engine tells of its start: all of its time, part by part."""

from __future__ import annotations

import logging
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.start_times import StartTimes
from tests.support.engines import small_engine
from tests.support.tiny_models import make_model

PARTS = {"plain": ["kernels", "weights", "cache", "speed"], "recorded": ["kernels", "weights", "cache", "graphs", "speed"]}


@pytest.mark.parametrize(("runner", "options"), [("plain", {"enforce_eager": True}), ("recorded", {"enforce_eager": False})])
def test_all_parts_of_a_start_are_in_its_time(
    runner: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_model("llama", tmp_path, hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    monkeypatch.setattr("engine.build.StartTimes", partial(StartTimes, clock=partial(next, count())))
    with caplog.at_level(logging.INFO):
        engine = small_engine(tmp_path, **options)
    told = " ".join(f"{part}_s=1.000" for part in PARTS[runner])
    started = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("started"))
    assert f"runner={runner} " in started
    assert told in started, "and compiling is no part of reading weights"
    assert engine.info.load_s > len(PARTS[runner])
