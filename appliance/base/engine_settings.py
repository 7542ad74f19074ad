"""The settings that are options of every engine process, with their defaults and limits for operators. Knows no engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Annotated, Any

from appliance.base import setting_values as values_of

_OPTION_NAMES = {"engine_threads": "threads", "swap_space_gib": "swap_space", "speculative": "speculative_config"}
"""What `engine.options.EngineOptions` calls them, where it is not the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """None means that the engine chooses. `speculative` is a JSON object with vLLM's keys, as text; None is off.
    `shared_prefixes` are files."""

    device: Annotated[str, values_of.choice("auto", "cuda", "cpu")] = "auto"
    dtype: Annotated[str, values_of.choice("auto", "float32", "bfloat16", "float16")] = "auto"
    engine_threads: Annotated[int | None, values_of.whole(1, 1024)] = None
    max_num_seqs: Annotated[int | None, values_of.whole(1, 1024)] = None
    max_num_batched_tokens: Annotated[int | None, values_of.whole(1, 1_000_000)] = None
    max_model_len: Annotated[int | None, values_of.context_len] = None
    kv_cache_bytes: Annotated[int | None, values_of.size(values_of.MIB, 1024**5)] = None
    gpu_memory_utilization: Annotated[float, values_of.number(0.01, 1)] = 0.9
    enable_prefix_caching: Annotated[bool, values_of.flag] = True
    block_size: Annotated[int, values_of.power_of_two(1024)] = 16
    quantization: Annotated[
        str | None, values_of.choice("int8", "fp8", "none", "awq", "gptq", "compressed-tensors", "modelopt")
    ] = None
    head_quantization: Annotated[str | None, values_of.choice("none", "int8")] = None
    kv_cache_dtype: Annotated[str, values_of.choice("auto", "fp8", "fp8_e4m3")] = "auto"
    swap_space_gib: Annotated[float, values_of.number(0, 4096)] = 0.0
    speculative: Annotated[str | None, values_of.speculative] = None
    batch_invariant: Annotated[bool, values_of.flag] = False
    enforce_eager: Annotated[bool, values_of.flag] = False
    scheduling_policy: Annotated[str, values_of.choice("fair", "fcfs")] = "fair"
    inter_token_target_ms: Annotated[float | None, values_of.number(0.1, 60_000)] = None
    shared_prefixes: Annotated[tuple[str, ...], values_of.files] = ()

    def engine_options(self) -> dict[str, Any]:
        """Return what an engine is told: values of JSON by the names of its options, those that are None left out."""
        values = {field.name: getattr(self, field.name) for field in fields(EngineSettings)}
        if self.speculative is not None:
            values["speculative"] = json.loads(self.speculative)
        return {_OPTION_NAMES.get(name, name): value for name, value in values.items() if value is not None}
