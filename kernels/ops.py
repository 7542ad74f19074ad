"""The only import surface of the kernels: every operation the engine's layers call, from the implementation of their device.

`operations(device, dtype)` is the table of a device and of the dtype that layers pass. CPUs have functions compiled for their
vector units for float32 and torch's operations for everything else; NVIDIA GPUs have the Triton kernels. Modules are imported
on first use. There is no fall-back from one implementation to another: a missing or failing operation is an error. Layers look
the table up once, when they are created; the functions below look it up by their first tensor.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache

import torch

from kernels.alternatives import CHOICES, Choice, alternative_in_force, consulted, oldest_alternatives, put_in_force
from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.device_words import NO_WORDS, DeviceWords, Pieces, Words
from kernels.fusible_products import FusibleProduct, HasWeight, fusible_form
from kernels.gumbel import DRAFT, NO_TOKEN
from kernels.host_tokens import HostTokens
from kernels.operations import FUSED_ROWS_MAX, LinearKernel, LinearPacker, Operations
from kernels.paged_plan import PagedPlan, PagedPlanner, paged_plan_attention
from kernels.quantised_linear import Fp8Product, Fp8Rows, bind_fp8, bind_int4, bind_int8
from kernels.quantised_weights import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    int4_scale_dtype,
    pack_awq,
    pack_fp8,
    pack_gptq,
    pack_int8,
)
from kernels.recorded_operations import NotRecordable, RecordedOperations
from kernels.residual_stream import Stream
from kernels.sampling_columns import SLOT_WORDS, SUPPRESSED_IDS_MAX, SamplingColumns
from kernels.simd.large_pages import on_large_pages
from kernels.torch import sampling as plain_sampling
from kernels.torch.activation import gelu, gelu_tanh
from kernels.torch.fp8_rows import to_fp8
from kernels.torch.gathered_attention import GatheredPlan, GatheredPlanner, gathered_attention
from kernels.torch.invariant_attention import InvariantPlan, InvariantPlanner, invariant_attention
from kernels.torch.invariant_linear import in_invariant_tiles
from kernels.torch.norm import layer_norm
from kernels.transfer import send
from kernels.variants import CompilationFailed, KernelCache, Variants

__all__ = [
    "CHOICES",
    "DRAFT",
    "FUSED_ROWS_MAX",
    "NO_TOKEN",
    "NO_WORDS",
    "SLOT_WORDS",
    "SUPPRESSED_IDS_MAX",
    "AnyPlan",
    "AnyPlanner",
    "AttentionRow",
    "AttentionShape",
    "Choice",
    "CompilationFailed",
    "DeviceWords",
    "Fp8Product",
    "Fp8Rows",
    "Fp8Weight",
    "FusibleProduct",
    "GatheredPlanner",
    "HasWeight",
    "HostTokens",
    "Int4Weight",
    "Int8Weight",
    "LinearKernel",
    "LinearPacker",
    "NotRecordable",
    "Operations",
    "PagedPlan",
    "PagedPlanner",
    "Pieces",
    "RecordedOperations",
    "SamplingColumns",
    "Stream",
    "Variants",
    "Words",
    "alternative_in_force",
    "attention_planner",
    "bind_fp8",
    "bind_int4",
    "bind_int8",
    "compiled_together",
    "consulted",
    "fusible_form",
    "gelu",
    "gelu_tanh",
    "int4_scale_dtype",
    "kernel_cache",
    "lasting_zeros",
    "layer_norm",
    "oldest_alternatives",
    "operations",
    "pack_awq",
    "pack_fp8",
    "pack_gptq",
    "pack_int8",
    "pack_linear",
    "paged_attention",
    "plain_sampling",
    "put_in_force",
    "row_invariant",
    "send",
    "to_fp8",
]

AnyPlan = GatheredPlan | InvariantPlan | PagedPlan
AnyPlanner = GatheredPlanner | InvariantPlanner | PagedPlanner

_TABLES = {"cpu": "kernels.torch.table", "meta": "kernels.torch.table", "cuda": "kernels.triton.table"}
"""The module that holds each device type's table as `OPERATIONS`. On meta a model is only compared with its files."""

_FLOAT32_TABLES = {"kernels.torch.table": "kernels.simd.table"}
"""The table that replaces another one for float32 on a CPU."""

