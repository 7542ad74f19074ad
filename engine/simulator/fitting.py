"""Would this model fit into that GPU: the engine's own prediction of memory, for a card that is not here. Knows no torch."""

from __future__ import annotations

from typing import Any

from engine.errors import EngineConfigError
from engine.memory_fit import MemoryFit
from engine.memory_needs import (
    CONTEXT_BYTES,
    EIGHT_BITS,
    FOUR_BITS,
    GRAPHS_MAX,
    HEAD_BITS,
    Formats,
    Load,
    MemoryShape,
    unquantised,
)
from engine.simulator.models import BLOCK_SIZE, SimulatedModel

ELEMENT_BYTES = 2
WEIGHTS = {"none": unquantised(ELEMENT_BYTES), "int8": EIGHT_BITS, "fp8": EIGHT_BITS, "int4": FOUR_BITS}
KV_BYTES = {"auto": ELEMENT_BYTES, "fp8": 1}


def memory_fit(
    model: SimulatedModel,
    memory_bytes: int,
    *,
    quantization: str,
    head_quantization: str | None = None,
    kv_cache_dtype: str,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    gpu_memory_utilization: float,
) -> MemoryFit:
    """What an engine with these options needs of `memory_bytes`. Raises `EngineConfigError`, naming the option."""
    _check("quantization", quantization, WEIGHTS)
    if head_quantization is not None:
        _check("head_quantization", head_quantization, HEAD_BITS)
    _check("kv_cache_dtype", kv_cache_dtype, KV_BYTES)
    wanted_len = model.max_model_len if max_model_len is None else max_model_len
    for option, number, highest in (
        ("max_model_len", wanted_len, model.max_model_len),
        ("max_num_seqs", max_num_seqs, max_num_batched_tokens),
        ("max_num_batched_tokens", max_num_batched_tokens, 1 << 24),
    ):
        if not 1 <= number <= highest:
            raise EngineConfigError(option, f"must be between 1 and {highest}, not {number}")
    if not 0 < gpu_memory_utilization <= 1:
        raise EngineConfigError("gpu_memory_utilization", f"must be above 0 and at most 1, not {gpu_memory_utilization!r}")
    weights = WEIGHTS[quantization]
    weights = weights if head_quantization is None else weights._replace(head_bits=HEAD_BITS[head_quantization])
    return MemoryFit(
        model=MemoryShape.of_dimensions(model.shape),
        formats=Formats(weights=weights, element_bytes=ELEMENT_BYTES, kv_element_bytes=KV_BYTES[kv_cache_dtype]),
        load=Load(
            num_tokens=max_num_batched_tokens,
            num_seqs=max_num_seqs,
            block_size=BLOCK_SIZE,
            num_graphs=GRAPHS_MAX,
            on_gpu=True,
            has_slots=True,
        ),
        usable_bytes=int(memory_bytes * gpu_memory_utilization),
        context_bytes=CONTEXT_BYTES,
        wanted_len=wanted_len,
    )


def facts(fit: MemoryFit) -> dict[str, Any]:
    """The parts of a model that fits, and what is left for keys and values."""
    needs, num_blocks = fit.needs, fit.needs.num_blocks(fit.usable_bytes)
    tokens = num_blocks * fit.load.block_size
    return {
        "usable_bytes": fit.usable_bytes,
        "weights_bytes": needs.weights_bytes,
        "activations_bytes": needs.activations_bytes,
        "graphs_bytes": needs.graphs_bytes,
        "slots_bytes": needs.slots_bytes,
        "context_bytes": needs.context_bytes,
        "kv_cache_bytes": num_blocks * needs.block_bytes,
        "num_kv_blocks": num_blocks,
        "kv_tokens": tokens,
        "max_model_len": fit.context_len,
        "requests_of_that_length": tokens // fit.context_len,
        "note": None if fit.fits else f"the context is shorter than the model's: {fit.explain()}",
    }


def _check(option: str, value: str, known: dict[str, Any]) -> None:
    if value not in known:
        raise EngineConfigError(option, f"must be one of {', '.join(known)}, not {value!r}")
