"""Grammar masks, log-probabilities, token counts, verification of drafts, and output heads with fused argmax."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from engine.sampling.acceptance import accept_by_rejection
from engine.sampling.randomness import signed, stream
from kernels.quantised_weights import Fp8Weight, Int8Weight, pack_fp8, pack_int4, pack_int8
from kernels.reference import bitmask as reference_bitmask
from kernels.reference import drafts as reference_drafts
from kernels.reference import greedy_head as reference_head
from kernels.reference import logprobs as reference_logprobs
from kernels.reference import token_counts as reference_counts
from kernels.torch import bitmask as bitmask_cpu
from kernels.torch import drafts as drafts_cpu
from kernels.torch import logprobs as logprobs_cpu
from kernels.torch import token_counts as counts_cpu
from kernels.triton.launching.card_properties import capability, multiprocessors
from kernels.triton.products.linear import skinny_tiles
from kernels.triton.products.tiles import byte_tiles, launch
from kernels.triton.sampling import bitmask, drafts, greedy_head, logprobs, token_counts
from tests.support.kernel_cases import FLOATS, Guarded, normal, padded_rows, tied_tokens
from tests.support.kernel_tolerances import assert_near, assert_same


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("vocab_size", [1, 31, 33, 130])
def test_a_mask_changes_only_forbidden_logits(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    words = -(-vocab_size // 32)
    generator = torch.Generator().manual_seed(vocab_size)
    masks = torch.randint(-(2**31), 2**31, (3, words), generator=generator, dtype=torch.int64).int().to(device)
    rows = torch.tensor([3, -1, 1], dtype=torch.int32, device=device)
    logits = Guarded((5, vocab_size), dtype, device)
    logits.tensor.copy_(normal(5, vocab_size, dtype=dtype, device=device))
    logits.tensor[3, 0], logits.tensor[1, vocab_size - 1] = math.nan, math.inf
    expected = logits.tensor.clone()
    twin = expected.clone()
    reference_bitmask.apply_bitmask(expected, masks, rows)
    bitmask_cpu.apply_bitmask(twin, masks[::2], rows[::2])  # without padding
    assert_same(twin.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    bitmask.apply_bitmask(logits.tensor, padded_rows(masks, words + 2), rows)
    assert_same(logits.check().nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


@pytest.mark.parametrize("vocab_size", [1, 17, 2048, 4099])
@pytest.mark.parametrize("dtype", FLOATS)
def test_log_probabilities_and_ranks_match_the_full_table(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = padded_rows(normal(3, vocab_size, dtype=dtype, device=device) * 5, vocab_size + 3)
    ids = torch.tensor([[vocab_size - 1, 0, -1], [0, vocab_size // 2, 0], [vocab_size // 3, -1, -1]], device=device)
    found, ranks = logprobs.token_logprobs(logits, ids)
    expected, expected_ranks = reference_logprobs.token_logprobs(logits.float(), ids)
    for each, its_ranks in ((found, ranks), logprobs_cpu.token_logprobs(logits, ids)):
        assert torch.equal(each.isnan(), ids < 0)
        assert_near(each.nan_to_num(0.0), expected.nan_to_num(0.0), "probability", scale=100.0)
        assert its_ranks.tolist() == expected_ranks.tolist()


def test_forbidden_tokens_do_not_contribute_to_the_sum(device: torch.device) -> None:
    logits = torch.full((2, 4500), -math.inf, device=device)
    logits[0, 4400], logits[0, 2], logits[1, 7] = 3.0, 3.0, -1.0
    ids = torch.tensor([[2, 4400], [7, 8]], device=device)
    found, ranks = logprobs.token_logprobs(logits, ids)
    assert found.tolist() == [[pytest.approx(-math.log(2)), pytest.approx(-math.log(2))], [0.0, -math.inf]]
    assert ranks.tolist() == [1, 1]


@pytest.mark.parametrize("rows", [1, 3, 130])
def test_generated_tokens_are_counted_in_their_slots(rows: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows)
    slots = torch.randperm(rows + 2, generator=generator)[:rows].int().to(device)
    tokens = torch.randint(-1, 37, (rows,), generator=generator).to(device)
    slots[rows // 2] = -1
    counts = Guarded((rows + 2, 37), torch.int32, device)
    counts.tensor.copy_(torch.randint(0, 9, counts.tensor.shape, generator=generator, dtype=torch.int32))
    expected, twin = counts.tensor.clone(), counts.tensor.clone()
    for _ in range(2):
        reference_counts.count_tokens(slots, tokens, expected)
        counts_cpu.count_tokens(slots, tokens, twin)
        token_counts.count_tokens(slots, tokens, counts.tensor)
    assert_same(counts.check(), expected)
    assert_same(twin, expected)


@pytest.mark.parametrize(("vocab_size", "depth"), [(7, 1), (1500, 3)])
def test_drafts_are_verified_as_by_the_definition_and_the_engine(vocab_size: int, depth: int, device: torch.device) -> None:
    count = 6
    target = torch.softmax(normal(count, depth + 1, vocab_size, dtype=torch.float32, device=device) * 2, dim=-1)
    draft = torch.softmax(
        target[:, :depth].log() + normal(count, depth, vocab_size, dtype=torch.float32, device=device), dim=-1
    )
    draft[0] = target[0, :depth]  # every draft token is accepted
    draft_tokens = draft.argmax(-1)
    num_draft_tokens = torch.full((count,), depth, dtype=torch.int32, device=device)
    num_draft_tokens[1] = 0
    target[2, :, vocab_size // 2] = math.nan
    draft_tokens[3, 0] = impossible = int(target[3, 0].argmin())
    target[3, 0, impossible] = draft[3, 0, impossible] = 0.0
    seeds = [2**63 - 1 - i for i in range(count)]
    streams = torch.tensor([signed(stream(seed)) for seed in seeds], device=device)
    positions = torch.arange(count, device=device) * 5
    found = drafts.reject_drafts(target, draft, draft_tokens, num_draft_tokens, streams, positions)
    expected = reference_drafts.reject_drafts(target, draft, draft_tokens, num_draft_tokens, streams, positions)
    assert found.tolist() == expected.tolist()
    on_cpu = drafts_cpu.reject_drafts(target, draft, draft_tokens, num_draft_tokens, streams, positions)
    assert on_cpu.tolist() == expected.tolist()
    assert -1 in found[2].tolist()
    assert found[3, 0] != impossible
    for i in (0, 3, 4, 5):
        output = accept_by_rejection(target[i], draft[i], draft_tokens[i].tolist(), seed=seeds[i], position=5 * i)
        assert output.token_ids == [token for token in found[i].tolist() if token >= 0]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "vocab_size", "hidden_size"), [(1, 1, 64), (3, 67, 96), (16, 200, 300)])
def test_a_head_with_fused_argmax_finds_the_most_likely_token(
    rows: int, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The lowest id wins ties."""
    hidden = padded_rows(normal(rows, hidden_size, dtype=dtype, device=device).round(), hidden_size + 16)
    weight = padded_rows(tied_tokens(vocab_size, hidden_size, dtype=dtype, device=device), hidden_size + 16)
    out = Guarded((rows,), torch.int64, device)
    greedy_head.greedy_head(hidden, weight, out=out.tensor)
    assert out.check().tolist() == reference_head.greedy_head(hidden, weight).tolist()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "vocab_size", "hidden_size"), [(1, 1, 64), (3, 67, 96), (16, 200, 300)])
