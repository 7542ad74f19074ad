"""Rejection sampling for speculative decoding on the device: which draft tokens are accepted, and the token after them.

Formula (Leviathan et al., arXiv 2211.17192; `engine.sampling.acceptance` is the twin): draft x_i of q_i is accepted
if uniform(seed, position + i, ACCEPT) · q_i(x) < p_i(x); the first rejected one is replaced by a token drawn from max(0, p_i −
q_i), or from p_i if that is empty; if all are accepted, one more is drawn from p_k. Tokens are drawn by Gumbel-max
(`kernels.gumbel`) over weights: argmax of weight / E, E keyed by (seed, position, RESIDUAL) for a replacement and by (seed,
position) for a token of p_k. If any of the weights is not finite, nothing is drawn.

Memory: `accept_drafts` reads two numbers per draft; `sample_residual` reads one row of p and, after a rejection, one of q: 2 ·
V · 4 bytes per request, split over programs; `emit_tokens` merges the splits. Nothing is summed; the product of uniform number
and q is float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gumbel import ACCEPT, NO_TOKEN, RESIDUAL
from kernels.triton.launching.card_properties import multiprocessors, power_of_two
from kernels.triton.sampling.gumbel import exponential_noise, key_uniform, noise_bits, noise_key

BLOCK, NUM_WARPS = 1024, 8
"""Probabilities of a step and warps of a program: each thread loads 16 bytes of p and of q."""
_ACCEPT = tl.constexpr(ACCEPT)
_RESIDUAL = tl.constexpr(RESIDUAL)
_NO_TOKEN = tl.constexpr(NO_TOKEN)
_ID_SENTINEL = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["V", "max_guesses"])
def accept_drafts_kernel(target, draft, guesses, num_guesses, streams, positions, accepted, V, max_guesses):
    """Program (request): stores the number of accepted guesses."""
    request = tl.program_id(0).to(tl.int64)
    stream, position = tl.load(streams + request), tl.load(positions + request).to(tl.int64)
    count = tl.load(num_guesses + request)
    num_accepted = count * 0
    is_open = count > 0
    while is_open:
        guess = tl.load(guesses + request * max_guesses + num_accepted).to(tl.int64)
        draft_p = tl.load(draft + (request * max_guesses + num_accepted) * V + guess).to(tl.float64)
        target_p = tl.load(target + (request * (max_guesses + 1) + num_accepted) * V + guess).to(tl.float64)
        is_accepted = key_uniform(noise_key(stream, position + num_accepted, _ACCEPT)) * draft_p < target_p
        num_accepted = tl.where(is_accepted, num_accepted + 1, num_accepted)
        is_open = tl.where(is_accepted, num_accepted, count) < count
    tl.store(accepted + request, num_accepted)


@triton.jit(do_not_specialize=["V", "max_guesses", "blocks"])
def sample_residual_kernel(
    target, draft, num_guesses, streams, positions, accepted, scores, tokens, V, max_guesses, blocks, BLOCK: tl.constexpr
):
    """Program (request, split): the winners of its tokens by the residual max(0, p - q), and by p in case that is empty."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_accepted = tl.load(accepted + request)
    is_rejected = num_accepted < tl.load(num_guesses + request)
    stream, position = tl.load(streams + request), tl.load(positions + request).to(tl.int64) + num_accepted
    key = noise_key(stream, position, 0)
    if is_rejected:
        key = noise_key(stream, position, _RESIDUAL)
    p_row = target + (request * (max_guesses + 1) + num_accepted) * V
    q_row = draft + (request * max_guesses + tl.minimum(num_accepted, max_guesses - 1)) * V
    lane = tl.arange(0, BLOCK)
    residual_score, target_score = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    residual_token, target_token = lane * 0 + _ID_SENTINEL, lane * 0 + _ID_SENTINEL
    for block in range(split * blocks, tl.minimum((split + 1) * blocks, tl.cdiv(V, BLOCK))):
        token = lane + block * BLOCK
        p = tl.load(p_row + token, mask=token < V, other=0.0)
        q = tl.load(q_row + token, mask=token < tl.where(is_rejected, V, 0), other=0.0)
        variate = exponential_noise(noise_bits(key, token))
        score = tl.div_rn(tl.where(p - q > 0.0, p - q, 0.0), variate)
        score = tl.where(p - q == p - q, score, float("inf"))
        residual_token = tl.where(score > residual_score, token, residual_token)
        residual_score = tl.maximum(residual_score, score)
        score = tl.where(p == p, tl.div_rn(p, variate), float("inf"))
        target_token = tl.where(score > target_score, token, target_token)
        target_score = tl.maximum(target_score, score)
    offset = (request * tl.num_programs(1) + split) * 2
    best = tl.max(residual_score, 0)
    tl.store(scores + offset, best)
    tl.store(tokens + offset, tl.min(tl.where(residual_score == best, residual_token, _ID_SENTINEL), 0))
    best = tl.max(target_score, 0)
    tl.store(scores + offset + 1, best)
    tl.store(tokens + offset + 1, tl.min(tl.where(target_score == best, target_token, _ID_SENTINEL), 0))


