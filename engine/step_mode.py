"""How an engine runs its steps: decided once, before anything is loaded, by options, device and formats. Knows no torch.

    plain      rows made on the host, operation by operation; a step is over before the next one is planned
    recorded   over slots; a decode step is one call of recorded operations, and over when it returns: on a CPU
    ahead      over slots; a step is launched before the one before it is settled, kernel by kernel: on a GPU
    captured   as ahead, with steps replayed from CUDA graphs, all but the longest

This one value decides what the engine does (`runner.runner_choice`), what is predicted of its memory (`memory.estimate`) and
what its log says at the start.
"""

from __future__ import annotations

from enum import StrEnum

from engine.options import EngineOptions
from engine.switches import GRAPHS, is_on


class StepMode(StrEnum):
    """The values are the words used in the log."""

    PLAIN = "plain"
    RECORDED = "recorded"
    AHEAD = "ahead"
    CAPTURED = "captured"

    @classmethod
    def of(cls, options: EngineOptions, device_type: str, *, can_record: bool = False) -> StepMode:
        """`can_record`: whether the operations of a decode step can be recorded, on a CPU. Raises `EngineConfigError` for a
        switch that is neither 0 nor 1."""
        if options.enforce_eager:
            return cls.PLAIN
        if device_type == "cuda":
            return cls.CAPTURED if is_on(GRAPHS) else cls.AHEAD
        return cls.RECORDED if can_record else cls.PLAIN

    @property
    def has_slots(self) -> bool:
        """Whether requests that decode have slots on the device."""
        return self is not StepMode.PLAIN

    @property
    def launches_ahead(self) -> bool:
        """Whether a step is in flight while the next one is planned."""
        return self in (StepMode.AHEAD, StepMode.CAPTURED)

    def without_graphs(self) -> StepMode:
        """The mode for a model that, once loaded, turns out to wait for the host within a step: none can be captured."""
        return StepMode.AHEAD if self is StepMode.CAPTURED else self
