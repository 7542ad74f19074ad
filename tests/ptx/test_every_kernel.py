"""No kernel is left out: what the tests beside this one have executed, against what the compile gate declares."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from kernels.triton.gate import module_names
from tests.support.ptx.card import EmulatedCard


def test_every_kernel_was_executed(card: EmulatedCard, request: pytest.FixtureRequest) -> None:
    collected = {item.path for item in request.session.items}
    if not set(Path(__file__).parent.glob("test_*.py")) <= collected:
        pytest.skip("only a part of this folder was run")
    declared = {each.kernel.__name__ for name in module_names() for each in importlib.import_module(name).compilations()}
    assert declared <= card.launched.keys(), f"never executed: {sorted(declared - card.launched.keys())}"
