"""Which engines launch steps ahead, and the runner they do it with.

With `GATEHOUSE_GRAPHS=0` an engine on a GPU launches the kernels of its decode steps one by one instead of replaying CUDA
graphs, still over slots and ahead. A fault that goes away with it is one of the graphs. `enforce_eager` turns off slots and
launching ahead as well.
"""

from __future__ import annotations

import logging

import torch

from engine.grammar.masks import GrammarMasks
from engine.options import EngineOptions
from engine.runner.cuda_graphs import Calls, CudaGraphs, DirectCalls
from engine.runner.model_runner import ModelRunner
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.slot_runner import SlotRunner
from engine.sampling.columns import ColumnSampler
from engine.sampling.host_masks import HostMasks
from engine.scheduling.limits import SchedulerLimits
from engine.step_sizes import graphs_kept
from engine.switches import GRAPHS, is_on
from kernels import ops

log = logging.getLogger("gatehouse.engine")


def launches_ahead(options: EngineOptions, device: torch.device) -> bool:
    """True on a GPU, unless `enforce_eager` is set or batch-invariant attention has no kernel over pages there and needs the
    host between two steps."""
    if device.type != "cuda" or options.enforce_eager:
        return False
    return not options.batch_invariant or ops.operations(device, batch_invariant=True).is_row_invariant


def records_steps(options: EngineOptions, target: PagedDecoder) -> bool:
    """Whether decode steps on this CPU are one recorded call, over slots too, though none is ahead of another."""
    return target.sequence is not None and not (options.enforce_eager or options.batch_invariant)


def make_slot_runner(
    plain: ModelRunner,
    target: PagedDecoder,
    masks: GrammarMasks,
    limits: SchedulerLimits,
    device: torch.device,
    *,
    draft: PagedDecoder | None = None,
    max_guesses: int = 0,
    asks_host: bool = False,
    is_synchronous: bool = False,
) -> SlotRunner:
    """A runner over slots for all seats of the engine. `draft`: the model that guesses, if one does. `max_guesses`: of a step.
    `asks_host`: a decoder does, so that steps are not captured; `is_synchronous`: steps are over when they were
    launched, as on a CPU."""
    max_graphs = graphs_kept(limits.max_num_seqs, max_guesses, has_draft=draft is not None)
    return SlotRunner(
        plain,
        target,
        ColumnSampler(limits.max_num_seqs, target.vocab_size, device, max_guesses=max_guesses, dtype=target.dtype),
        HostMasks(masks),
        _calls(device, max_graphs, asks_host=asks_host),
        max_num_seqs=limits.max_num_seqs,
        max_guesses=max_guesses,
        max_blocks=-(-limits.max_model_len // limits.block_size),
        block_size=limits.block_size,
        device=device,
        is_synchronous=is_synchronous,
        draft=draft,
    )


def _calls(device: torch.device, max_graphs: int, *, asks_host: bool) -> Calls:
    """Graphs where there can be any, unless the environment says otherwise."""
    if device.type != "cuda" or asks_host:
        return DirectCalls()
    if not is_on(GRAPHS):
        log.warning("%s=0: decode steps are launched kernel by kernel", GRAPHS)
        return DirectCalls()
    return CudaGraphs(device, max_graphs=max_graphs)
