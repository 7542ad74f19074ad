"""The interpreter of these tests: see tests/support/quick_interpreter.py."""

from __future__ import annotations

import importlib

import pytest
import torch

from kernels.triton.norm import rms_norm


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing is interpreted")
def test_a_second_launch_finds_the_language_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.ones(1, 64), torch.ones(64)
    rms_norm(x, weight, 1e-6)
    replaced: list[object] = []
    interpreter = importlib.import_module("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter, "_patch_attr", lambda *replacement: replaced.append(replacement))
    rms_norm(x, weight, 1e-6)
    assert not replaced
