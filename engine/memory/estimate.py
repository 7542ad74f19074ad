"""What an engine with these options would need of a device's memory, computed from its configuration alone. Knows no torch.

An engine computes this before it loads, and `gatehouse plan` on any machine: both get the same result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from engine.config.model import ModelConfig, load_model_config
from engine.draft_config import check_draft_context, draft_config
from engine.formats import check_formats, computed_dtype, formats_of, has_fp8
from engine.memory.fit import FEW_SEATS, MemoryFit
from engine.memory.kv_plan import check_context, check_fit, plan_memory
from engine.memory.shape import Load, MemoryShape
from engine.options import CPU_KV_CACHE_BYTES, EngineOptions
from engine.scheduling.limits import SchedulerLimits
from engine.step_mode import StepMode
from engine.step_sizes import RECORDED_ROWS_MAX

SEAT_TOKENS = 256
"""On a GPU, if `max_num_seqs` is left open: the default is halved, to FEW_SEATS at the least, while the wanted context does not
fit beside the slots of so many requests, or the cache holds fewer than this many tokens for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """`usable_bytes` is what this engine may use, of which `context_bytes` are taken already; of a GPU `capability` is the
    compute capability, and `memory_bytes` all that it has. `others_bytes`: what it leaves to the engines of `others`."""

    device_type: str
    usable_bytes: int
    context_bytes: int
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    others: tuple[MemoryFit, ...] = ()
    others_bytes: int = 0


Estimate = Callable[[DeviceMemory], MemoryFit]
"""How one model with its options fits into so much memory."""


def checked_estimate(
    config: ModelConfig, options: EngineOptions, capability: tuple[int, int] | None, *, device_type: str = "cuda"
) -> Estimate:
    """The estimate of an engine of these options on a GPU of this capability, or on a CPU, which has none. Raises `ModelError`
    or `EngineConfigError` for what it would refuse, whatever the memory."""
    check_context(config, options)
    dtype = computed_dtype(options.dtype, config.torch_dtype, device_type)
    check_formats(config, options, dtype, capability)
    draft = draft_config(options, config, dtype, capability)
    return partial(estimate_fit, config, options, dtype, mode=StepMode.of(options, device_type), draft=draft)


def check_start(config: ModelConfig, options: EngineOptions, fit: MemoryFit) -> None:
    """Raise `EngineConfigError` for what an engine of these options, whose estimate is `fit`, would refuse before it loads."""
    check_fit(options.model.name, fit, options)
    block_bytes = fit.needs.block_bytes
    kv_bytes = fit.num_blocks * block_bytes if fit.fixed_kv_bytes is None else fit.fixed_kv_bytes
    plan = plan_memory(config, options, block_bytes=block_bytes, available_bytes=kv_bytes)
    if options.draft_model is not None:
        check_draft_context(load_model_config(options.draft_model), plan.max_model_len)
    SchedulerLimits(
        max_num_seqs=fit.load.num_seqs,
        max_num_batched_tokens=fit.load.num_tokens,
        max_model_len=plan.max_model_len,
        block_size=plan.block_size,
    )


def estimate_fit(
    config: ModelConfig,
    options: EngineOptions,
    dtype: str,
    memory: DeviceMemory,
    mode: StepMode,
    *,
    draft: ModelConfig | None = None,
) -> MemoryFit:
    """`dtype`: what is computed in. Memory for graphs is counted for every mode that launches ahead, even with graphs switched
    off, so that switching them off to look for a fault leaves the cache as large as it was."""
    load = Load(
        num_tokens=options.batched_tokens(memory.device_type),
        num_seqs=options.seats(memory.device_type),
        num_draft_tokens=options.max_draft_tokens,
        block_size=options.block_size,
        on_gpu=memory.device_type == "cuda",
        has_slots=mode.launches_ahead,
        batch_invariant=options.batch_invariant,
        recorded_rows=RECORDED_ROWS_MAX if mode is StepMode.RECORDED else 0,
    )
    fit = MemoryFit(
        model=MemoryShape.of(config),
        formats=formats_of(config, options, dtype),
        load=load,
        usable_bytes=memory.usable_bytes,
        context_bytes=memory.context_bytes,
        others=memory.others,
        others_bytes=memory.others_bytes,
        wanted_len=options.max_model_len or config.max_position_len,
        draft=None if draft is None else MemoryShape.of(draft),
        has_fp8=has_fp8(memory.capability),
        memory_bytes=memory.memory_bytes,
    )
    if load.on_gpu and options.max_num_seqs is None:
        fit = _fit_seats(fit)
    fixed_kv_bytes = _fixed_kv_bytes(options, memory.device_type, fit.needs.block_bytes)
    if fixed_kv_bytes is None:
        return fit
    fit = replace(fit, fixed_kv_bytes=fixed_kv_bytes, required_len=options.max_model_len or 0)
    return replace(fit, wanted_len=min(fit.wanted_len, fit.kv_tokens))


def _fixed_kv_bytes(options: EngineOptions, device_type: str, block_bytes: int) -> int | None:
    """The size of the cache where an option or the device decides it, None where the cache gets what is left."""
    if options.num_kv_blocks is not None:
        return options.num_kv_blocks * block_bytes
    return options.kv_cache_bytes or (CPU_KV_CACHE_BYTES if device_type == "cpu" else None)


def _fit_seats(fit: MemoryFit) -> MemoryFit:
    """The fit with the most seats, out of the default and its halves, that leave room for the wanted context and for enough
    tokens of each in the cache."""
    seats = [fit.load.num_seqs]
    while seats[-1] > FEW_SEATS:
        seats.append(max(FEW_SEATS, seats[-1] // 2))
    choices = [replace(fit, load=replace(fit.load, num_seqs=number)) for number in seats]
    fitting = [choice for choice in choices if choice.fits] or choices
    return next((choice for choice in fitting if choice.kv_tokens >= choice.load.num_seqs * SEAT_TOKENS), fitting[-1])
