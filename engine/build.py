"""Composes an engine from a model directory and options: the only place that knows all of its parts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config.model import ModelConfig, load_model_config
from engine.cpu_environment import default_threads
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.desk import GrammarDesk, LateCompiler
from engine.grammar.masks import GrammarMasks
from engine.grammar.vocabulary import load_vocabulary
from engine.loop import Engine
from engine.memory_fit import told, told_apart, underestimated
from engine.models.decoder import Decoder
from engine.options import EngineOptions
from engine.protocol import EngineInfo
from engine.quantization.card import check_card
from engine.quantization.scheme import UNQUANTISED, weight_scheme
from engine.runner.ahead import launches_ahead, records_steps, slot_runner
from engine.runner.calibration import MeasuredSpeed, measure_guesses, measure_speed
from engine.runner.device import (
    check_swap_space,
    device_name,
    format_name,
    kv_bytes_available,
    resolve_device,
    resolve_dtype,
    resolve_kv_dtype,
)
from engine.runner.kv_cache import BlockMover
from engine.runner.memory_forecast import MemoryForecast, MemoryMeter, forecast_memory
from engine.runner.memory_plan import MemoryPlan, plan_memory
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.warm_up import compile_steps, compile_verification, compiles_at_first_use, compiling, run_largest_step
from engine.runner.weights import WeightsSize, load_weights
from engine.sampling.sampler import Sampler
from engine.scheduling.block_pool import PROTECTED_PERCENT, BlockPool
from engine.scheduling.fair_policy import FairPolicy
from engine.scheduling.host_tier import HostTier
from engine.scheduling.policy import FcfsPolicy
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.scheduler import Scheduler, SchedulerLimits
from engine.scheduling.step_budget import BudgetTargets, StepBudget
from engine.scheduling.step_time import StepTimeModel
from engine.shared_prefixes import shared_prefixes
from engine.speculation.options import check_draft_context, check_draft_vocabulary
from engine.speculation.prompt_lookup import AdaptiveDrafter
from engine.start_times import StartTimes
from kernels import ops

log = logging.getLogger("gatehouse.engine")

WEIGHTS_SHARE = 0.5
"""Of the progress of a start, where kernels are compiled behind them: a first start takes about as long for them."""

NO_GRAPHS = "no graphs: experts chosen by the host"
"""Said of a mixture whose weights no launch can read together: each of its layers waits for the host in every step."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder with its weights, before it has a cache."""

    config: ModelConfig
    decoder: Decoder
    size: WeightsSize
    quantization: str


