"""Messages of an engine as its process would send them, for tests of what reads them."""

from __future__ import annotations

from typing import Any

from engine.protocol import EngineInfo, EngineStatus, MemoryPart

GIB = 1024**3


def engine_info(**changes: Any) -> EngineInfo:
    """Facts of a small model on a CPU."""
    facts: dict[str, Any] = {
        "model": "demo", "architecture": "LlamaForCausalLM", "max_model_len": 2048, "vocab_size": 8192, "eos_token_ids": [1],
        "block_size": 16, "num_kv_blocks": 1000, "max_num_seqs": 64, "dtype": "float32", "device": "cpu",
        "device_name": "A processor", "kernels": "reference", "num_parameters": 7_900_000, "weights_bytes": GIB,
        "kv_bytes": 2 * GIB, "load_s": 1.0,
    }  # fmt: skip
    facts["memory"] = [
        MemoryPart(name="weights", predicted_bytes=GIB, measured_bytes=GIB),
        MemoryPart(name="activations", predicted_bytes=768 << 20),
        MemoryPart(name="graphs", predicted_bytes=0),
        MemoryPart(name="kv_cache", predicted_bytes=2 * GIB, measured_bytes=2 * GIB - (1 << 20)),
    ]
    return EngineInfo(**facts | changes)


def engine_status(**changes: Any) -> EngineStatus:
    """Gauges of an engine with a quarter of its KV blocks in use."""
    gauges: dict[str, Any] = {
        "num_running": 3, "num_waiting": 1, "kv_blocks_total": 1000, "kv_blocks_used": 250, "kv_blocks_cached": 100,
        "kv_blocks_free": 650, "step_ms": 12.5, "num_batched_tokens": 3, "steps_total": 10, "prompt_tokens_total": 0,
        "generation_tokens_total": 0, "prefix_cache_hit_tokens_total": 0, "preemptions_total": 0,
    }  # fmt: skip
    return EngineStatus(**gauges | changes)
