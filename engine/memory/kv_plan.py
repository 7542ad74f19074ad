"""Whether a model has room, how many KV blocks there are and how long a request may be. Integers only.

A KV block holds keys and values of `block_size` tokens in all layers. At least one request of `max_model_len` tokens always
fits. When the operator left `max_model_len` open and memory is short, the context is what fits, and `EngineInfo` says so;
when it was set explicitly, too little memory is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.model import ModelConfig
from engine.errors import EngineConfigError
from engine.memory.fit import MemoryFit, gib
from engine.memory.needs import GIB
from engine.options import EngineOptions

CONTEXT_MIN = 2
SHORTEST_REQUEST = "a request needs at least one prompt token and one answer token"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What the KV cache is made of. A block holds `block_size` tokens; `block_bytes` spans all layers, those of a draft model
    included. `num_host_blocks` is the tier in main memory."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_model_len: int
    num_host_blocks: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def check_context(config: ModelConfig, options: EngineOptions) -> None:
    """Raise `EngineConfigError` for a context that the model does not have, or that no request fits."""
    wanted, longest = options.max_model_len, config.max_position_len
    if wanted is None:
        return
    if wanted < CONTEXT_MIN:
        raise EngineConfigError("max_model_len", f"({wanted}) is too short: {SHORTEST_REQUEST}")
    if wanted > longest:
        dynamic = any(rope.kind == "dynamic" for rope in config.ropes)
        why = "; rope type 'dynamic' is not computed beyond it" if dynamic else ""
        raise EngineConfigError("max_model_len", f"({wanted}) is longer than the model's context ({longest}){why}")


def check_fit(name: str, fit: MemoryFit, options: EngineOptions) -> None:
    """Raise `EngineConfigError`, naming the option, when a model does not fit as requested. A cache of a fixed size that holds
    no block is left to `plan_memory`. Operators set `num_kv_blocks` as `num_gpu_blocks_override`."""
    needs, given = fit.needs, fit.fixed_kv_bytes
    if given is None:
        if not fit.context_len:
            raise EngineConfigError("model", f"{name} does not fit: {fit.explain()}")
        if options.max_model_len is not None and not fit.fits:
            raise EngineConfigError("max_model_len", f"({options.max_model_len}) does not fit: {name} {fit.explain()}")
        return
    if not fit.num_blocks:
        return  # no request fits, whatever the device has: `plan_memory` refuses it
    most = needs.num_blocks(fit.usable_bytes)
    room_bytes = most * needs.block_bytes
    if most and fit.num_blocks > most:
        others = " and the other models of this GPU" if fit.others else ""
        room = f"beside {name}{others} there is room for {room_bytes} bytes ({gib(room_bytes)})"
        if options.num_kv_blocks is not None:
            problem = f"({options.num_kv_blocks} blocks, {gib(given)}) is too much: {room}, {most} blocks"
            raise EngineConfigError("num_gpu_blocks_override", problem)
        if options.kv_cache_bytes is not None:
            raise EngineConfigError("kv_cache_bytes", f"({given} bytes, {gib(given)}) is too much: {room}")
    if needs.fixed_bytes + given > fit.usable_bytes:
        misfit = f"{name} does not fit with {gib(given)} of keys and values"
        raise EngineConfigError("model", f"{misfit}: {fit.explain()}")


def short_cache_reason(config: ModelConfig, options: EngineOptions, fit: MemoryFit) -> str | None:
    """Why the context is shorter than the model's where that is due to the fixed size of the cache, None where it is not.
    `fit` is one that `check_fit` accepts."""
    longest = config.max_position_len
    if fit.fixed_kv_bytes is None or options.max_model_len is not None or fit.context_len == longest:
        return None
    cache = "kv_cache_bytes" if options.num_kv_blocks is None else "num_gpu_blocks_override"
    if options.num_kv_blocks is None and options.kv_cache_bytes is None:
        cache = f"{cache} (by default {gib(fit.fixed_kv_bytes)} on a CPU)"
    return f"{cache} has room for {fit.kv_tokens} tokens, {longest} tokens need {fit.needs.kv_bytes(longest)} bytes"


def plan_memory(config: ModelConfig, options: EngineOptions, *, block_bytes: int, available_bytes: int) -> MemoryPlan:
    """Divide `available_bytes` into blocks of `block_bytes`, for a context that `check_context` accepts. Raises
    `EngineConfigError`, naming the option."""
    size = options.block_size
    num_host_blocks = int(options.swap_space * GIB) // block_bytes
    if options.swap_space and not num_host_blocks:
        raise EngineConfigError("swap_space", f"({options.swap_space} GiB) is less than one KV block ({block_bytes} bytes)")
    num_blocks = available_bytes // block_bytes
    if num_blocks < 1:
        named = "the model's whole context" if options.max_model_len is None else "max_model_len"
        context_len = options.max_model_len or config.max_position_len
        raise EngineConfigError(
            "kv_cache_bytes",
            f"({available_bytes} bytes) is less than one KV block: no request fits. A block of {size} tokens takes "
            f"{block_bytes} bytes, {named} ({context_len} tokens) {-(-context_len // size) * block_bytes} bytes",
        )
    if num_blocks * size < CONTEXT_MIN:
        option = "kv_cache_bytes" if options.num_kv_blocks is None else "num_gpu_blocks_override"
        raise EngineConfigError(option, f"leaves {num_blocks * size} tokens of context; {SHORTEST_REQUEST}")
    if options.max_model_len is None:
        return MemoryPlan(num_blocks, size, block_bytes, min(config.max_position_len, num_blocks * size), num_host_blocks)
    if options.max_model_len > num_blocks * size:
        raise EngineConfigError(
            "max_model_len",
            f"({options.max_model_len}) does not fit into the KV cache: it needs "
            f"{-(-options.max_model_len // size) * block_bytes} bytes, and {num_blocks} blocks of {size} tokens have "
            f"{num_blocks * block_bytes}; lower it or give the cache more memory",
        )
    return MemoryPlan(num_blocks, size, block_bytes, options.max_model_len, num_host_blocks)
