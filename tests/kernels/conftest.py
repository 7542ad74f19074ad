"""Kernel tests choose their device here, before any of them imports triton."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernel_device import interpret_without_gpu

DEVICE = interpret_without_gpu()


@pytest.fixture
def device() -> torch.device:
    """The GPU, or the CPU with kernels in Triton's interpreter."""
    return DEVICE
