"""Forward passes before the first request, on devices whose kernels are compiled at first use: one step of each kind, so that
no request waits seconds for a compiler, and the largest step, which shows how much memory a step takes.

The steps of each kind compute nothing. They only request their kernels, which are then compiled several at a time
(`kernels.ops.compiled_together`). The launchers in `kernels.triton` decide which variants there are: by the number of requests
of a step, the rows of a product and of a norm, and the tokens of the longest chunk. A test runs random traffic and checks that
it needs no other variants.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine.config.pooling import PoolingConfig
from engine.grammar.masks import allow_all
from engine.runner.embedder import Embedder
from engine.runner.paged_decoder import PagedDecoder
from engine.runner.token_spans import TokenSpan
from engine.sampling.acceptance import accept_by_rejection
from engine.sampling.logits_rules import LogitsRules
from engine.sampling.logprobs import prompt_logprobs
from engine.scheduling.limits import SchedulerLimits
from kernels import ops

log = logging.getLogger("gatehouse.engine")

REPORT_S = 2.0
"""Time between two lines of the log while kernels are compiled."""

SEARCH_BATCH_SIZES = (257, 513, 1025)
"""Numbers of requests of a step, one above each power of two from 256 on, for which kernels that search among the requests of a
step are compiled (`kernels.triton.attention.splits.scheduled_requests`); all that seats and draft tokens add up to."""

STEP_SIZES = (1, 2, 9, ops.FUSED_ROWS_MAX + 1, 33, *SEARCH_BATCH_SIZES)
"""Sizes of steps over slots, one for each variant of those kernels: one row has kernels of its own, few rotate inside their
attention and are launched early, and up to 8 and up to 16 are multiplied by kernels of their own
(`kernels.triton.products.hopper_tiles`)."""

DECODE_BATCH_SIZES = (1, 2, 8, 16, 24, 40, 72, 136, *SEARCH_BATCH_SIZES)
"""Numbers of requests that decode: one on each side of where a launcher takes another tile."""

CHUNK_LENGTHS = (2, 4, 5, 8, 9, 16, 24, 40, 72, 136, 300, 600)
"""Tokens of the longest chunk of a step."""

LONG_CONTEXT = 4096
"""Tokens of a request whose few newest tokens make a step: keys of a long context are cut into splits
(`kernels.triton.attention.chunk_splits`)."""

FEW_REQUESTS, SOME_REQUESTS, MANY_REQUESTS = 1, 20, 40
"""Requests whose prompts are read in one step."""

SHORT_CHUNK_MAX = 8
"""For chunks of up to so many tokens, steps of SOME_REQUESTS are compiled too. They have more rows than are launched
early, and few enough requests that kernels search among them as among FEW_REQUESTS."""


def compiles_at_first_use(device: torch.device) -> bool:
    """Whether a kernel's first call takes seconds, unless it is found in the cache on disk."""
    return device.type == "cuda"


@contextmanager
def compiling(what: str, progress: Callable[[float], None] = lambda _: None) -> Iterator[None]:
    """Compile the kernels of all launches in the block, together, when it ends. The launches themselves run nothing, so that
    tensors are uninitialised. The log reports progress, and `progress` is called with up to 1. Raises
    `kernels.ops.CompilationFailed`, which names the kernel."""
    started_s = reported_s = time.monotonic()
    variants = ops.Variants()

    def report(now: ops.Variants) -> None:
        nonlocal reported_s, variants
        variants = now
        progress(now.num_ready / now.num_asked)
        if time.monotonic() - reported_s >= REPORT_S:
            reported_s = time.monotonic()
            log.info("compiling kernels of=%s ready=%d asked=%d", what, now.num_ready, now.num_asked)

    with ops.compiled_together(report):
        yield
    progress(1.0)
    seconds = time.monotonic() - started_s
    log.info("kernels of=%s compiled=%d found=%d s=%.3f", what, variants.num_compiled, variants.num_found, seconds)


@torch.inference_mode()
def run_largest_step(decoder: PagedDecoder, limits: SchedulerLimits, *, max_draft_tokens: int) -> None:
    """Compute the largest step that memory was planned for: as many rows as a step may have, all of them needed, and the logits
    of as many as may sample. The cache must be empty; what this leaves there belongs to no request."""
    max_tokens, max_len = limits.max_num_batched_tokens, limits.max_model_len
    lengths = [min(max_len, max_tokens - first) for first in range(0, max_tokens, max_len)]
    hidden = decoder.forward_spans([_span(length, limits.block_size, wants_all=True) for length in lengths])
    sampled = torch.arange(min(max_tokens, limits.max_num_seqs + max_draft_tokens), device=hidden.device) % len(lengths)
    decoder.logits(hidden.index_select(0, sampled))


