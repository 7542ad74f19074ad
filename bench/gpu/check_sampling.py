"""The sampler and related kernels, token for token against their definition."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.gpu.context import Context
from bench.gpu.errors import ResultPair, ResultTriple, check_equal, check_errors, check_invariant
from bench.gpu.inputs import normal, pack_weight
from kernels.quantised_weights import Int8Weight
from kernels.reference import sampling as exact
from kernels.sampling_columns import SamplingColumns
from kernels.triton.products.int8 import linear_int8
from kernels.triton.products.linear import linear
from kernels.triton.sampling.sampler import sample

LOG2_E = 1.4426950408889634
STREAM = 0x1234567_89ABCDE
Launcher = Callable[..., Any]
FILTERS: tuple[dict[str, float], ...] = (
    {}, {"top_k": 1}, {"top_k": 40, "temperature": 1.7}, {"top_k": 300, "top_p": 0.9}, {"top_p": 0.1},
    {"top_p": 0.95, "temperature": 0.6}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.5, "min_p": 0.2}, {"top_p": 0.9999},
    {"typical_p": 0.8}, {"top_k": 300, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.5},
)  # fmt: skip


def check(context: Context) -> None:
    vocab = context.size(128_256, 700)
    check_equal(context, "sampler, greedy", [("rows", lambda: _sampled(context, vocab, [{"temperature": 0.0}] * 4))])
    check_equal(context, "sampler, top-k top-p min-p", [("filters", lambda: _sampled(context, vocab, FILTERS))])
    check_equal(
        context, "sampler, penalties and bitmask", [("rules", lambda: _sampled(context, vocab, FILTERS[:3], rules=True))]
    )
    check_invariant(context, "sampler", [("filters", lambda: _alone_and_batched(context, vocab))])
    check_equal(context, "grammar bitmask", [("rows", lambda: _bitmask(context))])
    check_errors(context, "log-probabilities", [("rows", lambda: _logprobs(context))])
    check_equal(context, "rejection sampling", [("drafts", lambda: _rejection(context))])
    check_equal(
        context,
        "fused head + argmax",
        [("rows", lambda: _head(context)), ("product", lambda: _head_and_product(context, "bf16"))],
    )
    check_equal(context, "fused head in 8 bits + argmax", [("product", lambda: _head_and_product(context, "int8"))])


def sampling_columns(settings: Sequence[dict[str, float]], vocab: int, device: torch.device) -> SamplingColumns:
    """Sampling columns with one slot for each of `settings`."""
    columns = SamplingColumns.empty(len(settings), vocab, 1, device)
    for slot, each in enumerate(settings):
        temperature = each.get("temperature", 1.0)
        columns.scale[slot] = LOG2_E / temperature if temperature else 0.0
        columns.streams[slot] = (slot + 1) * STREAM
        columns.top_k[slot] = int(each.get("top_k", 0))
        columns.top_p[slot] = each.get("top_p", 1.0)
        columns.neg_log2_min_p[slot] = -math.log2(each["min_p"]) if "min_p" in each else math.inf
        columns.typical_p[slot] = each.get("typical_p", 1.0)
    return columns


def triton_and_reference(module: str, name: str) -> tuple[Launcher, Launcher]:
    """A Triton launcher and its reference, imported per row, so that a failing import fails only its own row."""
    triton, reference = (importlib.import_module(f"kernels.{kind}.{module}") for kind in ("triton.sampling", "reference"))
    return getattr(triton, name), getattr(reference, name)


def _inputs(
    context: Context, vocab: int, settings: Sequence[dict[str, float]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SamplingColumns]:
    count = len(settings)
    logits = normal(count, vocab, dtype=torch.float32, device=context.device, scale=3.0)
    slots = torch.arange(count, dtype=torch.int32, device=context.device)
    positions = 7 * torch.arange(count, device=context.device)
    return logits, slots, positions, sampling_columns(settings, vocab, context.device)


def _sampled(context: Context, vocab: int, settings: Sequence[dict[str, float]], *, rules: bool = False) -> ResultPair:
    logits, slots, positions, columns = _inputs(context, vocab, settings)
    masks = None
    if rules:
        columns.rules.fill_(0)
        columns.repetition.fill_(1.3)
        columns.frequency.fill_(0.2)
        columns.presence.fill_(0.1)
        columns.counts.copy_(torch.randint(0, 5, columns.counts.shape, dtype=torch.int32))
        columns.bias[0, : vocab // 3] = -math.inf
        words = torch.randint(-(2**31), 2**31, (len(settings), -(-vocab // 32)))
        masks = words.to(torch.int32).to(context.device)
    ours = sample(logits, slots, positions, columns, masks=masks)
    return ours, exact.sample(logits, slots, positions, columns, masks=masks).to(ours.device)


def _alone_and_batched(context: Context, vocab: int) -> ResultPair:
    settings = FILTERS[:5]
    logits, slots, positions, columns = _inputs(context, vocab, settings)
    rows = [slice(row, row + 1) for row in range(len(settings))]
    alone = [sample(logits[row], slots[row], positions[row], columns) for row in rows]
    return torch.cat(alone), sample(logits, slots, positions, columns)


def _rejection(context: Context) -> ResultPair:
    ours, exact_rejection = triton_and_reference("drafts", "reject_drafts")
    requests, depth, vocab, device = 6, 3, context.size(32_000, 300), context.device
    target = torch.randn(requests, depth + 1, vocab, device=device).mul_(2).softmax(-1)
    draft = (target[:, :depth].log() + 0.3 * torch.randn(requests, depth, vocab, device=device)).softmax(-1).contiguous()
    inputs = (
        target,
        draft,
        torch.multinomial(draft.flatten(0, 1), 1).view(requests, depth),
        torch.tensor([3, 2, 1, 3, 3, 2], dtype=torch.int32, device=device),
        torch.arange(1, requests + 1, device=device) * STREAM,
        11 * torch.arange(requests, device=device),
    )
    return ours(*inputs), exact_rejection(*inputs)


def _bitmask(context: Context) -> ResultPair:
    ours, exact_bitmask = triton_and_reference("bitmask", "apply_bitmask")
    rows, vocab = 4, 4099 if not context.rehearsal else 259
    logits = normal(rows, vocab, dtype=context.dtype, device=context.device)
    masks = torch.randint(-(2**31), 2**31, (3, -(-vocab // 32))).to(torch.int32).to(context.device)
    chosen = torch.tensor([2, -1, 0], dtype=torch.int32, device=context.device)
    expected = logits.cpu()
    exact_bitmask(expected, masks.cpu(), chosen.cpu())
    ours(logits, masks, chosen)
    return logits, expected.to(logits.device)


def _logprobs(context: Context) -> ResultTriple:
    """Log-probabilities of so many tokens that the largest error of either side reflects its arithmetic: with only a few, torch
    is twice as exact by chance in one run of twenty."""
    ours, _ = triton_and_reference("logprobs", "token_logprobs")
    rows, vocab = context.size(16, 5), context.size(128_256, 700)
    logits = normal(rows, vocab, dtype=torch.float32, device=context.device, scale=3.0)
    ids = torch.randint(0, vocab, (rows, 32), device=context.device)
    wide = logits.double().log_softmax(-1).gather(1, ids)
    return ours(logits, ids)[0], wide, logits.log_softmax(-1).gather(1, ids)


def _head_and_product(context: Context, kind: str) -> ResultPair:
    """The fused head against the product and argmax of the plain runner, on the same rows: ties included."""
    ours, _ = triton_and_reference("greedy_head", "greedy_head")
    width, vocab = (64, 300) if context.rehearsal else (4096, 128_256)
    hidden = normal(16, width, dtype=context.dtype, device=context.device)
    weight = pack_weight(kind, normal(vocab, width, dtype=context.dtype, device=context.device, scale=width**-0.5))
    tokens = ours(hidden, weight)
    if isinstance(weight, Int8Weight):
        logits = linear_int8(hidden, weight)
    else:
        assert isinstance(weight, torch.Tensor), "a head is plain or in 8 bits"
        logits = linear(hidden, weight)
    return tokens, logits.float().argmax(dim=1).to(tokens.dtype)


def _head(context: Context) -> ResultPair:
    """Rows far from ties: the largest logit does not depend on the order of summation."""
    ours, _ = triton_and_reference("greedy_head", "greedy_head")
    width, vocab = (64, 300) if context.rehearsal else (4096, 128_256)
    hidden = normal(5, width, dtype=context.dtype, device=context.device)
    weight = normal(vocab, width, dtype=context.dtype, device=context.device, scale=width**-0.5)
    for row in range(5):
        weight[(row + 1) * vocab // 7] = hidden[row] * (20 / width)
    tokens = ours(hidden, weight)
    return tokens, (hidden.double() @ weight.double().T).argmax(dim=1).to(tokens.dtype)
