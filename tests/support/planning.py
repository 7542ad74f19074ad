"""The memory of one model on a GPU that it has for itself, as `gatehouse plan` predicts it."""

from __future__ import annotations

from typing import Any

from engine.memory.fit import MemoryFit
from engine.simulator.fitting import plan_beside
from engine.simulator.models import SimulatedGpu


def memory_fit(model: str, gpu: SimulatedGpu, *, quantization: str | None = None, **options: Any) -> MemoryFit:
    fit, _ = plan_beside(model, (), gpu, quantization=quantization, **options)
    return fit
