"""Sampling by slots: tokens and log-probabilities equal the plain sampler's; masks; rows of the table of biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.grammar.masks import allow_all
from engine.protocol import PlainReason
from engine.sampling.columns import ColumnSampler, Kind
from engine.sampling.host_masks import forbid_tokens
from engine.sampling.logits_rules import ForbiddenTokens, SampledRow
from engine.sampling.scores import unpacked
from engine.scheduling.request import Request, RequestStatus
from kernels.ops import NO_TOKEN, SamplingColumns
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
    {"repetition_penalty": 1.3, "temperature": 0.0},
    {"presence_penalty": 1.5, "frequency_penalty": -0.4, "top_k": 50},
    {"repetition_penalty": 0.8, "frequency_penalty": 0.3, "logit_bias": {7: 6.0}, "top_p": 0.9},
]


def assign(sampler: ColumnSampler, slots: Sequence[int], requests: Sequence[Request]) -> None:
    sampler.columns.words.write(*sampler.assign(slots, requests))


def test_slots_draw_the_tokens_of_the_plain_sampler() -> None:
    logits = torch.randn(len(SETTINGS), VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    logits[SETTINGS.index({"min_tokens": 3, "stop_token_ids": [5, 6]}), 5] = 100.0
    sampler = ColumnSampler(2 * len(SETTINGS), VOCAB_SIZE, CPU)
    requests = [sampling_request(str(i), seed=2**63 - 1 - i, **each) for i, each in enumerate(SETTINGS)]
    slots = [(7 * i) % (2 * len(SETTINGS)) for i in range(len(SETTINGS))]
    assert all(sampler.refusal(request) is None for request in requests)
    assign(sampler, slots, requests)
    for slot, request in zip(slots, requests, strict=True):
        request.token_ids += [9, 9]  # generated before the slot was assigned
        sampler.restart(slot, request, request.num_tokens)
    for _ in range(5):
        expected = [token.token_id for token in sample(logits, requests)]
        positions = torch.tensor([request.num_tokens for request in requests], dtype=torch.int32)
        chosen = sampler.choose(logits, torch.tensor(slots, dtype=torch.int32), positions, sampler.needs(slots).kind)
        assert chosen.tokens.tolist() == expected
        for request, token_id in zip(requests, expected, strict=True):
            request.token_ids.append(token_id or 0)


# what one greedy request asks for besides, and the variant of the sampling kernel that its step then needs
KINDS: list[tuple[dict[str, Any], Kind]] = [
    ({}, Kind(greedy=True)),
    ({"top_p": 0.5, "typical_p": 0.5, "seed": 5}, Kind(greedy=True)),
    ({"temperature": 1.0, "top_k": 1}, Kind(greedy=True)),
    ({"min_tokens": 1}, Kind()),
    ({"logit_bias": {1: 1.0}}, Kind()),
    ({"bad_words_token_ids": [[1]]}, Kind()),
    ({"guided_regex": "a"}, Kind()),
    ({"logprobs": 0}, Kind(num_top=1)),
    ({"repetition_penalty": 1.1}, Kind(counts=True)),
    ({"presence_penalty": 0.1}, Kind(counts=True)),
    ({"frequency_penalty": 0.1}, Kind(counts=True)),
    ({"temperature": 1.0}, Kind()),
    ({"temperature": 1.0, "top_k": 5, "top_p": 0.5}, Kind()),
    ({"temperature": 1.0, "top_p": 0.5}, Kind(weighs=True)),
    ({"temperature": 1.0, "top_k": VOCAB_SIZE, "top_p": 0.5}, Kind(weighs=True)),
]


@pytest.mark.parametrize(("sampling", "kind"), KINDS, ids=[str(sampling) for sampling, _ in KINDS])
def test_a_step_needs_what_its_rows_ask_for(sampling: dict[str, Any], kind: Kind) -> None:
    sampler = ColumnSampler(2, VOCAB_SIZE, CPU)
    requests = [sampling_request("plain", temperature=0.0), sampling_request("a", **{"temperature": 0.0, **sampling})]
    assert all(sampler.refusal(request) is None for request in requests)
    assign(sampler, [0, 1], requests)
    assert sampler.needs([0]).kind == Kind(greedy=True)
    assert sampler.needs([0, 1]).kind == sampler.needs([1]).kind == kind


def test_a_bad_word_of_two_tokens_forbids_neither_alone() -> None:
    sampler, request = ColumnSampler(1, 20, CPU), sampling_request(temperature=0.0, bad_words_token_ids=[[3, 4]])
    assert sampler.refusal(request) is None
    assign(sampler, [0], [request])
    logits = torch.zeros(1, 20).index_fill(1, torch.tensor([3]), 1.0)
    chosen = sampler.choose(logits, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), Kind())
    assert chosen.tokens.tolist() == [3]


def test_a_slot_keeps_nothing_of_its_last_request() -> None:
    sampler = ColumnSampler(1, 20, CPU)
    logits = torch.zeros(1, 20)
    for sampling, expected in (
        ({"logit_bias": {7: 9.0}}, 7),
        ({"min_tokens": 2}, 1),
        ({"presence_penalty": 1.0}, 2),
        ({"repetition_penalty": 2.0}, 0),
        ({}, 0),
    ):
        request = sampling_request(prompt=(3,), output=(0, 1), temperature=0.0, **sampling)
        assert sampler.refusal(request) is None
        assign(sampler, [0], [request])
        sampler.restart(0, request, request.num_tokens)
        position = torch.tensor([request.num_prompt_tokens])
        chosen = sampler.choose(logits, torch.tensor([0]), position, sampler.needs([0]).kind)
        assert chosen.tokens.tolist() == [expected]


def test_padding_rows_draw_no_token() -> None:
    sampler = ColumnSampler(2, 20, CPU)
    kind = Kind(weighs=True, counts=True, num_top=5)
    chosen = sampler.choose(torch.zeros(2, 20), torch.tensor([-1, -1]), torch.tensor([0, 0]), kind)
    assert chosen.tokens.tolist() == [NO_TOKEN, NO_TOKEN]
    assert not sampler.columns.counts.any()


TYPICAL: list[dict[str, Any]] = [
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 1.7},
    {"typical_p": 1e-9},
    {"typical_p": 0.5, "top_k": 40},
    {"typical_p": 0.5, "top_p": 0.7},
    {"typical_p": 0.8, "top_k": 300, "top_p": 0.9, "min_p": 0.02, "temperature": 0.6},
    {"typical_p": 0.7, "logit_bias": {7: 6.0, 8: -100.0}},
    {"typical_p": 0.7, "min_tokens": 3, "stop_token_ids": [5, 6]},
    {"typical_p": 0.7, "top_k": 1},
    {"typical_p": 0.7, "repetition_penalty": 1.3, "presence_penalty": 1.5, "frequency_penalty": -0.4},
    {"typical_p": 0.7, "bad_words_token_ids": [[3], [4]], "presence_penalty": 0.5, "min_p": 0.01},
    {"top_p": 0.9},
]


@pytest.mark.parametrize("spread", [0.02, 3.0])
def test_typical_p_combines_with_all_other_filters(spread: float) -> None:
    settings = [each for each in TYPICAL for _ in range(20)]
    logits = torch.randn(len(settings), VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * spread
    logits[::4] = (logits[::4] * 2).round()
    logits[1::4, 50:900] = -torch.inf
    sampler, slots = ColumnSampler(len(settings), VOCAB_SIZE, CPU, dtype=torch.float32), list(range(len(settings)))
    requests = [sampling_request(str(i), prompt=(9, 4, 9), output=(7,), seed=i, **each) for i, each in enumerate(settings)]
    assert all(sampler.refusal(request) is None for request in requests)
    assign(sampler, slots, requests)
    for slot, request in zip(slots, requests, strict=True):
        sampler.restart(slot, request, request.num_tokens)
    needs = sampler.needs(slots)
    assert needs.masked == []
    positions = torch.tensor([request.num_tokens for request in requests])
    chosen = sampler.choose(logits, torch.tensor(slots, dtype=torch.int32), positions, needs.kind)
    assert chosen.tokens.tolist() == [token.token_id for token in sample(logits, requests)]


@pytest.mark.parametrize(
    "sampling",
    [{"guided_regex": "a"}, {"bad_words_token_ids": [[1], [1, 2]]}, {"min_tokens": 1, "stop_token_ids": list(range(20))}],
    ids=str,
)
def test_rules_that_depend_on_earlier_tokens_need_a_mask(sampling: dict[str, Any]) -> None:
    sampler = ColumnSampler(2, 50, CPU)
    requests = [sampling_request(), sampling_request(**sampling)]
    assert all(sampler.refusal(request) is None for request in requests)
    assign(sampler, [0, 1], requests)
    assert sampler.needs([0, 1]).masked == [1]
    assert sampler.needs([1, 0]).masked == [0]
    assert sampler.needs([0]).masked == []


def test_host_masks_contain_the_tokens_forbidden_after_earlier_ones() -> None:
    request = sampling_request(bad_words_token_ids=[[3], [4, 37]], output=(4,), min_tokens=3, stop_token_ids=[5])
    masks = allow_all(2, 40, CPU)
    forbid_tokens(masks, [SampledRow(request, request.num_tokens), SampledRow(sampling_request(), 1)], ForbiddenTokens())
    bits = (masks[:, torch.arange(40) // 32] >> torch.arange(40) % 32) & 1
    assert (bits == 0).nonzero().tolist() == [[0, 0], [0, 3], [0, 5], [0, 37]]


@pytest.mark.parametrize("counts", [[0], [1, 3], [0, 20, 7]], ids=str)
def test_logprobs_equal_those_of_the_plain_sampler(counts: list[int]) -> None:
    settings: list[dict[str, Any]] = [{"logprobs": count, "repetition_penalty": 1.5, "top_k": 40} for count in counts]
    requests = [sampling_request(), *(sampling_request(seed=i, **each) for i, each in enumerate(settings))]
    logits = torch.randn(len(requests), VOCAB_SIZE, generator=torch.Generator().manual_seed(2)) * 3
    sampler, slots = ColumnSampler(8, VOCAB_SIZE, CPU, dtype=torch.float32), list(range(3, 3 + len(requests)))
    assign(sampler, slots, requests)
    needs = sampler.needs(slots)
    assert needs.scored == list(enumerate(counts, 1))
    chosen = sampler.choose(logits, torch.tensor(slots, dtype=torch.int32), torch.tensor([1] * len(slots)), needs.kind)
    assert chosen.scores is not None
    expected = sample(logits, requests)
    assert chosen.tokens.tolist() == [token.token_id for token in expected]
    assert [unpacked(chosen.scores[row], count) for row, count in needs.scored] == [token.logprob for token in expected[1:]]


def test_a_row_of_the_bias_table_is_freed_when_its_request_ends() -> None:
    sampler = ColumnSampler(4, 50, CPU, num_biases=2)
    first, second, third = (sampling_request(str(i), logit_bias={1: 1.0 + i}) for i in range(3))
    assert sampler.refusal(first) is None
    assert sampler.refusal(second) is None
    assert sampler.refusal(first) is None
    assert sampler.refusal(third) == PlainReason.LOGIT_BIAS
    first.status = RequestStatus.FINISHED
    assert sampler.refusal(third) is None


def test_every_slot_may_have_its_own_bias() -> None:
    sampler = ColumnSampler(40, 50, CPU)
    assert all(sampler.refusal(sampling_request(str(i), logit_bias={i: 1.0})) is None for i in range(40))


def test_requests_with_equal_biases_share_a_row_until_the_last_one_ends() -> None:
    sampler = ColumnSampler(3, 50, CPU, num_biases=1)
    same: dict[str, Any] = {"logit_bias": {3: 50.0, 4: 60.0}, "bad_words_token_ids": [[4], [1, 2]], "temperature": 0.0}
    first, second = (sampling_request(str(i), **same) for i in range(2))
    third = sampling_request("third", logit_bias={5: 50.0}, temperature=0.0)
    for request in (first, second):
        assert sampler.refusal(request) is None
    assign(sampler, [0, 2], [first, second])
    first.status = RequestStatus.FINISHED
    assert sampler.refusal(third) == PlainReason.LOGIT_BIAS
    slots, positions = torch.tensor([0, 1, 2]), torch.tensor([1, 1, 1])
    assign(sampler, [1], [sampling_request(temperature=0.0)])
    assert sampler.choose(torch.zeros(3, 50), slots, positions, Kind()).tokens.tolist() == [3, 0, 3]
    second.status = RequestStatus.FINISHED
    assert sampler.refusal(third) is None
    assign(sampler, [0], [third])
    assert sampler.choose(torch.zeros(1, 50), slots[:1], positions[:1], Kind()).tokens.tolist() == [5]


def test_only_top_p_without_top_k_below_the_vocabulary_needs_weights_of_all_tokens() -> None:
    settings: list[dict[str, Any]] = [{"top_p": 0.5}, {}, *({"top_p": 0.5, "top_k": top_k} for top_k in (4, 49, 50))]
    sampler = ColumnSampler(len(settings), 50, CPU)
    assign(sampler, range(len(settings)), [sampling_request(**each) for each in settings])
    assert [sampler.needs([slot]).kind.weighs for slot in range(len(settings))] == [True, False, False, False, True]


@pytest.mark.parametrize("num_slots", [1, 5, 256])
def test_every_column_is_aligned_to_16_bytes(num_slots: int) -> None:
    columns = SamplingColumns.empty(num_slots, 33, 1, CPU)
    penalties = ("repetition", "frequency", "presence")
    for name in ("scale", "streams", "top_k", "top_p", "neg_log2_min_p", "typical_p", *penalties, "min_tokens_until", "rules"):
        column = getattr(columns, name)
        assert column.shape == (num_slots,)
        assert column.data_ptr() % 16 == 0, name
