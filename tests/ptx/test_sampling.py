"""PTX of the kernels from logits to tokens: sampler, masks, log-probabilities, counts, draft rejection, head with argmax."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.quantised_weights import pack_int8
from kernels.reference import bitmask as reference_bitmask
from kernels.reference import drafts as reference_drafts
from kernels.reference import greedy_head as reference_head
from kernels.reference import logprobs as reference_logprobs
from kernels.reference import sampling as reference_sampling
from kernels.reference import token_counts as reference_counts
from kernels.triton.sampling import bitmask, drafts, greedy_head, logprobs, token_counts
from kernels.triton.sampling import sampler as sampling
from tests.support.kernel_cases import Guarded, normal, padded_rows, tied_tokens
from tests.support.kernel_tolerances import assert_near, assert_same
from tests.support.sampling_columns import columns_of

CPU = torch.device("cpu")
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 300, "top_p": 0.9},
    {"top_p": 0.95, "temperature": 0.6},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.5, "min_p": 0.2},
    {"typical_p": 0.6, "temperature": 1.5},
    {"top_k": 300, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.6},
]


@pytest.mark.parametrize(("vocab_size", "dtype", "guided"), [(3001, torch.bfloat16, True), (700, torch.float32, False)])
def test_the_sampler_draws_the_token_of_the_reference(vocab_size: int, dtype: torch.dtype, guided: bool) -> None:
    columns, masks = columns_of(FILTERS, vocab_size), None
    logits = padded_rows((normal(len(FILTERS), vocab_size, dtype=torch.float32, device=CPU) * 3).to(dtype), vocab_size + 5)
    if guided:
        generator = torch.Generator().manual_seed(1)
        columns.rules.fill_(0)
        columns.repetition.fill_(1.3)
        columns.frequency.fill_(0.2)
        columns.presence.fill_(0.1)
        columns.counts.copy_(torch.randint(0, 5, columns.counts.shape, generator=generator, dtype=torch.int32))
        columns.bias[0, : vocab_size // 3] = -math.inf
        words = -(-vocab_size // 32)
        masks = torch.randint(-(2**31), 2**31, (len(FILTERS), words), generator=generator).int()
    slots, positions = torch.arange(len(FILTERS), dtype=torch.int32), 7 * torch.arange(len(FILTERS))
    out = Guarded((len(FILTERS),), torch.int64, CPU)
    sampling.sample(logits, slots, positions, columns, masks=masks, out=out.tensor)
    assert out.check().tolist() == reference_sampling.sample(logits, slots, positions, columns, masks=masks).tolist()


def test_masked_logits_match_the_reference() -> None:
    logits = Guarded((4, 259), torch.bfloat16, CPU)
    logits.tensor.copy_(normal(4, 259, dtype=torch.bfloat16, device=CPU))
    expected = logits.tensor.clone()
    masks = torch.randint(-(2**31), 2**31, (3, 9), generator=torch.Generator().manual_seed(1)).int()
    rows = torch.tensor([2, -1, 0], dtype=torch.int32)
    reference_bitmask.apply_bitmask(expected, masks, rows)
    bitmask.apply_bitmask(logits.tensor, padded_rows(masks, 11), rows)
    assert_same(logits.check(), expected)


def test_logprobs_and_ranks_match_the_reference() -> None:
    logits = padded_rows(normal(3, 4099, dtype=torch.bfloat16, device=CPU) * 5, 4102)
    ids = torch.tensor([[4098, 0, -1], [0, 2000, 0], [1300, -1, -1]])
    found, ranks = logprobs.token_logprobs(logits, ids)
    expected, expected_ranks = reference_logprobs.token_logprobs(logits.float(), ids)
    assert torch.equal(found.isnan(), ids < 0)
    assert_near(found.nan_to_num(0.0), expected.nan_to_num(0.0), "probability", scale=100.0)
    assert ranks.tolist() == expected_ranks.tolist()


def test_token_counts_match_the_reference() -> None:
    slots, tokens = torch.tensor([2, -1, 0], dtype=torch.int32), torch.tensor([7, 8, -1])
    counts = Guarded((3, 50), torch.int32, CPU)
    counts.tensor.zero_()
    expected = counts.tensor.clone()
    reference_counts.count_tokens(slots, tokens, expected)
    token_counts.count_tokens(slots, tokens, counts.tensor)
    assert_same(counts.check(), expected)


def test_accepted_and_replaced_drafts_match_the_reference() -> None:
    count, depth, vocab_size = 4, 3, 1500
    target = normal(count, depth + 1, vocab_size, dtype=torch.float32, device=CPU).mul(2).softmax(-1)
    noise = normal(count, depth, vocab_size, dtype=torch.float32, device=CPU, seed=1)
    draft = (target[:, :depth].log() + 0.3 * noise).softmax(-1)
    draft_tokens, numbers = draft.argmax(-1), torch.tensor([3, 2, 0, 1], dtype=torch.int32)
    streams, positions = torch.arange(1, count + 1) * 0x123456789ABCDE, 11 * torch.arange(count)
    given = (target, draft, draft_tokens, numbers, streams, positions)
    assert drafts.reject_drafts(*given).tolist() == reference_drafts.reject_drafts(*given).tolist()


@pytest.mark.parametrize("in_8_bits", [False, True])
def test_the_fused_head_with_argmax_returns_the_lowest_id_of_equal_maxima(in_8_bits: bool) -> None:
    hidden = padded_rows(normal(5, 320, dtype=torch.bfloat16, device=CPU).round(), 336)
    plain = tied_tokens(200, 320, dtype=torch.bfloat16, device=CPU)
    if in_8_bits:
        plain[:, 0] = 127  # so that the scale of each row is one, and its codes are its numbers
    weight = pack_int8(plain) if in_8_bits else plain
    out = Guarded((5,), torch.int64, CPU)
    greedy_head.greedy_head(hidden, weight, out=out.tensor)
    assert out.check().tolist() == reference_head.greedy_head(hidden, weight).tolist()
