"""Gatehouse's inference engine. `from engine import LLM, SamplingParams` is all an offline script needs.

The names are resolved on first use, so that the gateway can import `engine.protocol` and `engine.transport` without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.offline.llm import LLM
    from engine.offline.outputs import CompletionOutput, RequestOutput
    from engine.protocol import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "engine.offline.llm",
    "CompletionOutput": "engine.offline.outputs",
    "RequestOutput": "engine.offline.outputs",
    "SamplingParams": "engine.protocol",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
