"""Sampled tokens: distributions, filters, determinism by seed and position, greedy choice, rows that cannot be computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.sampling.randomness import key, seed_of_answer
from engine.sampling.sampler import NOT_FINITE, SampledToken
from kernels.ops import NO_TOKEN, plain_sampling
from tests.support.sampling import sample, sampling_request

VOCAB_SIZE = 1100  # more than the widest partial top-k
DRAWS = 4000
EXPECTED_IN_POOL = 8.0  # draws: enough for the chi-square distribution to hold
ROUNDING = 1e-9  # of sums of probabilities, where one pool holds all of them
CPU = torch.device("cpu")


def draw_counts(logits: torch.Tensor, **sampling: Any) -> torch.Tensor:
    """How often each token is drawn from one row of logits, over many seeds."""
    requests = [sampling_request(str(seed), seed=seed, **sampling) for seed in range(DRAWS)]
    outputs = sample(logits.expand(DRAWS, -1), requests)
    ids = torch.tensor([output.token_id for output in outputs])
    return torch.bincount(ids, minlength=logits.shape[-1])


def assert_follows(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square test: five standard deviations above its mean would be one chance in a million.

    Tokens are pooled in the order of their probabilities, so that every pool expects several draws: a flat
    distribution is judged by hundreds of pools even where no token is expected often.
    """
    assert not counts[probabilities == 0].any(), "a token of probability zero was drawn"
    expected, ids = (probabilities.double() * int(counts.sum())).sort(descending=True)
    ends = expected.cumsum(0)
    num_pools = max(1, int(ends[-1] / EXPECTED_IN_POOL))
    pool = (ends / EXPECTED_IN_POOL).long().clamp(max=num_pools - 1)
    expected_in_pool = torch.bincount(pool, weights=expected, minlength=num_pools)
    drawn_in_pool = torch.bincount(pool, weights=counts[ids].double(), minlength=num_pools)
    used = expected_in_pool > 0
    statistic = ((drawn_in_pool - expected_in_pool)[used] ** 2 / expected_in_pool[used]).sum().item()
    freedom = int(used.sum()) - 1
    limit = freedom + 5 * math.sqrt(2 * freedom) + ROUNDING
    assert statistic <= limit, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"


@pytest.fixture
def logits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(VOCAB_SIZE, generator=generator) * 2


def keep_only(probabilities: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    remaining = torch.where(kept, probabilities, 0.0)
    return remaining / remaining.sum()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_draws_follow_the_softmax_of_logits_over_temperature(logits: torch.Tensor, temperature: float) -> None:
    expected = torch.softmax(logits.double() / temperature, -1)
    assert_follows(draw_counts(logits, temperature=temperature), expected)


@pytest.mark.parametrize("top_k", [1, 64, 65, 1099, 5000])
def test_top_k_keeps_the_k_most_likely_tokens(logits: torch.Tensor, top_k: int) -> None:
    probabilities = torch.softmax(logits.double(), -1)
    kept = probabilities >= probabilities.topk(min(top_k, VOCAB_SIZE)).values[-1]
    assert_follows(draw_counts(logits, top_k=top_k), keep_only(probabilities, kept))


@pytest.mark.parametrize(("spread", "top_p"), [(1.0, 0.1), (1.0, 0.6), (0.05, 0.9), (0.05, 0.999)])
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits: torch.Tensor, spread: float, top_p: float) -> None:
    flattened = logits * spread
    probabilities = torch.softmax(flattened.double(), -1)
    ordered, ids = probabilities.sort(descending=True)
    kept = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    kept[ids[(ordered.cumsum(0) - ordered) < top_p]] = True
    assert_follows(draw_counts(flattened, top_p=top_p), keep_only(probabilities, kept))


@pytest.mark.parametrize(("spread", "min_p"), [(1.0, 0.2), (0.05, 0.9)])
def test_min_p_keeps_tokens_likely_enough_relative_to_the_most_likely(
    logits: torch.Tensor, spread: float, min_p: float
) -> None:
    flattened = logits * spread
    probabilities = torch.softmax(flattened.double(), -1)
    kept = probabilities >= min_p * probabilities.max()
    assert_follows(draw_counts(flattened, min_p=min_p), keep_only(probabilities, kept))


@pytest.mark.parametrize(("spread", "typical_p"), [(1.0, 0.2), (1.0, 0.9), (0.05, 0.5)])
def test_typical_p_keeps_tokens_with_surprisal_nearest_to_the_entropy(
    logits: torch.Tensor, spread: float, typical_p: float
) -> None:
    flattened = logits * spread
    probabilities = torch.softmax(flattened.double(), -1)
    surprise = -probabilities.log()
    ids = (surprise - (probabilities * surprise).sum()).abs().sort().indices
    taken = probabilities[ids].cumsum(0)
    kept = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    kept[ids[: int((taken < typical_p).sum()) + 1]] = True
    assert_follows(draw_counts(flattened, typical_p=typical_p), keep_only(probabilities, kept))


def test_top_p_is_applied_after_top_k(logits: torch.Tensor) -> None:
    probabilities = torch.softmax(logits.double(), -1)
    ordered, ids = probabilities.sort(descending=True)
    first = ordered[:10] / ordered[:10].sum()
    kept = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    kept[ids[:10][(first.cumsum(0) - first) < 0.7]] = True
    assert_follows(draw_counts(logits, top_k=10, top_p=0.7), keep_only(probabilities, kept))


