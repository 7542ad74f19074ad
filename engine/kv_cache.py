"""The paged key/value tensors, one per layer: [N, P, 2, K, D].

Keys and values of a token lie together, so that one gather reads and one scatter writes both, and a block of a layer is one
contiguous piece of memory. Separate key and value pools, as other kernels want them, are strided views of it.
"""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from engine.memory_plan import MemoryPlan


def allocate_kv_cache(
    config: ModelConfig, plan: MemoryPlan, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """One zeroed tensor per layer; pages are touched here and not by the first request."""
    shape = (plan.num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
    return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)]
