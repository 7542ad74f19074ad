"""Self-attention over the paged cache with grouped key/value heads (arXiv 2305.13245) and optional QK-norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from engine.config.model import LayerConfig, ModelConfig
from engine.layers.forward_inputs import ForwardInputs
from engine.layers.linear import FusedLinear
from engine.layers.norm import RMSNorm
from engine.quantization.kv_scales import KvScales
from engine.weights import WeightPlan
from kernels import ops


def attention_shapes(config: ModelConfig, block_size: int) -> list[ops.AttentionShape]:
    """The shape that the kernels need for each of the model's `windows`."""
    return [
        ops.AttentionShape(
            block_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            sliding_window=window,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
        )
        for window in config.windows
    ]


def are_recordable(
    shapes: Sequence[ops.AttentionShape], *, dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether decode attention of these shapes can be recorded: the device's operations can be, and its attention reads pages
    of a cache in `kv_dtype`. A layer that contains an operation of torch still cannot be recorded."""
    table = ops.operations(device, dtype)
    return table.sequence is not None and all(table.supports_paged(shape, kv_dtype) for shape in shapes)


class Attention:
    """Projects, normalises and rotates queries and keys, writes keys and values to the cache, attends. The output projection is
    called separately, because the caller may need it for some rows only."""

    def __init__(
        self, config: ModelConfig, layer: LayerConfig, *, dtype: torch.dtype, device: torch.device, batch_invariant: bool
    ) -> None:
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        self._num_heads, self._num_kv_heads, self._head_dim = heads, kv_heads, size
        self._ops = ops.operations(device, dtype, batch_invariant=batch_invariant)
        norms_heads = config.family.qk_norm != "full"  # each by itself, which needs no other head
        self._rotated_decode = self._ops.rotated_decode if norms_heads else None
        self.kv_scales: torch.Tensor | None = None
        """[2] float32, of keys and of values, by which a cache of 8 bits is scaled; None for any other cache."""
        self._stored_kv_scales = KvScales(device)
        self._rope_idx, self._window_idx = layer.rope_idx, layer.window_idx
        self._rotary_dim = config.ropes[layer.rope_idx].rotary_dim
        parts = [("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size)]
        if config.family.fused_projections:
            parts = [("qkv_proj", (heads + 2 * kv_heads) * size)]
        self._qkv = FusedLinear(parts, config.hidden_size, bias=config.qkv_bias, dtype=dtype, device=device)
        self._out = FusedLinear([("o_proj", config.hidden_size)], heads * size, bias=config.o_bias, dtype=dtype, device=device)
        self._q_norm: RMSNorm | None = None
        self._k_norm: RMSNorm | None = None
        if config.family.qk_norm is not None:
            sizes = (heads * size, kv_heads * size) if config.family.qk_norm == "full" else (size, size)
            self._q_norm, self._k_norm = (
                RMSNorm(n, config.rms_norm_eps, dtype=dtype, device=device, offset=config.family.norm_offset) for n in sizes
            )

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        self._qkv.plan(plan, prefix)
        self._out.plan(plan, prefix)
        self._stored_kv_scales.plan(plan, prefix)
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.plan(plan, f"{prefix}.q_norm")
            self._k_norm.plan(plan, f"{prefix}.k_norm")

    def scale_kv(self) -> bool:
        """Keep keys and values in 8 bits from now on. Returns whether their scales came from the checkpoint; else they are
        one."""
        self.kv_scales = self._stored_kv_scales.values
        return None not in self._stored_kv_scales.stored

    def pack(self, packer: ops.LinearPacker = ops.pack_linear) -> None:
        self._qkv.pack(packer)
        self._out.pack(packer)
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.pack()
            self._k_norm.pack()

    @property
    def fusible_products(self) -> tuple[ops.FusibleProduct | None, ops.FusibleProduct | None]:
        """The products before and after `attend`, each None where it cannot be fused with the operations around it."""
        return self._qkv.fusible, self._out.fusible

    @property
    def takes_fp8_rows(self) -> bool:
        return self._qkv.takes_fp8_rows

    def __call__(self, x: torch.Tensor | ops.Fp8Rows, inputs: ForwardInputs, kv_cache: torch.Tensor | None) -> torch.Tensor:
        """x: [T, hidden], kv_cache: [N, P, 2, K, D], or None when this batch contains every text whole → [T, H·D]"""
        return self.attend(self._qkv(x), inputs, kv_cache)

    def output_projection(self, attended: torch.Tensor) -> torch.Tensor:
        """attended: [R, H·D], some rows of the output of `attend` → [R, hidden]"""
        return self._out(attended)

    def attend(self, projected: torch.Tensor, inputs: ForwardInputs, kv_cache: torch.Tensor | None) -> torch.Tensor:
        """projected: [T, (H+2K)·D], which may be changed in place → [T, H·D]"""
        heads, kv_heads, size = self._num_heads, self._num_kv_heads, self._head_dim
        qkv = projected.view(-1, heads + 2 * kv_heads, size)
        cos, sin = inputs.rotations[self._rope_idx]
        q_norm, k_norm = self._q_norm, self._k_norm
        plan = inputs.attention[self._window_idx]
        operands = (qkv, cos, sin, kv_cache, inputs.slot_mapping)
        options: dict[str, Any] = {
            "rotary_dim": self._rotary_dim,
            "q_weight": None if q_norm is None else q_norm.weight,
            "k_weight": None if k_norm is None else k_norm.weight,
            "eps": 0.0 if q_norm is None else q_norm.eps,
            "kv_scales": self.kv_scales,
        }
        if self._rotated_decode is not None and isinstance(plan, ops.PagedPlan) and plan.takes_projections:
            tables = (plan.block_tables, plan.context_lens, plan.shape)
            attended = self._rotated_decode(*operands, *tables, workspace=plan.workspace, **options)
        else:
            self._ops.rope_and_cache(*operands, num_kv_heads=kv_heads, **options)
            attended = ops.paged_attention(self._ops, qkv, kv_cache, plan, self.kv_scales)
        return attended.view(-1, heads * size)
