"""Compiled CPU log-probabilities and soft-caps against float64: ranks, most likely tokens, odd vocabulary sizes."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampling import scores
from kernels.reference import logprobs as reference
from kernels.simd.logits import cap_logits
from kernels.simd.scores import SPAN, score_tokens
from kernels.simd.vectors import LANES
from kernels.torch.logits import cap_logits as torch_caps
from tests.support.kernel_cases import Guarded

pytestmark = pytest.mark.usefixtures("threads")

CPU = torch.device("cpu")


def table_of(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
    guarded = Guarded((len(tokens), scores.width(num_top)), torch.int64, CPU)
    score_tokens(logits, tokens, num_top, out=guarded.tensor)
    return guarded.check()


@pytest.mark.parametrize("num_top", [1, 5, 20])
@pytest.mark.parametrize("vocab_size", [20, LANES * 4, 129, SPAN - 1, SPAN + 1, 3 * SPAN + 5])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_log_probabilities_ranks_and_top_tokens_match_the_full_table(vocab_size: int, num_top: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num_top)
    rows = 5
    logits = torch.randn(rows, vocab_size + 3, generator=generator)[:, :vocab_size] * spread
    tokens = torch.randint(0, vocab_size, (rows,), generator=generator)
    tokens[0], tokens[1], tokens[2] = logits[0].argmax(), logits[1].argmin(), -1
    table = table_of(logits, tokens, num_top)
    likeliest = logits.topk(num_top, dim=-1).indices
    ids = torch.cat((tokens[:, None], likeliest), dim=1)
    expected, ranks = reference.token_logprobs(logits, ids)
    assert torch.equal(table[:, 0].int(), ranks)
    assert torch.equal(table[:, 1 : 2 + num_top], ids)
    logprobs = table[:, 2 + num_top :].contiguous().view(torch.float64).float()
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=2e-6, equal_nan=True)


def test_of_equal_logits_the_first_tokens_come_first_and_share_their_rank() -> None:
    logits = torch.zeros(1, 3 * LANES)
    logits[0, 2 * LANES + 1] = 1.0
    table = table_of(logits, torch.tensor([LANES + 1]), 4)
    assert table[0, :6].tolist() == [2, LANES + 1, 2 * LANES + 1, 0, 1, 2]


def test_impossible_tokens_and_failed_rows_have_a_table() -> None:
    logits = torch.full((3, 40), -math.inf)
    logits[0, 7], logits[1, 3] = 2.0, math.nan
    logits[2] = torch.arange(40.0)
    table = table_of(logits, torch.tensor([7, -1, 0]), 5)
    assert table[0, :3].tolist() == [1, 7, 7]
    assert sorted(table[0, 2:7].tolist()) == sorted({*table[0, 2:7].tolist()}), "no token twice"
    assert table[0, 7:9].view(torch.float64).tolist() == [0.0, 0.0]
    assert table[0, 9:].view(torch.float64).tolist() == [-math.inf] * 4
    assert all(0 <= token < 40 for token in table[1, 2:7].tolist())
    assert table[2, :7].tolist() == [40, 0, 39, 38, 37, 36, 35]


@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize("divisor", [1.0, 8.0])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_soft_capped_logits_match_torch_in_float64(rows: int, divisor: float, softcap: float | None) -> None:
    logits = Guarded((rows, 12345), torch.float32, CPU)
    logits.tensor.copy_(torch.randn(rows, 12345, generator=torch.Generator().manual_seed(rows)) * 20)
    logits.tensor[0, :4] = torch.tensor([math.nan, math.inf, -math.inf, 0.0])
    expected = torch_caps(logits.tensor.double(), divisor=divisor, softcap=softcap).float()
    assert cap_logits(logits.tensor, divisor=divisor, softcap=softcap) is logits.tensor
    torch.testing.assert_close(logits.check(), expected, rtol=1e-6, atol=1e-7, equal_nan=True)
    equal = cap_logits(torch.full((1, 12345), 3.0), divisor=divisor, softcap=softcap)
    assert equal.amin() == equal.amax(), "a number's place changes nothing"