def build_engine(options: EngineOptions, *, progress: Callable[[float], None] = lambda _: None) -> Engine:
    """Load the model and allocate its cache. Raises `ModelError` or `EngineConfigError`; `progress` gets 0 … 1, of which a
    device that compiles its kernels gets the last part for them."""
    times = StartTimes()
    torch.set_num_threads(options.threads or default_threads())
    device = resolve_device(options.device)
    stored = load_model_config(options.model)
    dtype = resolve_dtype(options.dtype, stored.torch_dtype, device)
    check_card(stored, options, dtype, device)
    check_swap_space(options, device)
    forecast = _forecast(options, dtype=dtype, device=device)
    forecast.check(options)
    options = replace(options, max_num_seqs=forecast.fit.load.num_seqs)
    share = WEIGHTS_SHARE if compiles_at_first_use(device) else 1.0
    formats = {"quantization": options.quantization, "head": options.head_quantization}
    model = _load(
        options.model, options, dtype=dtype, device=device, **formats, progress=lambda loaded: progress(share * loaded)
    )
    draft = _load_draft(options, model.config, dtype=dtype, device=device)
    draft_config = None if draft is None else draft.config
    times.done("weights")
    kv_dtype = resolve_kv_dtype(options.kv_cache_dtype, dtype)
    available = kv_bytes_available(forecast.fit.needs, options, device)
    plan = plan_memory(model.config, options, element_bytes=kv_dtype.itemsize, available_bytes=available, draft=draft_config)
    if draft_config is not None:
        check_draft_context(draft_config, plan.max_model_len)
    target_decoder = _paged(model, options, plan, dtype=dtype, kv_dtype=kv_dtype, device=device)
    draft_decoder = None if draft is None else _paged(draft, options, plan, dtype=dtype, kv_dtype=kv_dtype, device=device)
    masks = GrammarMasks(model.config.vocab_size)
    sampler = Sampler(device)
    caches = [*target_decoder.kv_caches, *(draft_decoder.kv_caches if draft_decoder else ())]
    mover = BlockMover(caches, plan.num_host_blocks)
    lands_at_once = records_steps(options, target_decoder)
    is_plain = not lands_at_once and not launches_ahead(options, device)
    runner = ModelRunner(
        target_decoder, sampler, mover, masks,
        draft=draft_decoder, batch_invariant=options.batch_invariant, guesses_are_equal=not is_plain,
    )  # fmt: skip
    times.done("cache")
    meter = MemoryMeter(device)
    meter.begin_run()
    limits = _scheduler_limits(options, plan, device)
    decoders = [target_decoder] if draft_decoder is None else [target_decoder, draft_decoder]
    if compiles_at_first_use(device):
        with compiling("steps", lambda ready: progress(share + (1 - share) * ready)):
            _ask_for_kernels(decoders, mover, limits, options)
            if is_plain and draft is not None and options.speculative_config is not None:
                compile_verification(model.config.vocab_size, options.speculative_config.num_speculative_tokens, device)
        times.done("kernels")  # compiled or found in Triton's cache on disk
    speed = measure_speed(
        model.config,
        target_decoder,
        draft_decoder,
        plan,
        weight_bytes=model.size.num_bytes / model.size.num_parameters,
        kv_bytes=kv_dtype.itemsize,
        block_size=options.block_size,
        max_tokens=options.batched_tokens(device.type),
        max_seqs=options.seats(device.type),
        for_speculation=options.speculative_config is not None and is_plain,
    )
    if compiles_at_first_use(device):
        for decoder in decoders:
            run_largest_step(decoder, limits, max_guesses=options.max_guesses)
    num_bytes = model.size.num_bytes + (0 if draft is None else draft.size.num_bytes)
    measured = meter.measured(num_bytes, plan.kv_bytes)
    times.done("speed")
    budget = _step_budget(options, speed.step_times)
    info = _info(
        options,
        model,
        plan,
        dtype=dtype,
        kv_dtype=kv_dtype,
        kv_scales=target_decoder.kv_scales,
        device=device,
        load_s=times.total_s,
    )
    info = replace(info, memory=forecast.parts(measured), memory_note=forecast.shortened())
    log.info("operations %s", ops.listed(dtype, device, batch_invariant=options.batch_invariant))
    desk = _grammar_desk(options, info, masks)
    if is_plain:
        _tell_start(info, "plain", times)
        scheduler = _scheduler(options, plan, limits, speed, budget)
        return Engine(scheduler, runner, info, grammars=desk, step_budget=budget)
    asks_host, max_guesses = any(each.decoder.asks_host for each in (model, draft) if each), options.max_guesses
    meter.begin_slots()
    ahead = slot_runner(
        runner, target_decoder, masks, limits, device,
        draft=draft_decoder, max_guesses=max_guesses, asks_host=asks_host, lands_at_once=lands_at_once,
    )  # fmt: skip
    meter.begin_graphs()
    ahead.warm_up()
    if max_guesses:
        guess = None if draft is None else ahead.run_draft_padding
        costs = measure_guesses(ahead.run_padding, limits.max_num_seqs + max_guesses, device, guess=guess)
        speed = replace(speed, speculation=costs)
    info = replace(info, memory=forecast.parts(meter.with_graphs(measured)))
    times.done("graphs")
    scheduler = _scheduler(options, plan, limits, speed, budget)
    words = "recorded" if lands_at_once else "ahead"
    if asks_host and not lands_at_once:
        words, info = f"{words} ({NO_GRAPHS})", replace(info, kernels=f"{info.kernels}, {NO_GRAPHS}")
    _tell_start(info, words, times)
    return Engine(scheduler, ahead, info, grammars=desk, step_budget=budget, overlap=ahead)


def _ask_for_kernels(
    decoders: Sequence[PagedDecoder], mover: BlockMover, limits: SchedulerLimits, options: EngineOptions
) -> None:
    """Those of all steps; a second decoder is the draft model's."""
    for decoder in decoders:
        compile_steps(decoder, limits, max_guesses=options.max_guesses)
    mover.compile()


def _tell_start(info: EngineInfo, runner: str, times: StartTimes) -> None:
    """In the log, which those who build an engine in their own process read too."""
    log.info("started model=%s runner=%s seats=%d %s", info.model, runner, info.max_num_seqs, times)
    log.info("memory: %s", told(info.memory))
    if info.memory_note is not None:
        log.warning("memory: %s", info.memory_note)
    for part in underestimated(info.memory):
        taken, predicted = told_apart(part.measured_bytes or 0, part.predicted_bytes)
        log.warning("memory: %s took %s, %s were predicted", part.name, taken, predicted)


def _forecast(options: EngineOptions, *, dtype: torch.dtype, device: torch.device) -> MemoryForecast:
    config, speculative = load_model_config(options.model), options.speculative_config
    draft = None if speculative is None or speculative.model is None else load_model_config(speculative.model)
    name = options.name or options.model.name
    ahead = launches_ahead(options, device)
    return forecast_memory(name, config, options, dtype=dtype, device=device, draft=draft, has_slots=ahead)


