"""What configurations of fused products share: the products of a layer, and the types of what stands around them."""

from __future__ import annotations

from typing import Any

LLAMA_8B = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (14336, 4096), "down": (4096, 14336)}
"""Of each product of a layer of Llama-3.1-8B the columns of out, half the weight's rows where it is gated, and those of x."""


def around_types(
    kernel: Any, name: str, own: str, *, splits: int = 1, has_bias: bool = False
) -> tuple[dict[str, str], dict[str, None]]:
    """For `Compilation`, of a layer's product by its name: the types of what it has around it, and None for what else the
    kernel could have. `own` is the type of its rows."""
    of_sum = {"residual": own, "norm_weight": own, "weighted": own, "squares_out": "*fp32"}
    of_norm = {"squares": "*fp32"}
    of_splits = {"partials": "*fp32", "arrivals": "*i32"}
    present = (of_sum if name in ("out", "down") else of_norm) | (of_splits if splits > 1 else {})
    present |= {"bias": own} if has_bias else {}
    absent = ({"bias", *of_sum, *of_norm, *of_splits} - set(present)) & set(kernel.arg_names)
    return {"out": own, **present}, dict.fromkeys(sorted(absent))
