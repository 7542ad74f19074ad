"""Sampling by columns of slots draws what the plain sampler draws, and accepts no more than it can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.sampling.columns import ColumnSampler
from engine.sampling.sampler import NO_TOKEN
from tests.support.sampling import sample, sampling_request

VOCAB_SIZE = 1500
CPU = torch.device("cpu")
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.4},
    {"top_k": 1},
    {"top_k": 9, "temperature": 1.8},
    {"top_k": 10**6},
    {"top_p": 0.7},
    {"top_p": 0.99, "temperature": 2.0},
    {"min_p": 0.1},
    {"top_k": 300, "top_p": 0.9, "min_p": 0.02},
    {"logit_bias": {7: 6.0, 8: -100.0}},
    {"bad_words_token_ids": [[3], [4]], "logit_bias": {3: 100.0}, "temperature": 0.0},
    {"min_tokens": 3, "stop_token_ids": [5, 6]},
]


def test_slots_draw_the_tokens_of_the_plain_sampler() -> None:
    logits = torch.randn(len(SETTINGS), VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    logits[-1, 5] = 100.0
    sampler = ColumnSampler(2 * len(SETTINGS), VOCAB_SIZE, CPU)
    requests = [sampling_request(str(i), seed=2**63 - 1 - i, **each) for i, each in enumerate(SETTINGS)]
    slots = [(7 * i) % (2 * len(SETTINGS)) for i in range(len(SETTINGS))]
    assert all(sampler.accepts(request) for request in requests)
    sampler.place(slots, requests)
    for _ in range(5):
        expected = [token.token_id for token in sample(logits, requests)]
        positions = torch.tensor([request.num_tokens for request in requests], dtype=torch.int32)
        chosen = sampler.choose(logits, torch.tensor(slots, dtype=torch.int32), positions, sampler.kind(slots))
        assert chosen.tolist() == expected
        for request, token_id in zip(requests, expected, strict=True):
            request.token_ids.append(token_id or 0)


def test_a_slot_forgets_its_last_owner() -> None:
    sampler = ColumnSampler(1, 20, CPU)
    logits = torch.zeros(1, 20)
    for sampling, expected in (({"logit_bias": {7: 9.0}}, 7), ({"min_tokens": 2}, 1), ({}, 0)):
        request = sampling_request(temperature=0.0, **sampling)
        assert sampler.accepts(request)
        sampler.place([0], [request])
        position = torch.tensor([request.num_tokens])
        assert sampler.choose(logits, torch.tensor([0]), position, sampler.kind([0])).tolist() == [expected]


def test_padding_has_no_token() -> None:
    sampler = ColumnSampler(2, 20, CPU)
    chosen = sampler.choose(torch.zeros(2, 20), torch.tensor([-1, -1]), torch.tensor([0, 0]), sampler.kind([]))
    assert chosen.tolist() == [NO_TOKEN, NO_TOKEN]


@pytest.mark.parametrize(
    "sampling",
    [
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"guided_regex": "a"},
        {"typical_p": 0.9},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"bad_words_token_ids": [[1, 2]]},
        {"min_tokens": 1, "stop_token_ids": list(range(20))},
    ],
    ids=str,
)
def test_what_a_slot_cannot_hold_is_left_to_the_plain_sampler(sampling: dict[str, Any]) -> None:
    assert not ColumnSampler(1, 50, CPU).accepts(sampling_request(**sampling))


def test_rows_for_biases_are_given_back_when_their_requests_end() -> None:
    sampler = ColumnSampler(4, 50, CPU, num_rules=2)
    first, second, third = (sampling_request(str(i), logit_bias={1: 1.0}) for i in range(3))
    assert sampler.accepts(first)
    assert sampler.accepts(second)
    assert sampler.accepts(first)
    assert not sampler.accepts(third)
    del first
    assert sampler.accepts(third)


def test_only_top_p_without_top_k_weighs_the_vocabulary() -> None:
    sampler = ColumnSampler(3, 50, CPU)
    sampler.place([0, 1, 2], [sampling_request(top_p=0.5), sampling_request(top_p=0.5, top_k=4), sampling_request()])
    assert [sampler.kind([slot]) for slot in range(3)] == [True, False, False]
