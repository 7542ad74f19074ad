"""What an engine with these options would need of a device's memory, told by its configuration alone.

An engine asks before it loads, `models plan` wherever it is: both answers are this one. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.model import ModelConfig
from engine.formats import formats_of, has_fp8
from engine.memory_fit import MemoryFit
from engine.memory_needs import Load, MemoryShape
from engine.options import EngineOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """`usable_bytes` is what this engine may reach, of which `context_bytes` are taken already; `capability` is the compute
    capability of a GPU."""

    device_type: str
    usable_bytes: int
    context_bytes: int
    capability: tuple[int, int] | None = None


def fit_of(
    config: ModelConfig,
    options: EngineOptions,
    dtype: str,
    memory: DeviceMemory,
    *,
    draft: ModelConfig | None = None,
    kept_rows: int = 0,
    num_graphs: int = 0,
    has_slots: bool = False,
) -> MemoryFit:
    """`dtype` is computed in; `kept_rows` of a layer's activations stay beside those of a step."""
    load = Load(
        num_tokens=options.batched_tokens(memory.device_type) + kept_rows,
        num_seqs=options.max_num_seqs,
        num_guesses=options.max_guesses,
        block_size=options.block_size,
        num_graphs=num_graphs,
        on_gpu=memory.device_type == "cuda",
        has_slots=has_slots,
        batch_invariant=options.batch_invariant,
    )
    return MemoryFit(
        model=MemoryShape.of(config),
        formats=formats_of(config, options, dtype),
        load=load,
        usable_bytes=memory.usable_bytes,
        context_bytes=memory.context_bytes,
        wanted_len=options.max_model_len or config.max_position_len,
        draft=None if draft is None else MemoryShape.of(draft),
        has_fp8=has_fp8(memory.capability),
    )
