"""What Triton should know before it compiles a kernel. No torch.

Products and sums are fused to one rounding unless a kernel says that they must not be (`kernels.triton.gumbel`). That is
Triton's default today and will not be from 3.10 on; what is compiled in tests is compiled so (`kernels.triton.gate`).
"""

from __future__ import annotations

import os

FP_FUSION = "TRITON_DEFAULT_FP_FUSION"


def prepare_gpu() -> None:
    """Settle the setting; what the operator has set himself stays."""
    os.environ.setdefault(FP_FUSION, "1")