@pytest.mark.parametrize("kind", [Int8Weight, Fp8Weight])
def test_an_8_bit_head_finds_the_token_of_its_product(
    kind: type[Int8Weight | Fp8Weight],
    rows: int,
    vocab_size: int,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """For whole numbers the token of the reference; for any others the one with the largest logit of the product with 8-bit
    weights, to the last bit."""
    codes, pack = (torch.int8, pack_int8) if kind is Int8Weight else (torch.float8_e4m3fn, pack_fp8)
    values = padded_rows(tied_tokens(vocab_size, hidden_size, dtype=dtype, device=device), hidden_size + 16)
    whole = kind(values.to(codes), torch.full((vocab_size,), 0.5, device=device))
    hidden = padded_rows(normal(rows, hidden_size, dtype=dtype, device=device).round(), hidden_size + 16)
    out = Guarded((rows,), torch.int64, device)
    greedy_head.greedy_head(hidden, whole, out=out.tensor)
    assert out.check().tolist() == reference_head.greedy_head(hidden, whole).tolist()
    packed = pack(normal(vocab_size, hidden_size, dtype=torch.float32, device=device, seed=2))
    x, logits = normal(rows, hidden_size, dtype=dtype, device=device), torch.empty(rows, vocab_size, dtype=dtype, device=device)
    tiles = greedy_head.head_tiles(weight_bytes=1, capability=90, row_bytes=x.element_size())
    launch(x, packed.values, tiles, logits, weight_scales=packed.scales)
    assert greedy_head.greedy_head(x, packed).tolist() == logits.argmax(-1).tolist()


def test_a_row_whose_logits_are_not_finite_has_no_token(device: torch.device) -> None:
    hidden = normal(4, 64, dtype=torch.float32, device=device)
    weight = normal(70, 64, dtype=torch.float32, device=device, seed=1)
    hidden[1, 3], hidden[2, 3] = math.nan, math.inf
    found = greedy_head.greedy_head(hidden, weight)
    assert found.tolist() == reference_head.greedy_head(hidden, weight).tolist()
    assert found[1] == found[2] == -1


def test_a_head_is_fused_only_if_its_product_adds_in_the_same_order(device: torch.device) -> None:
    for vocab_size, columns, is_fused in ((16, 2048, False), (40_000, 64, True)):
        weight = normal(vocab_size, columns, dtype=torch.float32, device=device, seed=1)
        tiles = skinny_tiles(vocab_size, columns, capability(device), multiprocessors(device), weight.element_size())
        head = greedy_head.bind_greedy_head(weight)
        assert ((tiles.block_n, tiles.block_k, tiles.splits) == (64, 128, 1)) == is_fused == (head is not None)


def test_8_bit_heads_of_models_are_fused() -> None:
    for tokens, columns in ((128_256, 4096), (128_256, 2048), (151_936, 1024), (151_936, 4096)):
        for card in ((80, 108), (89, 142), (90, 132), (100, 148)):
            for row_bytes in (2, 4):
                tiles = byte_tiles(1, (tokens, columns), *card, row_bytes=row_bytes)
                own = greedy_head.head_tiles(weight_bytes=1, capability=card[0], row_bytes=row_bytes)
                assert replace(tiles, num_stages=own.num_stages) == own


def test_4_bit_heads_are_not_fused(device: torch.device) -> None:
    weight = pack_int4(normal(16, 128, dtype=torch.float32, device=device))
    assert greedy_head.bind_greedy_head(weight) is None
