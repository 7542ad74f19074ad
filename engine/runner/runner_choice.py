"""Which way an engine runs its steps (`engine.step_mode`), and the runner over slots that does so.

With `GATEHOUSE_GRAPHS=0` an engine on a GPU launches the kernels of its steps one by one instead of replaying CUDA
graphs, still over slots and ahead. A fault that goes away with it is one of the graphs. `enforce_eager` turns off slots and
launching ahead as well.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from engine.config.model import ModelConfig
from engine.device import resolve_kv_dtype
from engine.layers.attention import are_recordable, attention_shapes
from engine.options import EngineOptions
from engine.runner.cuda_graphs import Calls, CudaGraphs, DirectCalls
from engine.runner.model_runner import ModelRunner
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_steps import SlotSteps
from engine.runner.slots import slot_words
from engine.sampling.columns import ColumnSampler
from engine.scheduling.limits import SchedulerLimits
from engine.step_mode import StepMode
from engine.step_sizes import decode_graphs_kept, draft_graphs_kept
from engine.switches import GRAPHS

log = logging.getLogger("gatehouse.engine")


def resolve_step_mode(config: ModelConfig, options: EngineOptions, *, dtype: torch.dtype, device: torch.device) -> StepMode:
    """The decision for a model that computes in `dtype`, before it is loaded; a decoder's `has_host_sync` may still cost
    it the graphs. Warns where a switch does."""
    if device.type == "cuda":
        mode = StepMode.of(options, "cuda")
        if mode is StepMode.AHEAD:
            log.warning("%s=0: steps are launched kernel by kernel", GRAPHS)
        return mode
    shapes, kv_dtype = attention_shapes(config, options.block_size), resolve_kv_dtype(options.kv_cache_dtype, dtype)
    can_record = are_recordable(shapes, dtype=dtype, kv_dtype=kv_dtype, device=device)
    return StepMode.of(options, device.type, can_record=can_record)


def make_slot_runner(plain: ModelRunner, limits: SchedulerLimits, mode: StepMode, *, max_draft_tokens: int) -> SlotRunner:
    """A runner of the models of `plain` over slots, one for each seat, in any mode that has slots. `max_draft_tokens`: of all
    requests of a step together."""
    assert mode.has_slots, "plain steps are over no slots"
    target, draft = plain.target, plain.draft
    device = target.device
    chunk_rows = 0 if mode is StepMode.RECORDED else target.chunk_rows(limits.max_num_batched_tokens, limits.max_num_seqs)
    max_graphs = decode_graphs_kept(limits.max_num_seqs, max_draft_tokens)
    if draft is not None:
        max_graphs += draft_graphs_kept(limits.max_num_seqs)
    calls: Calls = CudaGraphs(device, max_graphs=max_graphs) if mode is StepMode.CAPTURED else DirectCalls()
    steps = SlotSteps(
        target,
        ColumnSampler(
            limits.max_num_seqs,
            target.vocab_size,
            device,
            max_draft_tokens=max_draft_tokens,
            dtype=target.dtype,
            make_words=partial(slot_words, num_slots=limits.max_num_seqs, max_blocks=limits.max_blocks),
        ),
        calls,
        limits,
        max_draft_tokens=max_draft_tokens,
        chunk_rows=chunk_rows,
        is_synchronous=mode is StepMode.RECORDED,
        draft=draft,
    )
    return SlotRunner(plain, steps)