@torch.inference_mode()
def compile_steps(decoder: PagedDecoder, limits: SchedulerLimits, *, max_draft_tokens: int) -> None:
    """Run one step of each kind, as far as its logits, in an empty cache. `max_draft_tokens`: logits beyond one row for each
    request, of drafts that are verified like chunks of prompts; their runner requests steps over slots with drafts."""
    for spans in _steps_of_each_kind(limits, max_draft_tokens):
        decoder.logits(decoder.forward_spans(spans), wide=False)


def _steps_of_each_kind(limits: SchedulerLimits, max_draft_tokens: int) -> Iterator[list[TokenSpan]]:
    """The spans of each step: decodes, a chunk beside short ones, a chunk after a long context, decodes of long contexts
    beside a chunk, and drafts."""
    max_tokens, max_seqs, block_size = limits.max_num_batched_tokens, limits.max_num_seqs, limits.block_size
    room = min(max_tokens, limits.max_model_len)
    max_rows = min(max_seqs + max_draft_tokens, max_tokens)
    sizes = {min(size, max_rows) for size in (*DECODE_BATCH_SIZES, max_seqs, max_rows)}
    decodes_alone = {(size, 1, 1) for size in sizes if size <= max_seqs}
    for number, longest, others in sorted(decodes_alone | _chunks_together(max_tokens, max_seqs, room)):
        yield [_span(longest, block_size)] + [_span(others, block_size)] * (number - 1)
    for length in CHUNK_LENGTHS:
        start = min(LONG_CONTEXT, limits.max_model_len) - length
        if start > 0 and length <= max_tokens:
            yield [_span(length, block_size, start=start)]
    for number in SEARCH_BATCH_SIZES:
        if number < max_seqs and number + 2 <= max_tokens:  # decodes of more tokens than a split, beside a chunk
            decodes = [_span(1, block_size, start=min(CHUNK_LENGTHS[-1], limits.max_model_len) - 1)] * number
            yield [*decodes, _span(2, block_size)]
    for size in sorted(sizes):
        if size > max_seqs:
            yield [_span(min(room, size - first), block_size, wants_all=True) for first in range(0, size, room)]


def _chunks_together(max_tokens: int, max_seqs: int, room: int) -> set[tuple[int, int, int]]:
    """Requests of each step, tokens of its longest chunk and of each other one."""
    steps = set()
    for longest in {min(length, room) for length in (*CHUNK_LENGTHS, room)}:
        most = min(max_seqs, 1 + (max_tokens - longest) // 2)
        for number in (min(FEW_REQUESTS, most), min(MANY_REQUESTS, most), *SEARCH_BATCH_SIZES):
            if number <= most:
                steps.add((number, longest, min(longest, 2)))
        if longest <= SHORT_CHUNK_MAX:
            steps.add((min(SOME_REQUESTS, max_seqs, max_tokens // longest), longest, longest))
    return steps


def compile_texts(decoder: PagedDecoder, limits: SchedulerLimits) -> None:
    """Embed whole texts, which use no cache and no fused layers."""
    embedder, max_tokens = Embedder(decoder.text_model, PoolingConfig(mode="last")), limits.max_num_batched_tokens
    for length in sorted({min(length, max_tokens, limits.max_model_len) for length in (1, *CHUNK_LENGTHS)}):
        embedder.embed([[0] * length])


@torch.inference_mode()
def compile_verification(vocab_size: int, max_draft_tokens: int, device: torch.device) -> None:
    """Verify drafts of a draft model, once for each number of them."""
    probabilities = torch.zeros(max_draft_tokens + 1, vocab_size, device=device)
    for number in range(1, max_draft_tokens + 1):
        accept_by_rejection(probabilities[: number + 1], probabilities[:number], [0] * number, seed=0, position=0)


@torch.inference_mode()
def compile_float32_logits(vocab_size: int, device: torch.device) -> None:
    """Do what the plain runner does with logits, which it has in float32: apply a grammar's mask, and score tokens."""
    logits = torch.zeros(1, vocab_size, device=device)
    LogitsRules(device).apply_masks(logits, allow_all(1, vocab_size, device), [0])
    prompt_logprobs(logits, [0], 1)


def _span(num_tokens: int, block_size: int, *, start: int = 0, wants_all: bool = False) -> TokenSpan:
    outputs = range(num_tokens) if wants_all else (num_tokens - 1,)
    return TokenSpan([0] * num_tokens, start, range(-(-(start + num_tokens) // block_size)), outputs)
