"""Operations of an emulated card in torch instead of Triton, for rehearsals of many steps.

The interpreter takes a tenth of a second per layer, too long for hundreds of steps. Here operations are those of the CPU table:
most do not depend on values, and torch launches them one by one. Those that read values, as no kernel may, become one launch
each: RETURNING, WRITING and `sample`. Mixtures of experts keep the implementation that synchronises with the host, so their
steps are not captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from kernels import ops, quantised_linear
from kernels.attention_rows import AttentionShape
from kernels.reference.rotated_decode import rotated_decode
from kernels.torch import table
from tests.support.rehearsal import quantised
from tests.support.rehearsal.card import current_card
from tests.support.rehearsal.leaves import map_leaves
from tests.support.rehearsal.tensors import refuse_host, to_host

RETURNING = ("paged_decode", "paged_prefill")
WRITING = (
    "copy_blocks", "gather_blocks", "scatter_blocks", "rope_and_cache", "prepare_decode", "advance_slots", "count_tokens",
    "apply_bitmask",
)  # fmt: skip


def launch_whole(function: Callable[..., Any]) -> Callable[..., None]:
    """Make one launch of a function over CPU tensors that writes to its arguments."""

    def launch(*args: Any, **kwargs: Any) -> None:
        refuse_host((args, kwargs))
        host_args, host_kwargs = map_leaves(to_host, (args, kwargs))
        current_card().stream.add(lambda: function(*host_args, **host_kwargs))

    return launch


def launch_with_output(function: Callable[..., Any], make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make one launch of a function that writes to `out` and returns it; `make` allocates `out` if it is not given."""

    def launch(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        out = make(*args) if out is None else out
        launch_whole(function)(*args, out=out, **kwargs)
        return out

    return launch


def _like_queries(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


def _like_heads(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
    shape: AttentionShape = rest[-1]
    return torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)


def _rotated_into(*args: Any, out: torch.Tensor, **kwargs: Any) -> None:
    out.copy_(rotated_decode(*args, **kwargs))


def _tokens(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)


_LAUNCHED: dict[str, Any] = {
    **{name: launch_with_output(getattr(table, name), _like_queries) for name in RETURNING},
    **{name: launch_whole(getattr(table, name)) for name in WRITING},
    "sample": launch_with_output(table.OPERATIONS.sample, _tokens),
    "rotated_decode": launch_with_output(_rotated_into, _like_heads),
}
OPERATIONS = replace(
    table.OPERATIONS,
    description="torch operations on a rehearsed card",
    supports_paged=lambda _shape, _kv_dtype: True,
    max_verify_group=lambda *_: 4,
    **_LAUNCHED,
)


@contextmanager
def replace_triton_operations() -> Iterator[None]:
    """Inside the block, models built for cards use these operations and the products of `quantised`."""
    load_function = quantised_linear._load_function

    def bound(name: str, device_type: str) -> Callable[..., Any]:
        product: Callable[..., Any] = getattr(quantised, name) if device_type == "cuda" else load_function(name, device_type)
        return product

    with (
        mock.patch.dict(ops._TABLES, cuda=f"{__package__}.table"),
        mock.patch.object(quantised_linear, "_load_function", bound),
    ):
        yield
