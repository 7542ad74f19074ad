"""What configurations of fused products share: the products of a layer, and the types of what stands around them."""

from __future__ import annotations

LLAMA_8B = {"qkv": (6144, 4096), "out": (4096, 4096), "gate_up": (14336, 4096), "down": (4096, 14336)}
"""Of each product of a layer of Llama-3.1-8B the columns of out, half the weight's rows where it is gated, and those of x."""


def around_types(name: str, own: str, splits: int) -> tuple[dict[str, str], dict[str, None]]:
    """For `Compilation`, of a layer's product by its name: the types of what it has around it, and None for what it has not.
    `own` is that of its rows."""
    of_sum = {"residual": own, "norm_weight": own, "weighted": own, "squares_out": "*fp32"}
    of_norm = {"squares": "*fp32"}
    of_splits = {"partials": "*fp32", "arrivals": "*i32"}
    present = (of_sum if name in ("out", "down") else of_norm) | (of_splits if splits > 1 else {})
    absent = {"bias", *of_sum, *of_norm, *of_splits} - set(present)
    return {"out": own, **present}, dict.fromkeys(sorted(absent))