def _load(
    directory: Path,
    options: EngineOptions,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | None = None,
    head: str | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> LoadedModel:
    config = load_model_config(directory)
    scheme = weight_scheme(directory, config, quantization, head=head, batch_invariant=options.batch_invariant)
    decoder = Decoder(config, dtype=dtype, device=device, batch_invariant=options.batch_invariant)
    weights = decoder.weight_plan(scheme.storage)
    load_weights(directory, weights, progress=progress)
    size = WeightsSize.of(weights)
    del weights
    decoder.pack(scheme.packer, scheme.head_packer)
    return LoadedModel(config, decoder, size, scheme.name)


def _load_draft(options: EngineOptions, target: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> LoadedModel | None:
    speculative = options.speculative_config
    if speculative is None or speculative.model is None:
        return None
    check_draft_vocabulary(load_model_config(speculative.model), target)
    return _load(speculative.model, options, dtype=dtype, device=device)


def _paged(
    model: LoadedModel,
    options: EngineOptions,
    plan: MemoryPlan,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> PagedDecoder:
    return PagedDecoder(
        model.config,
        model.decoder,
        plan,
        options.block_size,
        dtype=dtype,
        device=device,
        kv_dtype=kv_dtype,
        batch_invariant=options.batch_invariant,
        text_tokens=options.batched_tokens(device.type) if device.type == "cuda" else None,
    )


def _step_budget(options: EngineOptions, step_times: StepTimeModel) -> StepBudget | None:
    if options.inter_token_target_ms is None:
        return None
    return StepBudget(step_times, BudgetTargets.following(options.inter_token_target_ms / 1000))


def _grammar_desk(options: EngineOptions, info: EngineInfo, masks: GrammarMasks) -> GrammarDesk:
    def compiler() -> GrammarCompiler:
        return GrammarCompiler(load_vocabulary(options.model, info.vocab_size, info.eos_token_ids))

    return GrammarDesk(LateCompiler(compiler), masks)


def _scheduler_limits(options: EngineOptions, plan: MemoryPlan, device: torch.device) -> SchedulerLimits:
    return SchedulerLimits(
        max_num_seqs=options.seats(device.type),
        max_num_batched_tokens=options.batched_tokens(device.type),
        max_model_len=plan.max_model_len,
        block_size=options.block_size,
    )


def _scheduler(
    options: EngineOptions, plan: MemoryPlan, limits: SchedulerLimits, speed: MeasuredSpeed, budget: StepBudget | None
) -> Scheduler:
    pool = BlockPool(plan.num_blocks, protected_percent=PROTECTED_PERCENT)
    prefix_cache = None
    if options.enable_prefix_caching:
        prefix_cache = PrefixCache(pool, options.block_size)
        for token_ids in shared_prefixes(options):
            prefix_cache.bless(token_ids)
    speculative = options.speculative_config
    return Scheduler(
        limits,
        pool,
        clock=time.monotonic,
        costs=speed.step_times.token_costs(),
        prefix_cache=prefix_cache,
        host_tier=HostTier(plan.num_host_blocks) if plan.num_host_blocks else None,
        step_budget=budget,
        drafter=None if speculative is None else AdaptiveDrafter(speculative, speed.speculation),
        policy=FairPolicy if options.scheduling_policy == "fair" else FcfsPolicy,
    )


def _info(
    options: EngineOptions,
    model: LoadedModel,
    plan: MemoryPlan,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    kv_scales: str,
    device: torch.device,
    load_s: float,
) -> EngineInfo:
    return EngineInfo(
        model=options.name or options.model.name,
        architecture=model.config.family.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=list(model.config.eos_token_ids),
        block_size=options.block_size,
        num_kv_blocks=plan.num_blocks,
        max_num_seqs=options.seats(device.type),
        dtype=format_name(dtype),
        device=device.type,
        device_name=device_name(device),
        kernels=_kernels(options, model.quantization, dtype, device),
        num_parameters=model.size.num_parameters,
        weights_bytes=model.size.num_bytes,
        kv_bytes=plan.kv_bytes,
        load_s=load_s,
        quantization=model.quantization,
        kv_cache_dtype=format_name(kv_dtype),
        kv_scales=kv_scales,
    )


def _kernels(options: EngineOptions, quantization: str, dtype: torch.dtype, device: torch.device) -> str:
    words = ops.implementation(dtype, device, batch_invariant=options.batch_invariant)
    if quantization != UNQUANTISED:
        words = f"{words}, {ops.quantised_words(quantization, device)}"
    head = options.head_quantization
    return words if head is None else f"{words}, output head {'not quantised' if head == UNQUANTISED else f'in {head}'}"
