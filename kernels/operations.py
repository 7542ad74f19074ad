"""The table of operations that an implementation provides and `kernels.ops` binds to a device. Only names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from kernels.attention_rows import AttentionShape
from kernels.recorded_operations import RecordedOperations
from kernels.residual_stream import Stream

Tensor = torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor]
LinearKernel = Callable[[Tensor], Tensor]
LinearPacker = Callable[[Tensor, Tensor | None], LinearKernel]

FUSED_ROWS_MAX = 16
"""Most rows of a step for which fused products and greedy heads are made: the rows of one tile of tensor cores."""
_PROPERTIES = (
    "description", "decode_workspace", "sampling_workspace", "max_verify_group", "supports_paged", "is_row_invariant",
    "row_invariant",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """One callable per operation, with the signature of its twin in `kernels.reference`; torch's where the serving path has no
    kernel of its own. An operation that is None does not exist for this device; others are used instead.

    Properties: `description` names the implementation in the log. `supports_paged` says, for heads and the format of a cache,
    whether attention should use `paged_decode` and `paged_prefill`. `max_verify_group` is the largest number of consecutive
    tokens of a request, verified in one step, that `paged_prefill` should attend together; 1: each separately.
    `is_row_invariant` says whether products (plain or quantised) and paged attention give a row the same bits in any batch;
    products do as `row_invariant` makes them from those of the device, by default unchanged.
    `decode_workspace` allocates the scratch memory of `paged_decode`, and of `paged_prefill` with few queries, for a given
    number of queries, `sampling_workspace` that of `sample` for a number of rows and a vocabulary; None if they need none.

    Operations whose names end with `_fp8` produce e4m3 rows and their scales for a product with 8-bit weights. `linear_add` and
    `normed_linear` are the products of a decode step of at most FUSED_ROWS_MAX rows, fused with the norms around them.
    `rotated_decode` is `rope_and_cache` and `paged_decode` in one, for plans whose `takes_projections` is true. `bind_experts`
    makes one function of all experts' weights, for the experts that `route_live` chooses, which never waits for the host; if it
    is missing, or does not support such weights, `route` and `mix_experts` are used. `bind_greedy_head` makes a function of an
    output head, for the most likely tokens of at most FUSED_ROWS_MAX rows, or None if its sums would differ from those of the
    head's product. `score_tokens` writes the table of log-probabilities in one operation; without it the table is assembled
    from `token_logprobs`. `sequence` makes a record of operations over up to a number of rows, which run together; without it
    they are called one by one.
    """

    description: str
    embed: Callable[..., Tensor]
    rotation_rows: Callable[..., Pair]
    rms_norm: Callable[..., Tensor]
    add_rms_norm: Callable[..., Pair]
    rope_and_cache: Callable[..., None]
    rms_norm_fp8: Callable[..., Pair] | None = None
    add_rms_norm_fp8: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None
    silu_mul: Callable[[Tensor], Tensor]
    gelu_tanh_mul: Callable[[Tensor], Tensor]
    silu_mul_fp8: Callable[[Tensor], Pair] | None = None
    gelu_tanh_mul_fp8: Callable[[Tensor], Pair] | None = None
    route: Callable[..., Pair]
    route_live: Callable[..., Pair] | None = None
    mix_experts: Callable[..., Tensor]
    bind_experts: Callable[..., Callable[[Tensor, Tensor, Tensor], Tensor] | None] | None = None
    pack_linear: LinearPacker
    linear_add: Callable[..., Stream] | None = None
    normed_linear: Callable[..., Tensor] | None = None
    paged_decode: Callable[..., Tensor]
    paged_prefill: Callable[..., Tensor]
    decode_workspace: Callable[[AttentionShape, int, int, torch.dtype, torch.device], Any] = lambda *_: None
    prepare_decode: Callable[..., None]
    advance_slots: Callable[..., None]
    sample: Callable[..., Tensor]
    sampling_workspace: Callable[[int, int, torch.device], Any] = lambda *_: None
    apply_bitmask: Callable[[Tensor, Tensor, Tensor], None]
    count_tokens: Callable[[Tensor, Tensor, Tensor], None]
    cap_logits: Callable[..., Tensor]
    token_logprobs: Callable[[Tensor, Tensor], Pair]
    reject_drafts: Callable[..., Tensor]
    bind_greedy_head: Callable[..., Callable[[Tensor], Tensor] | None] | None = None
    copy_blocks: Callable[..., None]
    gather_blocks: Callable[..., None]
    scatter_blocks: Callable[..., None]
    supports_paged: Callable[[AttentionShape, torch.dtype], bool] = lambda _shape, _kv_dtype: True
    max_verify_group: Callable[[AttentionShape, torch.dtype, torch.device], int] = lambda *_: 1
    rotated_decode: Callable[..., Tensor] | None = None
    is_row_invariant: bool = False
    row_invariant: Callable[[LinearKernel], LinearKernel] = lambda multiply: multiply
    sequence: Callable[[int], RecordedOperations] | None = None
    score_tokens: Callable[..., None] | None = None

    def listed(self) -> str:
        """The names of operations by their implementation (triton, simd or torch, or else another package), for the log:
        `triton=embed,… torch=route,… none=…`. Those that do not exist for this device are under none."""
        names_by_package: dict[str, list[str]] = {}
        for name in (field.name for field in fields(self) if field.name not in _PROPERTIES):
            names_by_package.setdefault(_package(getattr(self, name)), []).append(name)
        return " ".join(f"{package}={','.join(names)}" for package, names in names_by_package.items())


def _package(operation: Callable[..., Any] | None) -> str:
    if operation is None:
        return "none"
    function = getattr(operation, "func", operation)  # of a partial
    package, _, module = function.__module__.partition(".")
    return module.partition(".")[0] if package == "kernels" else package