@triton.jit(do_not_specialize=["max_guesses", "splits"])
def emit_tokens_kernel(guesses, accepted, scores, tokens, out, max_guesses, splits, SPLITS: tl.constexpr, WIDTH: tl.constexpr):
    """Program (request): stores the accepted guesses, the drawn token, and NO_TOKEN after it."""
    request = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    offset = (request * splits + split) * 2
    score = tl.load(scores + offset, mask=split < splits, other=0.0)
    token = tl.load(tokens + offset, mask=split < splits, other=_ID_SENTINEL)
    best = tl.max(score, 0)
    drawn = tl.min(tl.where(score == best, token, _ID_SENTINEL), 0)
    drawn = tl.where(best < float("inf"), drawn, _ID_SENTINEL)
    score = tl.load(scores + offset + 1, mask=split < splits, other=0.0)
    token = tl.load(tokens + offset + 1, mask=split < splits, other=_ID_SENTINEL)
    best = tl.max(score, 0)
    fallback = tl.min(tl.where(score == best, token, _ID_SENTINEL), 0)
    fallback = tl.where(best < float("inf"), fallback, _ID_SENTINEL)
    drawn = tl.where(drawn == _ID_SENTINEL, fallback, drawn)
    drawn = tl.where(drawn == _ID_SENTINEL, _NO_TOKEN, drawn).to(tl.int64)
    num_accepted = tl.load(accepted + request)
    index = tl.arange(0, WIDTH)
    row_tokens = tl.load(guesses + request * max_guesses + index, mask=index < num_accepted, other=_NO_TOKEN).to(tl.int64)
    row_tokens = tl.where(index == num_accepted, drawn, row_tokens)
    tl.store(out + request * (max_guesses + 1) + index, row_tokens, mask=index <= max_guesses)


def reject_drafts(
    target: torch.Tensor,
    draft: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    streams: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Tokens of each request, NO_TOKEN after the last: [B, k + 1] int64; also in place of the drawn token if none can be drawn.

    target: [B, k + 1, V], draft: [B, k, V] float32 contiguous, rows that sum to 1; draft_tokens: [B, k] int64; k ≥ 1;
    num_draft_tokens: [B] int32; streams: [B] int64 of the seeds; positions: [B], of the first token in prompt plus output.

    For formula, source and memory see the module docstring. A hash and a logarithm per element of the rows that are read.
    Tokens beyond V and drafts beyond num_draft_tokens are masked.
    """
    requests, depth, vocab_size = draft.shape
    device = target.device
    blocks = triton.cdiv(vocab_size, BLOCK)
    max_splits = max(1, min(blocks, triton.cdiv(4 * multiprocessors(device), max(1, requests))))
    blocks_per_split = triton.cdiv(blocks, max_splits)
    splits = triton.cdiv(blocks, blocks_per_split)
    accepted = torch.empty(requests, dtype=torch.int32, device=device)
    scores = torch.empty(requests, splits, 2, dtype=torch.float32, device=device)
    tokens = torch.empty(requests, splits, 2, dtype=torch.int32, device=device)
    out = torch.empty(requests, depth + 1, dtype=torch.int64, device=device)
    if requests:
        accept_drafts_kernel[(requests,)](
            target, draft, draft_tokens, num_draft_tokens, streams, positions, accepted, vocab_size, depth,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        sample_residual_kernel[(requests, splits)](
            target, draft, num_draft_tokens, streams, positions, accepted, scores, tokens, vocab_size, depth, blocks_per_split,
            BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        emit_tokens_kernel[(requests,)](
            draft_tokens, accepted, scores, tokens, out, depth, splits,
            SPLITS=power_of_two(splits), WIDTH=power_of_two(depth + 1), num_warps=1,
        )  # fmt: skip
    return out
