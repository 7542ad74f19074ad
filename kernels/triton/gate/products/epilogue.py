"""Shared by the configurations of fused products: the products of a layer, and the types of their epilogues' tensors."""

from __future__ import annotations

from typing import Any

from kernels.triton.launching.card_properties import power_of_two

LLAMA_8B = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (14336, 4096), "down": (4096, 14336)}
"""For each product of a layer of Llama-3.1-8B: columns of out (half the weight's rows for the gated one), and columns of x."""


PLAIN = "plain"
"""A product with nothing around it but a bias."""

RESIDUAL_SUMS = ("out", "down")
"""The products that are added to the residual stream, and whose sums of squares the next product reads."""


def squares_block(name: str, num_squares: int) -> int:
    """The constant SQUARES_BLOCK of a product: those with a residual sum and plain ones read no squares."""
    return 1 if name in (*RESIDUAL_SUMS, PLAIN) else power_of_two(num_squares)


def epilogue_types(kernel: Any, name: str, row_type: str, *, splits: int = 1, has_bias: bool = False) -> dict[str, str | None]:
    """The epilogue's part of a `Compilation.signature`, by the name of a layer's product: None for tensors that the kernel has
    parameters for and this product lacks. `row_type` is the type of its rows."""
    residual_types = {"residual": row_type, "norm_weight": row_type, "weighted": row_type, "squares_out": "*fp32"}
    norm_types = {"squares": "*fp32"}
    split_types = {"partials": "*fp32", "arrivals": "*i32"}
    passed = residual_types if name in RESIDUAL_SUMS else {} if name == PLAIN else norm_types
    passed = passed | (split_types if splits > 1 else {})
    passed |= {"bias": row_type} if has_bias else {}
    absent = ({"bias", *residual_types, *norm_types, *split_types} - set(passed)) & set(kernel.arg_names)
    return {"out": row_type, **passed, **dict.fromkeys(sorted(absent))}
