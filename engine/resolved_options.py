"""Options of an engine with their defaults resolved, and all refusals that need no weights.

Nothing is loaded or allocated here: options that contradict each other, the model, the device or its memory are refused within
a second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.config.model import ModelConfig, load_model_config
from engine.device import device_capability, format_name, resolve_device, resolve_dtype, resolve_kv_dtype
from engine.draft_config import check_draft_context, draft_config
from engine.formats import check_formats
from engine.memory.forecast import MemoryForecast, forecast_memory
from engine.memory.kv_plan import MemoryPlan, check_context, plan_memory
from engine.memory.main_memory import check_swap_space
from engine.options import EngineOptions
from engine.runner.runner_choice import resolve_step_mode
from engine.scheduling.limits import SchedulerLimits
from engine.step_mode import StepMode
from engine.switches import check_switches
from engine.text.shared_prefixes import shared_prefixes


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """What an engine is built from: options whose defaults are those of the model, the device and its memory.

    `draft`: the configuration of the draft model, if there is one. `mode`: how steps are run, unless the loaded models allow no
    graphs. `shared_prefixes`: token ids of prompts that all tenants share.
    """

    options: EngineOptions
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    config: ModelConfig
    draft: ModelConfig | None
    mode: StepMode
    forecast: MemoryForecast
    shared_prefixes: list[list[int]]

    @classmethod
    def of(cls, options: EngineOptions) -> ResolvedOptions:
        """Raises `ModelError` or `EngineConfigError` for whatever can be refused before anything is loaded."""
        check_switches()
        device = resolve_device(options.device)
        config = load_model_config(options.model)
        check_context(config, options)
        dtype = resolve_dtype(options.dtype, config.torch_dtype, device)
        capability = device_capability(device)
        check_formats(config, options, format_name(dtype), capability)
        check_swap_space(options, device.type)
        draft = draft_config(options, config, format_name(dtype), capability)
        mode = resolve_step_mode(config, options, dtype=dtype, device=device)
        name = options.name or options.model.name
        forecast = forecast_memory(name, config, options, mode, dtype=dtype, device=device, draft=draft)
        forecast.check(options)
        options = replace(options, max_num_seqs=forecast.fit.load.num_seqs)
        kv_dtype = resolve_kv_dtype(options.kv_cache_dtype, dtype)
        prefixes = shared_prefixes(options)
        resolved = cls(options, device, dtype, kv_dtype, config, draft, mode, forecast, prefixes)
        resolved.scheduler_limits(resolved.memory_plan(forecast.available_kv_bytes))
        return resolved

    def memory_plan(self, available_bytes: int) -> MemoryPlan:
        """Divide so many bytes of KV cache into blocks. Raises `EngineConfigError`."""
        block_bytes = self.forecast.fit.needs.block_bytes
        plan = plan_memory(self.config, self.options, block_bytes=block_bytes, available_bytes=available_bytes)
        if self.draft is not None:
            check_draft_context(self.draft, plan.max_model_len)
        return plan

    def scheduler_limits(self, plan: MemoryPlan) -> SchedulerLimits:
        """The bounds of scheduling over a cache of this plan. Raises `EngineConfigError`."""
        options, device = self.options, self.device.type
        return SchedulerLimits(
            max_num_seqs=options.seats(device),
            max_num_batched_tokens=options.batched_tokens(device),
            max_model_len=plan.max_model_len,
            block_size=options.block_size,
        )