_INVARIANT_TABLES = {"kernels.triton.table": "kernels.triton.invariant.table"}
"""The table that replaces another one in batch-invariant engines."""


def operations(device: torch.device, dtype: torch.dtype | None = None, *, batch_invariant: bool = False) -> Operations:
    """The operations of a device for tensors of `dtype`; None for operations that do not depend on one. `batch_invariant`:
    those of batch-invariant engines, which on a CPU are the usual ones. Raises KeyError for a device without a table,
    ImportError if its kernels cannot be loaded."""
    name = _TABLES[device.type]
    if device.type == "cpu" and dtype is torch.float32:
        name = _FLOAT32_TABLES.get(name, name)
    return _load_table(_INVARIANT_TABLES.get(name, name) if batch_invariant else name)


@cache
def _load_table(name: str) -> Operations:
    table: Operations = importlib.import_module(name).OPERATIONS
    return table


def lasting_zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros that lives as long as an engine. On a CPU it is read block by block all over its memory, so large pages
    are requested for it. Raises RuntimeError if the device's allocator fails, OSError if the system's does."""
    if device.type == "cpu":
        return on_large_pages(*shape, dtype=dtype).zero_()
    return torch.zeros(shape, dtype=dtype, device=device)


def attention_planner(
    shape: AttentionShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype,
    batch_invariant: bool = False,
) -> AnyPlanner:
    """The planner of attention for tensors of `dtype`: over pages where the operations of the device can, else over rows
    gathered for torch's attention. `kv_dtype` is the format of the cache. `batch_invariant`: a query gets the same bits in any
    batch, however its prompt was split into chunks."""
    table = operations(device, dtype, batch_invariant=batch_invariant)
    if table.supports_paged(shape, kv_dtype) and (table.is_row_invariant or not batch_invariant):
        return PagedPlanner(shape, device=device)
    if batch_invariant:
        return InvariantPlanner(shape, dtype=dtype, device=device)
    return GatheredPlanner(shape, dtype=dtype, device=device, kv_dtype=kv_dtype)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    """The product with a weight, packed for its device. weight: [out, in], bias: [out] → a function [T, in] → [T, out]"""
    return operations(weight.device, weight.dtype).pack_linear(weight, bias)


def row_invariant(multiply: LinearKernel, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> LinearKernel:
    """`multiply` if it gives a row the same bits in any batch, else a product with its weights that does. Raises TypeError for
    a product on a GPU that does not expose its weight."""
    table = operations(device, dtype, batch_invariant=True)
    if table.is_row_invariant:
        return table.row_invariant(multiply)
    return in_invariant_tiles(multiply, num_columns, dtype=dtype, device=device)


def paged_attention(
    table: Operations, qkv: torch.Tensor, kv_cache: torch.Tensor | None, plan: AnyPlan, kv_scales: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of a step, by the kind of its plan: over gathered rows, batch-invariant, or over pages by the operations of
    `table`.

    qkv: [T, H+2K, D] rotated, kv_cache: [N, P, 2, K, D] already written, None for a plan of whole texts; kv_scales: [2] float32
    of keys and of values, None is one → [T, H, D]
    """
    if isinstance(plan, GatheredPlan):
        return gathered_attention(qkv, kv_cache, plan, kv_scales)
    assert kv_cache is not None, "this attention reads the cache"
    if isinstance(plan, PagedPlan):
        return paged_plan_attention(table, qkv, kv_cache, plan, kv_scales)
    return invariant_attention(qkv, kv_cache, plan, kv_scales)


def compiled_together(report: Callable[[Variants], None]) -> AbstractContextManager[None]:
    """A context that compiles Triton kernels together: inside it, launches of this thread only request their kernels and run
    nothing; at its end all of them are ready. `report` is called with their number. Raises `CompilationFailed`."""
    module = importlib.import_module("kernels.triton.launching.compiled_together")
    scope: AbstractContextManager[None] = module.compiled_together(report)
    return scope


def kernel_cache() -> KernelCache:
    """Where the Triton kernels are kept on disk once compiled, and their revision."""
    cache: KernelCache = importlib.import_module("kernels.triton.launching.kernel_cache").kernel_cache()
    return cache
