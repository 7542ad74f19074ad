"""Shared by the configurations of fused products: the products of a layer, and the types of the operations around them."""

from __future__ import annotations

from typing import Any

LLAMA_8B = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (14336, 4096), "down": (4096, 14336)}
"""For each product of a layer of Llama-3.1-8B: columns of out (half the weight's rows for the gated one), and columns of x."""


def around_types(
    kernel: Any, name: str, own: str, *, splits: int = 1, has_bias: bool = False
) -> tuple[dict[str, str], dict[str, None]]:
    """For `Compilation`, by the name of a layer's product: the types of the tensors around it, and None for others that the
    kernel could have. `own` is the type of its rows."""
    of_sum = {"residual": own, "norm_weight": own, "weighted": own, "squares_out": "*fp32"}
    of_norm = {"squares": "*fp32"}
    of_splits = {"partials": "*fp32", "arrivals": "*i32"}
    present = (of_sum if name in ("out", "down") else of_norm) | (of_splits if splits > 1 else {})
    present |= {"bias": own} if has_bias else {}
    absent = ({"bias", *of_sum, *of_norm, *of_splits} - set(present)) & set(kernel.arg_names)
    return {"out": own, **present}, dict.fromkeys(sorted(absent))
