"""Self-attention over the paged cache with grouped key/value heads (arXiv 2305.13245) and optional QK-norm."""

from __future__ import annotations

import torch

from engine.batch_inputs import BatchInputs
from engine.config import ModelConfig
from engine.layers.linear import FusedLinear
from engine.layers.norm import RMSNorm
from engine.weights import WeightPlan
from kernels import ops


class Attention:
    """Projects, rotates, writes keys and values to the cache, attends, projects back."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        self._num_heads, self._num_kv_heads, self._head_dim = heads, kv_heads, size
        parts = [("q_proj", heads * size), ("k_proj", kv_heads * size), ("v_proj", kv_heads * size)]
        self._qkv = FusedLinear(parts, config.hidden_size, bias=config.qkv_bias, dtype=dtype, device=device)
        self._out = FusedLinear([("o_proj", config.hidden_size)], heads * size, bias=config.o_bias, dtype=dtype, device=device)
        self._q_norm: RMSNorm | None = None
        self._k_norm: RMSNorm | None = None
        if config.family.qk_norm:
            self._q_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)
            self._k_norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        self._qkv.plan(plan, prefix)
        self._out.plan(plan, prefix)
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.plan(plan, f"{prefix}.q_norm")
            self._k_norm.plan(plan, f"{prefix}.k_norm")

    def pack(self) -> None:
        self._qkv.pack()
        self._out.pack()

    def __call__(self, x: torch.Tensor, inputs: BatchInputs, kv_cache: torch.Tensor) -> torch.Tensor:
        """x: [T, hidden], kv_cache: [N, P, 2, K, D] → [T, hidden]"""
        heads, kv_heads, size = self._num_heads, self._num_kv_heads, self._head_dim
        qkv = self._qkv(x).view(-1, heads + 2 * kv_heads, size)
        qk = qkv[:, : heads + kv_heads]
        if self._q_norm is not None and self._k_norm is not None:
            qk[:, :heads] = self._q_norm(qk[:, :heads])
            qk[:, heads:] = self._k_norm(qk[:, heads:])
        ops.rope(qk, inputs.cos, inputs.sin)
        ops.write_kv(qkv[:, heads:], kv_cache, inputs.slot_mapping)
        attended = ops.paged_attention(qkv, kv_cache, inputs.attention)
        return self._out(attended.view(-1, heads * size))
