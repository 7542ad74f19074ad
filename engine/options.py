"""How one engine is to run, and the defaults of what was left open. Knows no torch.

None means: chosen when the model and the device are known; `EngineInfo` tells what was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import EngineConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")

CPU_KV_CACHE_BYTES = 256 * 1024 * 1024
CPU_BATCHED_TOKENS = 512
CUDA_BATCHED_TOKENS = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Options of one engine process. Raises `EngineConfigError`, naming the option."""

    model: Path
    name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_bytes: int | None = None
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise EngineConfigError("device", f"must be one of {', '.join(DEVICES)}, not {self.device!r}")
        if self.dtype not in DTYPES:
            raise EngineConfigError("dtype", f"must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise EngineConfigError(
                "gpu_memory_utilization", f"must be above 0 and at most 1, not {self.gpu_memory_utilization}"
            )
        for option in ("max_model_len", "max_num_batched_tokens", "kv_cache_bytes", "num_kv_blocks", "threads"):
            value = getattr(self, option)
            if value is not None and value < 1:
                raise EngineConfigError(option, f"must be at least 1, not {value}")
        for option in ("max_num_seqs", "block_size"):
            if getattr(self, option) < 1:
                raise EngineConfigError(option, f"must be at least 1, not {getattr(self, option)}")

    def batched_tokens(self, device_type: str) -> int:
        """The token budget of a step: as asked, else what suits the device and lets every seat decode."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(self.max_num_seqs, CUDA_BATCHED_TOKENS if device_type == "cuda" else CPU_BATCHED_TOKENS)
