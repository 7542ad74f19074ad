"""Names of devices and number formats, resolved to torch's, with the errors an operator needs. Also the CPU's environment."""

from __future__ import annotations

import os

import torch

from engine.config.model import ModelConfig
from engine.errors import EngineConfigError
from engine.options import CPU_KV_CACHE_BYTES, EngineOptions
from engine.runner.memory_plan import GIB, MemoryPlan, activation_bytes

SWAP_SPACE_SHARE_MAX = 0.8

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU if torch sees one, else the CPU; `cuda` without a usable GPU is an error."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise EngineConfigError("device", "is cuda, but torch finds no usable NVIDIA GPU here; use cpu or auto")
    return torch.device("cuda", 0) if name == "cuda" or (name == "auto" and available) else torch.device("cpu")


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """`auto` computes in float32 on CPUs (16-bit products are many times slower there), else in the checkpoint's format."""
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else DTYPES.get(checkpoint_dtype, torch.float32)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads != 1 else ''}"


def kv_bytes_available(config: ModelConfig, options: EngineOptions, *, element_bytes: int, device: torch.device) -> int:
    """Bytes for the KV cache, once the weights are loaded."""
    if options.kv_cache_bytes is not None:
        return options.kv_cache_bytes
    if device.type == "cpu":
        return CPU_KV_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    tokens = options.batched_tokens(device.type)
    reserved = activation_bytes(config, tokens, options.max_num_seqs, element_bytes)
    return max(0, int(total * options.gpu_memory_utilization) - (total - free) - reserved)


def check_kv_memory(plan: MemoryPlan, options: EngineOptions, device: torch.device) -> None:
    """Raise `EngineConfigError` for a KV cache that the device cannot hold: before memory is touched, because a machine that
    runs out of it ends processes instead of refusing. `num_kv_blocks` is `num_gpu_blocks_override` to those who set it."""
    memory = _main_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[1]
    if plan.kv_bytes <= memory:
        return
    fits = f"{memory} bytes of memory hold {memory // plan.block_bytes} blocks"
    if options.num_kv_blocks is not None:
        raise EngineConfigError("num_gpu_blocks_override", f"({plan.num_blocks} blocks) needs {plan.kv_bytes} bytes; {fits}")
    raise EngineConfigError("kv_cache_bytes", f"({plan.kv_bytes}) is more than there is: {fits} of {plan.block_bytes} bytes")


def _main_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_swap_space(options: EngineOptions) -> None:
    """Raise `EngineConfigError` for a host tier that main memory cannot hold."""
    memory = _main_memory()
    if options.swap_space * GIB > memory * SWAP_SPACE_SHARE_MAX:
        raise EngineConfigError(
            "swap_space",
            f"({options.swap_space:g} GiB) is more than {SWAP_SPACE_SHARE_MAX:.0%} of main memory ({memory / GIB:.1f} GiB)",
        )