def test_a_request_draws_the_same_token_alone_and_in_any_batch() -> None:
    torch.manual_seed(9)
    logits = torch.randn(11, VOCAB_SIZE)
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 400}, {"presence_penalty": 1.0},
        {"typical_p": 0.5}, {"top_p": 0.9, "typical_p": 0.5}, {"bad_words_token_ids": [[3], [4, 7]]}, {"min_tokens": 9},
    ]  # fmt: skip
    requests = [sampling_request(str(i), seed=i, output=(3, 4), **values) for i, values in enumerate(settings)]
    together = sample(logits, requests)
    alone = [sample(logits[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    reversed_order = sample(logits.flip(0), requests[::-1])[::-1]
    assert together == alone == reversed_order


def test_greedy_sampling_takes_the_largest_logit(logits: torch.Tensor) -> None:
    assert sample(logits[None], [sampling_request(temperature=0.0)])[0].token_id == int(logits.argmax())


@pytest.mark.parametrize("temperature", [9.9e-6, 1e-38, 1e-320])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}], ids=str)
def test_a_tiny_temperature_is_greedy(logits: torch.Tensor, temperature: float, filters: dict[str, Any]) -> None:
    requests = [sampling_request(str(s), seed=s, temperature=temperature, **filters) for s in range(20)]
    outputs = sample(logits.expand(20, -1), requests)
    assert {output.token_id for output in outputs} == {int(logits.argmax())}


@pytest.mark.parametrize(
    "filters", [{"top_p": 1e-320}, {"top_p": 1e-45}, {"min_p": 1.0}, {"top_p": 1e-320, "min_p": 1.0}], ids=str
)
def test_the_most_likely_token_is_never_filtered_out(logits: torch.Tensor, filters: dict[str, Any]) -> None:
    outputs = sample(logits.expand(20, -1), [sampling_request(str(s), seed=s, **filters) for s in range(20)])
    assert {output.token_id for output in outputs} == {int(logits.argmax())}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("penalty", [0.01, 10.0])
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 2.0])
def test_the_strongest_penalties_leave_finite_logits(sign: float, penalty: float, temperature: float) -> None:
    logits = torch.tensor([[3e4, 2.0, -1.0, -3e4]]) * sign
    request = sampling_request(
        prompt=(0, 1, 2, 3), output=(3,), temperature=temperature, repetition_penalty=penalty, presence_penalty=2.0
    )
    assert sample(logits, [request])[0].token_id == int(sign < 0) * 3


@pytest.mark.parametrize("weights", [[math.nan, 1.0], [math.inf, 1.0], [0.0, 0.0]], ids=str)
@pytest.mark.parametrize("position", [0, 255, 256, 1499])
def test_weights_that_are_not_finite_or_all_zero_draw_no_token(weights: list[float], position: int) -> None:
    rows = torch.zeros(2, 1500)
    rows[0, position], rows[1, position], rows[1, 700] = 1.0, weights[0], weights[1]
    assert plain_sampling.draw_weighted(rows, torch.tensor([3, 4])).tolist() == [position, NO_TOKEN]


@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e30])
def test_tokens_are_drawn_in_proportion_to_their_weights(spread: float) -> None:
    generator = torch.Generator().manual_seed(3)
    weights = torch.rand(1, 300, generator=generator) ** 4 * spread
    weights *= torch.rand(1, 300, generator=generator) < 0.3
    keys = torch.randint(-(2**63), 2**63 - 1, (DRAWS,), generator=generator)
    drawn = plain_sampling.draw_weighted(weights.expand(DRAWS, -1), keys)
    assert_follows(torch.bincount(drawn, minlength=300), (weights / weights.sum()).double()[0])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_p": 0.5}, {"top_k": 3}, {"logprobs": 2}], ids=str)
def test_a_non_finite_row_fails_alone(logits: torch.Tensor, poison: float, sampling: dict[str, Any]) -> None:
    batch = torch.stack((logits, logits, logits))
    batch[1, 17] = poison
    healthy = sample(logits[None], [sampling_request("0", **sampling)])[0]
    outputs = sample(batch, [sampling_request(str(i), **sampling) for i in range(3)])
    assert outputs == [healthy, SampledToken(error=NOT_FINITE), healthy]


def test_random_keys_are_equal_for_equal_seed_and_position_only() -> None:
    numbers = {key(seed, position) for seed in range(50) for position in range(50)}
    assert len(numbers) == 2500
    assert key(3, 4) == key(3, 4)
    assert all(0 <= number < 2**64 for number in numbers)
    assert abs(sum(numbers) / 2500 / 2**64 - 0.5) < 0.03
    assert key(2**63 - 1, 2**20) < 2**64


def test_further_draws_at_a_position_have_other_keys() -> None:
    numbers = {key(seed, position, draw=draw) for seed in range(20) for position in range(20) for draw in range(3)}
    assert len(numbers) == 1200


def test_each_answer_has_its_own_seed_and_the_first_that_of_the_request() -> None:
    seeds = {seed_of_answer(seed, index) for seed in (*range(40), 2**63 - 1) for index in range(128)}
    assert len(seeds) == 41 * 128
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of_answer(7, 0) == 7
    streams = [[key(seed_of_answer(7, index), position) for position in range(50)] for index in range(4)]
    assert len({number for stream in streams for number in stream}) == 200


def test_largest_returns_the_first_of_equal_maxima_and_nan_if_present() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0, 2.0], [-math.inf] * 4, [5.0, math.nan, 7.0, math.nan], [0.0, math.inf, 1.0, math.inf]])
    values, places = plain_sampling.largest(rows)
    expected = rows.max(dim=-1)
    torch.testing.assert_close(values, expected.values, rtol=0.0, atol=0.0, equal_nan=True)
    assert places.tolist() == [1, 0, 1, 1]
    assert plain_sampling.largest(rows.T.contiguous().T)[1].tolist() == places.tolist()
