"""Packing of matrices into every format of weights that kernels multiply."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels.quantised_weights import pack_fp8, pack_int4, pack_int8

pack_groups = partial(pack_int4, group_size=128)
PACKERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "bf16": lambda weight: weight,
    "int8": pack_int8,
    "fp8": pack_fp8,
    "int4": pack_groups,
}
