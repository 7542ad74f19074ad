"""The step mode as a function of options and device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.options import EngineOptions
from engine.step_mode import StepMode
from engine.switches import GRAPHS

CASES: list[tuple[str, dict[str, Any], bool, StepMode]] = [
    ("cuda", {}, False, StepMode.CAPTURED),
    ("cuda", {"batch_invariant": True}, False, StepMode.CAPTURED),
    ("cuda", {"enforce_eager": True}, False, StepMode.PLAIN),
    ("cpu", {}, True, StepMode.RECORDED),
    ("cpu", {}, False, StepMode.PLAIN),
    ("cpu", {"batch_invariant": True}, True, StepMode.RECORDED),
    ("cpu", {"enforce_eager": True}, True, StepMode.PLAIN),
]


@pytest.mark.parametrize(("device", "options", "can_record", "mode"), CASES, ids=lambda value: str(value)[:50])
def test_options_and_device_determine_the_step_mode(
    device: str, options: dict[str, Any], can_record: bool, mode: StepMode
) -> None:
    assert StepMode.of(EngineOptions(model=Path("m"), **options), device, can_record=can_record) is mode


def test_the_graphs_switch_disables_graphs_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GRAPHS, "0")
    found = [
        StepMode.of(EngineOptions(model=Path("m"), **options), device, can_record=can) for device, options, can, _ in CASES
    ]
    assert found == [mode.without_graphs() for *_, mode in CASES]
    assert [mode.launches_ahead for mode in found] == [mode.launches_ahead for *_, mode in CASES]


def test_a_model_that_waits_for_the_host_disables_graphs_only() -> None:
    changed = {mode: mode.without_graphs() for mode in StepMode if mode.without_graphs() is not mode}
    assert changed == {StepMode.CAPTURED: StepMode.AHEAD}
