"""Composes an engine from a model directory and options: the composition root."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from engine.device import device_name, format_name, unused_gpu
from engine.environment import default_threads
from engine.formats import UNQUANTISED
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.masks import GrammarMasks
from engine.grammar.queue import GrammarQueue, LazyCompiler
from engine.grammar.vocabulary import load_vocabulary
from engine.loop import Engine
from engine.memory.device import free_kv_bytes
from engine.memory.fit import format_distinct
from engine.memory.forecast import MeasuredMemory, MemoryMeter, format_parts, underestimated
from engine.memory.kv_plan import MemoryPlan
from engine.models.loading import LoadedDecoder, load_decoder
from engine.options import EngineOptions
from engine.protocol import EngineInfo
from engine.resolved_options import ResolvedOptions
from engine.runner.calibration import MeasuredSpeed, PassTiming, measure_speed
from engine.runner.kernel_choices import KernelChoices
from engine.runner.kv_cache import BlockMover
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.runner_choice import make_slot_runner
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_timing import SlotTiming
from engine.runner.slot_warm_up import warm_up
from engine.runner.warm_up import (
    compile_float32_logits,
    compile_steps,
    compile_texts,
    compile_verification,
    compiles_at_first_use,
    compiling,
    run_largest_step,
)
from engine.sampling.sampler import Sampler
from engine.scheduling.block_pool import PROTECTED_PERCENT, BlockPool
from engine.scheduling.fair_policy import FairPolicy
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policy import FcfsPolicy
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_budget import BudgetTargets, StepBudget
from engine.scheduling.step_time import StepTimeModel
from engine.speculation.adaptive_drafter import AdaptiveDrafter
from engine.start_times import StartTimes
from engine.step_mode import StepMode
from engine.switches import MEASURED_KERNELS, is_on, switched_off
from kernels import ops

log = logging.getLogger("gatehouse.engine")

WEIGHTS_SHARE = 0.5
"""The share of loading weights in the progress of a start that also compiles kernels: a first start takes about as long for
these."""

NO_GRAPHS = "no graphs: experts chosen by the host"
"""For a mixture of experts whose weights no single launch can read: each of its layers waits for the host in every step."""

NOT_RECORDED = "not recorded: the model or its draft model has an operation that cannot be"
"""For decode steps on a CPU that are computed operation by operation."""

NOT_OVER_PAGES = "not recorded: no attention for these heads or this format of keys and values reads the cache's pages"
"""For a CPU whose steps are made on the host although `enforce_eager` was not set."""


@dataclass(frozen=True, slots=True)
class CachedModels:
    """The models with their caches, as the plain runner has them, and how steps are run: `mode` has no graphs where a model
    waits for the host within a step."""

    plan: MemoryPlan
    runner: ModelRunner
    mode: StepMode

    @property
    def has_no_graphs(self) -> bool:
        """Whether steps are launched ahead but not captured because a model waits for the host, not because of a switch."""
        return self.mode.launches_ahead and any(decoder.has_host_sync for decoder in self.runner.decoders)


def build_engine(
    options: EngineOptions, *, progress: Callable[[float], None] = lambda _: None, has_one_caller: bool = False
) -> Engine:
    """Load the model, allocate its cache, compile and time its steps. Raises `ModelError` or `EngineConfigError`. `progress` is
    called with 0 … 1; where kernels are compiled at the start, they are the last part. With `has_one_caller` any number of
    grammars may wait."""
    times = StartTimes()
    torch.set_num_threads(options.threads or default_threads())
    resolved = ResolvedOptions.of(options)
    options, device = resolved.options, resolved.device
    times.record("kernels")  # a CPU's, compiled or found on disk, when its memory was inspected
    meter = MemoryMeter(device)
    weights_share = WEIGHTS_SHARE if compiles_at_first_use(device) else 1.0
    model, draft = _load_models(resolved, progress=lambda loaded: progress(weights_share * loaded))
    times.record("weights")
    cached = _allocate_caches(resolved, model, draft)
    times.record("cache")
    choices = _kernel_choices(resolved, model, cached)
    limits = resolved.scheduler_limits(cached.plan)
    meter.record("cache")
    meter.allocate_workspace()
    if compiles_at_first_use(device):
        with compiling("steps", lambda ready: progress(weights_share + (1 - weights_share) * ready)):
            _compile_kernels(cached, limits, options)
        times.record("kernels")  # compiled or found in Triton's cache on disk
        for decoder in cached.runner.decoders:
            run_largest_step(decoder, limits, max_draft_tokens=options.max_draft_tokens)
        times.record("steps")
    meter.record("steps")
    with choices.first_use():
        slot_runner = _make_slot_runner(resolved, cached, limits, meter, choices) if cached.mode.has_slots else None
        if slot_runner is not None:
            times.record("graphs")
        weights_bytes = sum(loaded.size.num_bytes for loaded in (model, draft) if loaded)
        rotary_bytes = sum(table.num_bytes for decoder in cached.runner.decoders for table in decoder.rotaries)
        graphs = None if slot_runner is None else slot_runner.steps.calls.captured_graphs
        measured = meter.measured(weights_bytes, cached.plan.kv_bytes, rotary_bytes, graphs)
        models = cached.runner.target, cached.runner.draft
        speed = measure_speed(
            resolved.config,
            PassTiming(*models, limits) if slot_runner is None else SlotTiming(slot_runner.steps),
            *models,
            limits,
            weight_bytes=model.size.num_bytes / model.size.num_parameters,
            max_draft_tokens=options.max_draft_tokens,
        )
        times.record("speed")
    budget = _make_step_budget(options, speed.step_times, () if slot_runner is None else slot_runner.chunk_sizes)
    scheduler = _make_scheduler(resolved, cached.plan, limits, speed, budget)
    info = _make_info(resolved, model, cached, measured, choices, load_s=times.total_s)
    log.info("operations %s", ops.operations(device, resolved.dtype, batch_invariant=options.batch_invariant).listed())
    choices.log_decisions()
    _log_start(info, _describe_mode(cached, slot_runner, is_requested=options.enforce_eager), times)
    grammars = _make_grammar_queue(options, info, cached.runner.masks, has_one_caller=has_one_caller)
    return Engine(scheduler, slot_runner or cached.runner, info, grammars, on_failure=choices.note_failure)


def _load_models(resolved: ResolvedOptions, *, progress: Callable[[float], None]) -> tuple[LoadedDecoder, LoadedDecoder | None]:
    """The target, quantised as requested, and the draft model, which is not."""
    options = resolved.options
    load = partial(load_decoder, dtype=resolved.dtype, device=resolved.device, batch_invariant=options.batch_invariant)
    model = load(
        options.model,
        resolved.config,
        quantization=options.quantization,
        head_quantization=options.head_quantization,
        progress=progress,
    )
    if resolved.draft is None or options.draft_model is None:
        return model, None
    return model, load(options.draft_model, resolved.draft)


def _allocate_caches(resolved: ResolvedOptions, model: LoadedDecoder, draft: LoadedDecoder | None) -> CachedModels:
    options, device = resolved.options, resolved.device
    if device.type == "cuda":
        torch.cuda.empty_cache()  # release what loading held temporarily before the rest is counted
    kv_bytes = resolved.forecast.fit.fixed_kv_bytes
    if kv_bytes is None:
        fit = resolved.forecast.fit
        kv_bytes = free_kv_bytes(fit.needs, options.gpu_memory_utilization, device, others_bytes=fit.others_bytes)
    plan = resolved.memory_plan(kv_bytes)
    target = _make_paged_decoder(model, resolved, plan)
    draft_decoder = None if draft is None else _make_paged_decoder(draft, resolved, plan)
    decoders = [target] if draft_decoder is None else [target, draft_decoder]
    mode = resolved.mode.without_graphs() if any(decoder.has_host_sync for decoder in decoders) else resolved.mode
    runner = ModelRunner(
        target,
        Sampler(device),
        BlockMover([cache for decoder in decoders for cache in decoder.kv_caches], plan.num_host_blocks),
        GrammarMasks(target.vocab_size),
        draft=draft_decoder,
        accepts_by_equality=not options.enforce_eager,
    )
    return CachedModels(plan, runner, mode)


def _make_paged_decoder(model: LoadedDecoder, resolved: ResolvedOptions, plan: MemoryPlan) -> PagedDecoder:
    device = resolved.device.type
    text_tokens = resolved.options.batched_tokens(device) if device == "cuda" else None
    return PagedDecoder(model.decoder, plan, kv_dtype=resolved.kv_dtype, text_tokens=text_tokens)


def _compile_kernels(cached: CachedModels, limits: SchedulerLimits, options: EngineOptions) -> None:
    """Launch one step of each kind: within `compiling` this requests their kernels and runs nothing."""
    runner, speculative = cached.runner, options.speculative_config
    for decoder in runner.decoders:
        compile_steps(decoder, limits, max_draft_tokens=options.max_draft_tokens)
    compile_texts(runner.target, limits)
    runner.mover.compile()
    vocab_size, device = runner.target.vocab_size, runner.target.device
    compile_float32_logits(vocab_size, device)
    if not cached.mode.has_slots and runner.draft is not None and speculative is not None:
        compile_verification(vocab_size, speculative.num_speculative_tokens, device)


def _make_slot_runner(
    resolved: ResolvedOptions, cached: CachedModels, limits: SchedulerLimits, meter: MemoryMeter, choices: KernelChoices
) -> SlotRunner:
    """Make the runner that launches steps over slots, with the steps ready that a few requests need."""
    slot_runner = make_slot_runner(cached.runner, limits, cached.mode, max_draft_tokens=resolved.options.max_draft_tokens)
    meter.record("slots")
    warm_up(slot_runner.steps, choices)
    meter.record("graphs")
    return slot_runner


def _kernel_choices(resolved: ResolvedOptions, model: LoadedDecoder, cached: CachedModels) -> KernelChoices:
    """The kernels that serve: on a GPU those that were fastest where steps are captured."""
    options = resolved.options
    if resolved.device.type != "cuda" or options.batch_invariant:
        return KernelChoices(None)
    if not is_on(MEASURED_KERNELS):
        return KernelChoices.oldest()
    facts = {
        "model": repr(resolved.config),
        "draft": repr(resolved.draft),
        "formats": [str(resolved.dtype), str(resolved.kv_dtype), model.quantization, options.head_quantization],
        "sizes": [options.max_model_len, options.block_size, options.max_num_seqs],
    }
    return KernelChoices.of(resolved.device, facts, decides=cached.mode is StepMode.CAPTURED)


def _make_step_budget(options: EngineOptions, step_times: StepTimeModel, sizes: Sequence[int]) -> StepBudget | None:
    if options.inter_token_target_ms is None:
        return None
    return StepBudget(step_times, BudgetTargets.from_target(options.inter_token_target_ms / 1000), sizes=sizes)


def _make_scheduler(
    resolved: ResolvedOptions, plan: MemoryPlan, limits: SchedulerLimits, speed: MeasuredSpeed, budget: StepBudget | None
) -> Scheduler:
    options = resolved.options
    pool = BlockPool(plan.num_blocks, protected_percent=PROTECTED_PERCENT)
    prefix_cache = None
    if options.enable_prefix_caching:
        prefix_cache = PrefixCache(pool, options.block_size)
        for token_ids in resolved.shared_prefixes:
            prefix_cache.share_globally(token_ids)
    speculative, costs = options.speculative_config, speed.speculation
    return Scheduler(
        limits,
        pool,
        clock=time.monotonic,
        costs=speed.step_times.token_costs(),
        prefix_cache=prefix_cache,
        num_host_blocks=plan.num_host_blocks,
        step_budget=budget,
        drafter=None if speculative is None or costs is None else AdaptiveDrafter(speculative, costs),
        policy=FairPolicy if options.scheduling_policy == "fair" else FcfsPolicy,
    )


def _make_info(
    resolved: ResolvedOptions,
    model: LoadedDecoder,
    cached: CachedModels,
    measured: MeasuredMemory,
    choices: KernelChoices,
    *,
    load_s: float,
) -> EngineInfo:
    options, device, plan = resolved.options, resolved.device, cached.plan
    parts = [_describe_kernels(options, model.quantization, resolved.dtype, device), choices.described()]
    stored = "" if model.decoded_from is None else f" (stored as {model.decoded_from})"
    return EngineInfo(
        model=options.name or options.model.name,
        architecture=resolved.config.family.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=resolved.config.vocab_size,
        eos_token_ids=list(resolved.config.eos_token_ids),
        block_size=options.block_size,
        num_kv_blocks=plan.num_blocks,
        max_num_seqs=options.seats(device.type),
        dtype=format_name(resolved.dtype),
        device=device.type,
        device_name=device_name(device),
        kernels=", ".join(filter(None, [*parts, NO_GRAPHS if cached.has_no_graphs else ""])),
        num_parameters=model.size.num_parameters,
        weights_bytes=model.size.num_bytes,
        kv_bytes=plan.kv_bytes,
        load_s=load_s,
        quantization=f"{model.quantization}{stored}",
        kv_cache_dtype=format_name(resolved.kv_dtype),
        kv_scales=cached.runner.target.kv_scales,
        memory=resolved.forecast.parts(measured),
        memory_note=resolved.forecast.shortened_note(resolved.config, options),
        device_note=unused_gpu(options.device, device),
        switched_off=switched_off(),
        kernel_choices=choices.chosen,
    )


def _describe_kernels(options: EngineOptions, quantization: str, dtype: torch.dtype, device: torch.device) -> str:
    table = ops.operations(device, dtype, batch_invariant=options.batch_invariant)
    words = f"{table.description} ({device.type}{', batch-invariant' if options.batch_invariant else ''})"
    if quantization != UNQUANTISED:
        words = f"{words}, {quantization} weights{' decoded in registers' if device.type == 'cpu' else ''}"
    head = options.head_quantization
    if head is None:
        return words
    return f"{words}, output head not quantised" if head == UNQUANTISED else f"{words}, output head in {head}"


def _log_start(info: EngineInfo, runner: str, times: StartTimes) -> None:
    """Log what was started, how long it took and where memory went; scripts that build an engine themselves read it too."""
    log.info("started model=%s runner=%s seats=%d %s", info.model, runner, info.max_num_seqs, times)
    log.info("memory: %s", format_parts(info.memory))
    if info.memory_note is not None:
        log.warning("memory: %s", info.memory_note)
    for part in underestimated(info.memory):
        measured, predicted = format_distinct(part.measured_bytes or 0, part.predicted_bytes)
        log.warning("memory: %s took %s, %s were predicted", part.name, measured, predicted)


def _describe_mode(cached: CachedModels, slot_runner: SlotRunner | None, *, is_requested: bool) -> str:
    """How steps are run, in words, and what keeps them from a faster way. `is_requested`: plain steps were requested."""
    if cached.mode is StepMode.PLAIN and not is_requested and cached.runner.target.device.type == "cpu":
        return f"{cached.mode} ({NOT_OVER_PAGES})"
    if cached.mode is StepMode.RECORDED and slot_runner is not None and not slot_runner.is_recorded:
        return f"over slots ({NOT_RECORDED})"
    if cached.has_no_graphs:
        return f"{cached.mode} ({NO_GRAPHS})"
    return cached.mode


def _make_grammar_queue(options: EngineOptions, info: EngineInfo, masks: GrammarMasks, *, has_one_caller: bool) -> GrammarQueue:
    def compiler() -> GrammarCompiler:
        vocabulary = load_vocabulary(options.model, info.vocab_size, info.eos_token_ids)
        return GrammarCompiler(vocabulary, has_one_caller=has_one_caller)

    return GrammarQueue(LazyCompiler(compiler), masks)
