"""Where kernel tests run: on the GPU when there is one, else in Triton's interpreter on the CPU. Import it before triton.

Triton decides at the import of itself and of each kernel module whether functions are compiled or interpreted, so the
variable must stand before either; a process that was too late would compile for a GPU that is not there.
"""

from __future__ import annotations

import os
import sys

import torch

VARIABLE = "TRITON_INTERPRET"


def interpret_without_gpu() -> torch.device:
    """Choose the device of this process' kernel tests and, without a GPU, the interpreter. Returns the device."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get(VARIABLE) != "1":
        assert "triton" not in sys.modules, f"triton was imported before {VARIABLE} was set"
        os.environ[VARIABLE] = "1"
    return torch.device("cpu")
