"""Operations and dtypes that torch implements on CPUs but not on CUDA; the emulated card rejects them too.

Found by calling some hundred operations with each dtype in torch 2.11 for CUDA 13, whose host functions choose a kernel by
dtype and raise before any launch (the AT_DISPATCH macros of aten/src/ATen/native/cuda), and in the torch of these tests on a
CPU. What neither implements is not listed. Everything that serving and the bench call on a card, some 480 pairs of an operation
and dtypes, is implemented there.
"""

from __future__ import annotations

import torch

from tests.support.rehearsal.leaves import leaves_of

INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
UNSIGNED = frozenset((torch.uint16, torch.uint32, torch.uint64))
FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))

KERNELS: dict[str, tuple[str, frozenset[torch.dtype]]] = {
    **dict.fromkeys(("aten::mm", "aten::addmm", "aten::linear", "aten::matmul"), ("addmm_cuda", INTEGERS | FP8)),
    **dict.fromkeys(("aten::bmm", "aten::baddbmm"), ("baddbmm_cuda", INTEGERS)),
    "aten::mul": ("mul_cuda", FP8 | UNSIGNED),
    "aten::abs": ("abs_cuda", FP8),
    "aten::roll": ("roll_cuda", FP8 | UNSIGNED),
    "aten::any": ("or_cuda", FP8 | UNSIGNED),
    "aten::all": ("and_cuda", FP8 | UNSIGNED),
    "aten::sort": ("sortKeyValueInplace", UNSIGNED),
    "aten::argsort": ("sortKeyValueInplace", UNSIGNED),
    "aten::where": ("where_cuda", UNSIGNED),
    "aten::index": ("index_cuda", UNSIGNED),
    "aten::bitwise_and": ("bitwise_and_cuda", UNSIGNED),
    "aten::bitwise_or": ("bitwise_or_cuda", UNSIGNED),
    "aten::bitwise_xor": ("bitwise_xor_cuda", UNSIGNED),
    "aten::signbit": ("signbit_cuda", UNSIGNED),
}
"""Operation (in place or not) → torch's name of its kernel, and the dtypes for which there is none."""


def refuse_missing(name: str, args: object) -> None:
    """Raise torch's RuntimeError if the operation is not implemented for a device tensor among `args`."""
    kernel, missing = KERNELS.get(name.removesuffix("_"), ("", frozenset()))
    for each in leaves_of(args) if missing else ():
        if isinstance(each, torch.Tensor) and each.is_cuda and each.dtype in missing:
            raise RuntimeError(f'"{kernel}" not implemented for {each.dtype}')
