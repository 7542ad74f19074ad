"""Which engines launch steps ahead, and the runner they do it with."""

from __future__ import annotations

import torch

from engine.options import EngineOptions
from engine.runner.cuda_graphs import CudaGraphs, DirectCalls
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slot_runner import SlotRunner
from engine.runner.slot_sampler import HostSlotSampler
from engine.sampling.columns import ColumnSampler
from engine.sampling.sampler import Sampler
from engine.scheduling.limits import SchedulerLimits


def launches_ahead(options: EngineOptions, device: torch.device) -> bool:
    """On a GPU, unless the operator wants the plain runner or something that needs the host between two steps: guesses, whose
    number a step decides by the last token, and results that do not depend on the batch, which graphs of rounded sizes do."""
    return (
        device.type == "cuda"
        and not options.enforce_eager
        and not options.batch_invariant
        and options.speculative_config is None
    )


def slot_runner(
    plain: ModelRunner,
    target: PagedDecoder,
    sampler: Sampler,
    limits: SchedulerLimits,
    device: torch.device,
    *,
    asks_host: bool = False,
    by_columns: bool | None = None,
) -> SlotRunner:
    """A runner over slots for all seats of the engine. `asks_host`: the decoder does, so its steps are not captured.
    `by_columns`: whether tokens are chosen from columns in the slots, which a GPU always does."""
    on_gpu = device.type == "cuda"
    columns = ColumnSampler(limits.max_num_seqs, target.vocab_size, device) if by_columns or on_gpu else None
    return SlotRunner(
        plain,
        target,
        columns or HostSlotSampler(sampler),
        CudaGraphs(device) if on_gpu and not asks_host else DirectCalls(),
        max_num_seqs=limits.max_num_seqs,
        num_columns=-(-limits.max_model_len // limits.block_size),
        block_size=limits.block_size,
        device=device,
    )
