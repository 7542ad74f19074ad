"""What a process settles before Triton compiles for it."""

from __future__ import annotations

import pytest

from engine.gpu_environment import FP_FUSION, prepare_gpu


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_products_are_fused_unless_the_operator_says_otherwise(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {} if before is None else {FP_FUSION: before}
    monkeypatch.setattr("engine.gpu_environment.os.environ", environment)
    prepare_gpu()
    assert environment == {FP_FUSION: after}
