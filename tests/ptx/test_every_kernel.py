"""Every kernel that the compile gate declares was executed by the other tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.triton.gate.declared import declared, module_names
from tests.support.ptx.card import EmulatedCard


def test_every_kernel_was_executed(card: EmulatedCard, request: pytest.FixtureRequest) -> None:
    collected = {item.path for item in request.session.items}
    if not set(Path(__file__).parent.glob("test_*.py")) <= collected:
        pytest.skip("only a part of this folder was run")
    kernels = {each.kernel.__name__ for module in module_names() for each in declared(module)}
    assert kernels <= card.launched.keys(), f"never executed: {sorted(kernels - card.launched.keys())}"
