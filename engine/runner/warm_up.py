"""Passes before the first request, where kernels are compiled when they are first called: the largest step, which shows what
memory a step takes, and one step of each kind, so that no request waits seconds for a compiler.

Which variants of kernels there are follows from the launchers in `kernels.triton`: by requests of a step (few, many), by rows
of a product and of a norm, by tokens of the longest chunk. A test asks for those of random traffic and finds no other ones.
"""

from __future__ import annotations

import torch

from engine.runner.batch_inputs import InputRow
from engine.runner.paged_decoder import PagedDecoder
from engine.scheduling.limits import SchedulerLimits

DECODES = (1, 2, 8, 16, 24, 40, 72, 136)
"""Numbers of requests that decode: one on each side of where a launcher takes another tile."""

CHUNKS = (2, 5, 8, 9, 16, 24, 40, 72, 136, 300, 600)
"""Tokens of the longest chunk of a step."""

FEW, MANY = 1, 40
"""Requests whose prompts are read in one step."""


def compiles_at_first_use(device: torch.device) -> bool:
    """Whether a kernel's first call takes seconds, unless it is found in the cache on disk."""
    return device.type == "cuda"


@torch.inference_mode()
def run_largest_step(decoder: PagedDecoder, limits: SchedulerLimits) -> None:
    """One pass over as many rows as a step may have, and the logits of as many as may sample: what memory was planned for. The
    cache must be empty; what is left there is nobody's."""
    max_tokens, max_len = limits.max_num_batched_tokens, limits.max_model_len
    lengths = [min(max_len, max_tokens - first) for first in range(0, max_tokens, max_len)]
    hidden = decoder.forward(decoder.prepare([_row(length, limits.block_size) for length in lengths]))
    sampled = torch.arange(min(max_tokens, limits.max_num_seqs), device=hidden.device) % len(lengths)
    decoder.logits(hidden.index_select(0, sampled))


@torch.inference_mode()
def compile_steps(decoder: PagedDecoder, limits: SchedulerLimits) -> None:
    """One step of each kind, as far as its logits, in an empty cache."""
    max_tokens, max_seqs, block_size = limits.max_num_batched_tokens, limits.max_num_seqs, limits.block_size
    room = min(max_tokens, limits.max_model_len)
    steps = {(size, 1) for size in {min(size, max_seqs, max_tokens) for size in (*DECODES, max_seqs)}}
    for longest in {min(length, room) for length in (*CHUNKS, room)}:
        steps |= {(min(number, max_seqs, 1 + (max_tokens - longest) // 2), longest) for number in (FEW, MANY)}
    for number, longest in sorted(steps):
        rows = [_row(longest, block_size)] + [_row(min(longest, 2), block_size)] * (number - 1)
        decoder.logits(decoder.forward(decoder.prepare(rows)), wide=False)


def _row(num_tokens: int, block_size: int) -> InputRow:
    return InputRow([0] * num_tokens, 0, range(-(-num_tokens // block_size)), (num_tokens - 1,))
