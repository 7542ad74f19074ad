"""What of the formats a card cannot compute with, said before anything is loaded."""

from __future__ import annotations

import torch

from engine.config.model import ModelConfig
from engine.config.quantization import Fp8Weights, Int4Weights
from engine.errors import EngineConfigError
from engine.options import EngineOptions

FP8_CAPABILITY = (8, 9)


def check_card(config: ModelConfig, options: EngineOptions, dtype: torch.dtype, device: torch.device) -> None:
    """Raise `EngineConfigError`, naming the option, for a format that this GPU has no instructions or no kernel for."""
    if device.type != "cuda":
        return
    weights = None if config.quantization is None else config.quantization.weights
    if isinstance(weights, Int4Weights) and dtype.itemsize > 2:
        raise EngineConfigError("dtype", "must be bfloat16 or float16 on a GPU for weights of 4 bits")
    capability = torch.cuda.get_device_capability(device)
    if capability >= FP8_CAPABILITY:
        return
    found = f"needs a GPU of compute capability 8.9 or newer, this one has {capability[0]}.{capability[1]}"
    if options.quantization == "fp8" or isinstance(weights, Fp8Weights):
        raise EngineConfigError("quantization", f"fp8 {found}; use int8 on a checkpoint that is not quantised")
    if options.kv_cache_dtype != "auto":
        raise EngineConfigError("kv_cache_dtype", f"{options.kv_cache_dtype} {found}; use auto")
