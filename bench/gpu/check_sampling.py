"""The sampler and what belongs to it, token for token against its definition."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

import torch

import kernels.triton
from bench.gpu.context import Context
from bench.gpu.errors import Outputs, equal, invariant
from bench.gpu.inputs import normal
from kernels.reference import sampling as exact
from kernels.sampling_columns import SamplingColumns
from kernels.triton.sampling import sample

LOG2_E = 1.4426950408889634
MISSING = "this operation has no Triton kernel yet"
FILTERS: tuple[dict[str, float], ...] = (
    {}, {"top_k": 1}, {"top_k": 40, "temperature": 1.7}, {"top_k": 300, "top_p": 0.9}, {"top_p": 0.1},
    {"top_p": 0.95, "temperature": 0.6}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.5, "min_p": 0.2}, {"top_p": 0.9999},
)  # fmt: skip


def check(context: Context) -> None:
    vocab = context.size(128_256, 700)
    equal(context, "sampler, greedy", [("rows", lambda: _drawn(context, vocab, [{"temperature": 0.0}] * 4))])
    equal(context, "sampler, top-k top-p min-p", [("filters", lambda: _drawn(context, vocab, FILTERS))])
    equal(context, "sampler, penalties and bitmask", [("rules", lambda: _drawn(context, vocab, FILTERS[:3], rules=True))])
    invariant(context, "sampler", [("filters", lambda: _alone(context, vocab))])
    equal(context, "rejection sampling", [("drafts", _rejected)])
    equal(context, "fused head + argmax", [("rows", lambda: _head(context))])


def columns_of(settings: Sequence[dict[str, float]], vocab: int, device: torch.device, num_rules: int = 1) -> SamplingColumns:
    """One slot for each of `settings`."""
    columns = SamplingColumns.empty(len(settings), vocab, num_rules, device)
    for slot, each in enumerate(settings):
        temperature = each.get("temperature", 1.0)
        columns.scale[slot] = LOG2_E / temperature if temperature else 0.0
        columns.streams[slot] = (slot + 1) * 0x1234567_89ABCDE
        columns.top_k[slot] = int(each.get("top_k", 0))
        columns.top_p[slot] = each.get("top_p", 1.0)
        columns.reach[slot] = -math.log2(each["min_p"]) if "min_p" in each else math.inf
    return columns


def find(name: str) -> Callable[..., Any]:
    """The launcher of that name, in whichever module of the kernels it stands."""
    for module in pkgutil.iter_modules(kernels.triton.__path__, "kernels.triton."):
        found = getattr(importlib.import_module(module.name), name, None)
        if found is not None:
            launcher: Callable[..., Any] = found
            return launcher
    raise LookupError(f"no module of kernels.triton has {name}: {MISSING}")


def _given(
    context: Context, vocab: int, settings: Sequence[dict[str, float]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, SamplingColumns]:
    count = len(settings)
    logits = normal(count, vocab, dtype=torch.float32, device=context.device, scale=3.0)
    slots = torch.arange(count, dtype=torch.int32, device=context.device)
    positions = 7 * torch.arange(count, device=context.device)
    return logits, slots, positions, columns_of(settings, vocab, context.device)


def _drawn(
    context: Context, vocab: int, settings: Sequence[dict[str, float]], *, rules: bool = False
) -> tuple[Outputs, Outputs]:
    logits, slots, positions, columns = _given(context, vocab, settings)
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


def _alone(context: Context, vocab: int) -> tuple[Outputs, Outputs]:
    settings = FILTERS[:5]
    logits, slots, positions, columns = _given(context, vocab, settings)
    rows = [slice(row, row + 1) for row in range(len(settings))]
    alone = [sample(logits[row], slots[row], positions[row], columns) for row in rows]
    return torch.cat(alone), sample(logits, slots, positions, columns)


def _rejected() -> tuple[Outputs, Outputs]:
    find("reject_drafts")
    raise LookupError("reject_drafts is there, and bench/gpu/check_sampling.py does not call it yet")


def _head(context: Context) -> tuple[Outputs, Outputs]:
    """Rows far from ties: what is largest does not hang on the order of a sum."""
    width, vocab = (64, 300) if context.rehearsal else (4096, 128_256)
    hidden = normal(5, width, dtype=context.dtype, device=context.device)
    weight = normal(vocab, width, dtype=context.dtype, device=context.device, scale=width**-0.5)
    for row in range(5):
        weight[(row + 1) * vocab // 7] = hidden[row] * (20 / width)
    ours = find("greedy_head")(hidden, weight)
    return ours, (hidden.double() @ weight.double().T).argmax(dim=1).to(ours.dtype)
