"""Which launches are early: those of few rows, on Hopper and later cards, unless they are switched off."""

from __future__ import annotations

import pytest
import torch

from kernels.triton.launching import early_launch as launches

CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "interpreted", lambda: False)
    monkeypatch.setattr(launches, "capability", lambda _: 90)
    monkeypatch.setattr(launches, "supports_early_launch", launches.supports_early_launch.__wrapped__)


@pytest.mark.parametrize(("num_rows", "is_early"), [(1, True), (16, True), (17, False)])
@pytest.mark.usefixtures("hopper")
def test_kernels_of_few_rows_are_launched_early(num_rows: int, is_early: bool) -> None:
    assert launches.early_launch(CUDA, num_rows) == {"EARLY": is_early, "launch_pdl": is_early}


@pytest.mark.parametrize(("capability", "is_early"), [(89, False), (90, True), (120, True)])
@pytest.mark.usefixtures("hopper")
def test_cards_before_hopper_launch_in_order(capability: int, is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "capability", lambda _: capability)
    assert launches.supports_early_launch(CUDA) == is_early


@pytest.mark.parametrize(("value", "is_early"), [("0", False), ("1", True)])
@pytest.mark.usefixtures("hopper")
def test_early_launches_can_be_switched_off(value: str, is_early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEHOUSE_EARLY_LAUNCH", value)
    assert launches.supports_early_launch(CUDA) == is_early


@pytest.mark.usefixtures("hopper")
def test_nothing_is_launched_early_on_a_cpu() -> None:
    assert not launches.supports_early_launch(torch.device("cpu"))
