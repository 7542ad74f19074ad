"""Chooses where kernel tests run: on the GPU if there is one, else in Triton's interpreter on the CPU. Import before triton.

Triton decides when it and each kernel module are imported whether functions are compiled or interpreted, so the variable must
be set before; otherwise the process would compile for a missing GPU.
"""

from __future__ import annotations

import os
import sys

import torch

from tests.support.required_parts import is_required

VARIABLE = "TRITON_INTERPRET"


def interpret_without_gpu() -> torch.device:
    """Return the device of this process's kernel tests; without a GPU, select the interpreter, or fail if one is required."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert not is_required("gpu"), "GATEHOUSE_REQUIRE names gpu, and torch finds no usable one on this machine"
    if os.environ.get(VARIABLE) != "1":
        assert "triton" not in sys.modules, f"triton was imported before {VARIABLE} was set"
        os.environ[VARIABLE] = "1"
    return torch.device("cpu")
