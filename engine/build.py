"""Composes an engine from a model directory and options: the only place that knows all of its parts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from engine.block_pool import BlockPool
from engine.config import ModelConfig, load_model_config
from engine.cpu_environment import default_threads
from engine.device import device_name, kv_bytes_available, resolve_device, resolve_dtype
from engine.grammar_masks import GrammarMasks
from engine.kv_cache import BlockMover
from engine.loop import Engine
from engine.memory_plan import MemoryPlan, plan_memory
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.options import EngineOptions
from engine.paged_decoder import PagedDecoder
from engine.prefix_cache import PrefixCache
from engine.protocol import EngineInfo
from engine.sampler import Sampler
from engine.scheduler import Scheduler, SchedulerLimits
from engine.weights import WeightsSize, load_weights
from kernels import ops


def build_engine(options: EngineOptions, *, progress: Callable[[float], None] = lambda _: None) -> Engine:
    """Load the model and allocate its cache. Raises `ModelError` or `EngineConfigError`; `progress` gets 0 … 1."""
    started_s = time.monotonic()
    torch.set_num_threads(options.threads or default_threads())
    config = load_model_config(options.model)
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.dtype, config.torch_dtype, device)
    decoder = Decoder(config, dtype=dtype, device=device)
    weights = decoder.weight_plan()
    load_weights(options.model, weights, progress=progress)
    size = WeightsSize.of(weights)
    del weights
    decoder.pack(ops.pack_linear_row_invariant if options.batch_invariant else ops.pack_linear)
    element_bytes = torch.empty((), dtype=dtype).element_size()
    available = kv_bytes_available(config, options, element_bytes=element_bytes, device=device)
    plan = plan_memory(config, options, element_bytes=element_bytes, available_bytes=available)
    target = PagedDecoder(
        config, decoder, plan, options.block_size, dtype=dtype, device=device, batch_invariant=options.batch_invariant
    )
    mover = BlockMover(target.kv_caches, num_host_blocks=0)
    runner = ModelRunner(
        target,
        Sampler(config.vocab_size, device),
        mover,
        GrammarMasks(config.vocab_size),
        batch_invariant=options.batch_invariant,
    )
    info = _info(options, config, plan, size, dtype=dtype, device=device, load_s=time.monotonic() - started_s)
    return Engine(_scheduler(options, plan, device), runner, info)


def _scheduler(options: EngineOptions, plan: MemoryPlan, device: torch.device) -> Scheduler:
    limits = SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.batched_tokens(device.type),
        max_model_len=plan.max_model_len,
        block_size=options.block_size,
    )
    pool = BlockPool(plan.num_blocks)
    prefix_cache = PrefixCache(pool, options.block_size) if options.enable_prefix_caching else None
    return Scheduler(limits, pool, clock=time.monotonic, prefix_cache=prefix_cache)


def _info(
    options: EngineOptions,
    config: ModelConfig,
    plan: MemoryPlan,
    size: WeightsSize,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_s: float,
) -> EngineInfo:
    return EngineInfo(
        model=options.name or options.model.name,
        architecture=config.family.architecture,
        max_model_len=plan.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=list(config.eos_token_ids),
        block_size=options.block_size,
        num_kv_blocks=plan.num_blocks,
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        device_name=device_name(device),
        kernels=ops.implementation(dtype, device, batch_invariant=options.batch_invariant),
        num_parameters=size.num_parameters,
        weights_bytes=size.num_bytes,
        kv_bytes=plan.kv_bytes,
        load_s=load_s,
    )
