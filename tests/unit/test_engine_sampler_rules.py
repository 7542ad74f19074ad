"""Rules that change logits before sampling: penalties, logit bias, minimum length, bad words, and masks of a grammar."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.sampling.bad_words import BadWords
from engine.sampling.logits_rules import SampledRow
from engine.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED, SampledToken, Sampler
from engine.scheduling.request import UNKNOWN_TOKEN, Request
from tests.support.sampling import distributions, next_rows, sample, sampling_request

CPU = torch.device("cpu")


def output_of(request: Request) -> list[int]:
    """The generated tokens."""
    return request.token_ids[request.num_prompt_tokens :]


def mask_of(allowed: Sequence[Sequence[int] | None], vocab_size: int) -> torch.Tensor:
    """Packed masks that allow the ids of each row, everything where it is None: [R, ceil(V / 32)] int32"""
    words = -(-vocab_size // 32)
    masks = torch.full((len(allowed), words), -1, dtype=torch.int32)
    for row, ids in zip(masks, allowed, strict=True):
        if ids is not None:
            values = [sum(1 << (i % 32) for i in set(ids) if i // 32 == word) for word in range(words)]
            row[:] = torch.tensor([value - (1 << 32) if value >> 31 else value for value in values], dtype=torch.int32)
    return masks


def test_repetition_penalty_applies_to_tokens_of_prompt_and_output() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.2]])
    chosen = sample(logits, [sampling_request(prompt=(0,), output=(3,), temperature=0.0, repetition_penalty=2.0)])[0]
    assert chosen.token_id == 1


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    in_prompt = sampling_request(prompt=(0, 0), temperature=0.0, frequency_penalty=0.5, presence_penalty=0.5)
    in_output = sampling_request(prompt=(2,), output=(0,), temperature=0.0, presence_penalty=0.2)
    twice = sampling_request(prompt=(2,), output=(0, 0), temperature=0.0, frequency_penalty=0.06)
    once = sampling_request(prompt=(2,), output=(0,), temperature=0.0, frequency_penalty=0.06)
    assert [sample(logits, [r])[0].token_id for r in (in_prompt, in_output, twice, once)] == [0, 1, 1, 0]


def test_integer_biases_are_added() -> None:
    request = sampling_request(prompt=(0,), temperature=0.0)
    object.__setattr__(request.sampling, "logit_bias", {1: -100, 2: 1})
    assert sample(torch.tensor([[0.5, 9.0, 0.0]]), [request])[0].token_id == 2


@pytest.mark.parametrize("seed", range(4))
def test_penalties_equal_a_count_over_the_whole_vocabulary(seed: int) -> None:
    rng = random.Random(seed)
    request = sampling_request(
        prompt=tuple(rng.randrange(50) for _ in range(rng.randrange(1, 60))),
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2,
    )  # fmt: skip
    sampler = Sampler(CPU)
    for _ in range(12):
        logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(rng.randrange(1000)))
        result = sampler.distributions(logits.clone(), next_rows([request]))
        anywhere = torch.bincount(torch.tensor(request.token_ids), minlength=50) > 0
        in_output = torch.bincount(torch.tensor(output_of(request), dtype=torch.int64), minlength=50)
        twin = torch.where(anywhere, torch.where(logits > 0, logits / 1.3, logits * 1.3), logits)
        twin = twin + 0.2 * in_output - 0.4 * (in_output > 0)
        torch.testing.assert_close(result, torch.softmax(twin, -1))
        request.token_ids += [rng.randrange(50) for _ in range(rng.randrange(1, 4))]


def test_token_counts_follow_a_growing_request() -> None:
    sampler = Sampler(CPU)
    request = sampling_request(prompt=(2,), temperature=0.0, frequency_penalty=0.3)
    chosen = []
    for _ in range(4):
        (output,) = sampler.sample(torch.tensor([[1.0, 0.8, -5.0]]), next_rows([request]))
        assert output.token_id is not None
        request.token_ids.append(output.token_id)
        chosen.append(output.token_id)
    assert chosen == [0, 1, 0, 1]


def test_logit_bias_changes_single_tokens() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.0]])
    assert sample(logits, [sampling_request(temperature=0.0, logit_bias={2: 5.0, 0: -100.0})])[0].token_id == 2


def test_end_tokens_are_forbidden_below_min_tokens() -> None:
    logits = torch.tensor([[9.0, 8.0, 1.0]])
    early = sampling_request(output=(2,), temperature=0.0, min_tokens=2, max_tokens=9, stop_token_ids=[1])
    later = sampling_request(output=(2, 2), temperature=0.0, min_tokens=2, max_tokens=9, stop_token_ids=[1])
    assert sample(logits, [early])[0].token_id == 2
    assert sample(logits, [later])[0].token_id == 0


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_forbids_stop_tokens_with_and_without_ignore_eos(ignore_eos: bool) -> None:
    """With ignore_eos the request has no end tokens, but its stop_token_ids are forbidden all the same."""
    logits = torch.tensor([[9.0, 8.0, 1.0]])
    request = sampling_request(
        temperature=0.0, min_tokens=1, ignore_eos=ignore_eos, stop_token_ids=[1], end_ids=() if ignore_eos else (0,)
    )
    assert sample(logits, [request])[0].token_id == (0 if ignore_eos else 2)


def test_a_bad_word_of_one_token_is_forbidden() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    request = sampling_request(temperature=0.0, bad_words_token_ids=[[0], [1]])
    assert sample(logits, [request])[0].token_id == 2


@pytest.mark.parametrize(
    ("output", "expected"),
    [((), 0), ((5,), 0), ((5, 6), 1), ((6, 5, 6), 1), ((6,), 0), ((5, 6, 5), 0)],
)
def test_the_last_token_of_a_bad_word_is_forbidden_after_the_others(output: tuple[int, ...], expected: int) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    request = sampling_request(prompt=(5, 6), output=output, temperature=0.0, bad_words_token_ids=[[5, 6, 0]])
    assert sample(logits, [request])[0].token_id == expected


@pytest.mark.parametrize("seed", range(20))
def test_forbidden_tokens_equal_a_linear_search_over_the_bad_words(seed: int) -> None:
    rng = random.Random(seed)
    words = [[rng.randrange(3) for _ in range(rng.randrange(1, 6))] for _ in range(rng.randrange(1, 12))]
    prompt = tuple(rng.randrange(3) for _ in range(3))
    request = sampling_request(prompt=prompt, bad_words_token_ids=words)
    bad_words = BadWords()
    for _ in range(60):
        text = output_of(request)
        expected = {word[-1] for word in words if word[:-1] == text[len(text) - len(word) + 1 :]}
        assert bad_words.forbidden_tokens(request, request.num_tokens).tolist() == sorted(expected)
        if rng.random() < 0.1:
            del request.token_ids[max(len(prompt), request.num_tokens - 2) :]  # a step is computed again
            continue
        request.token_ids += [rng.randrange(3) for _ in range(rng.randrange(1, 3))]


def test_bad_words_are_matched_up_to_an_unknown_token_and_on_once_it_is_known() -> None:
    request = sampling_request(prompt=(3,), output=(1, UNKNOWN_TOKEN), bad_words_token_ids=[[1, 5], [1, 2, 6]])
    bad_words = BadWords()
    assert bad_words.forbidden_tokens(request, 3).tolist() == [5]
    request.token_ids[2] = 2
    assert bad_words.forbidden_tokens(request, 3).tolist() == [6]


def test_bad_words_and_min_tokens_are_combined() -> None:
    request = sampling_request(temperature=0.0, bad_words_token_ids=[[0]], stop_token_ids=[1], min_tokens=2)
    assert sample(torch.tensor([[3.0, 2.0, 1.0]]), [request])[0].token_id == 2


def test_bad_words_follow_a_growing_output() -> None:
    sampler = Sampler(CPU)
    request = sampling_request(prompt=(3,), temperature=0.0, bad_words_token_ids=[[0, 0], [1, 2]])
    for _ in range(5):
        (output,) = sampler.sample(torch.tensor([[3.0, 2.0, 1.0, 0.0]]), next_rows([request]))
        assert output.token_id is not None
        request.token_ids.append(output.token_id)
    assert output_of(request) == [0, 1, 0, 1, 0]


@pytest.mark.parametrize("vocab_size", [31, 32, 33, 70, 1100])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {}, {"top_p": 0.8}, {"typical_p": 0.5, "logprobs": 2}], ids=str)
def test_only_tokens_that_the_mask_allows_are_sampled(vocab_size: int, sampling: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, vocab_size, generator=generator) * 3
    allowed = [sorted({0, vocab_size - 1, row, 30}) for row in range(8)]
    requests = [sampling_request(str(i), seed=i, guided_regex="a*", **sampling) for i in range(8)]
    outputs = sample(logits, requests, mask_of(allowed, vocab_size))
    assert all(output.token_id in ids for output, ids in zip(outputs, allowed, strict=True))
    twin = torch.full_like(logits, -math.inf)
    for row, ids in enumerate(allowed):
        twin[row, ids] = logits[row, ids]
    plain = [sampling_request(str(i), seed=i, **sampling) for i in range(8)]
    assert [output.token_id for output in sample(twin, plain)] == [output.token_id for output in outputs]
    torch.testing.assert_close(distributions(logits, requests, mask_of(allowed, vocab_size)), distributions(twin, plain))


def test_masks_are_applied_in_slices_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.torch.bitmask.SLICE_ELEMENTS", 3 * 40)
    requests = [sampling_request(str(i), temperature=0.0, guided_regex="a*") for i in range(8)]
    outputs = sample(torch.zeros(8, 40), requests, mask_of([[5 * row] for row in range(8)], 40))
    assert [output.token_id for output in outputs] == [5 * row for row in range(8)]


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_mask_does_not_hide_non_finite_logits(poison: float) -> None:
    logits = torch.tensor([[3.0, poison, 1.0]])
    request = sampling_request(temperature=0.0, guided_regex="a*")
    assert sample(logits, [request], mask_of([[0]], 3)) == [SampledToken(error=NOT_FINITE)]


def test_rows_without_a_grammar_are_not_masked() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 2)
    requests = [sampling_request("a", temperature=0.0), sampling_request("b", temperature=0.0, guided_choice=["x"])]
    outputs = sample(logits, requests, mask_of([[2], [2]], 3))
    assert [output.token_id for output in outputs] == [0, 2]


def test_logprobs_are_computed_before_the_mask() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    (output,) = sample(logits, [sampling_request(temperature=0.0, guided_choice=["x"], logprobs=1)], mask_of([[2]], 3))
    assert output.logprob is not None
    assert output.logprob.logprob == pytest.approx(torch.log_softmax(logits, -1)[0, 2].item(), abs=1e-6)
    assert (output.logprob.rank, output.logprob.top_token_ids) == (3, [0])


@pytest.mark.parametrize(
    ("sampling", "allowed", "param"),
    [
        ({"guided_json": "{}"}, [], "guided_json"),
        ({"guided_regex": "a", "bad_words_token_ids": [[1]]}, [1], "guided_regex"),
        ({"bad_words_token_ids": [[0], [1], [2]]}, None, "bad_words"),
        ({"min_tokens": 1, "stop_token_ids": [0, 1, 2]}, None, "min_tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_forbidden_fails_alone_and_names_the_field(
    sampling: dict[str, Any], allowed: list[int] | None, param: str, temperature: float
) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]] * 3)
    requests = [sampling_request(str(i), temperature=temperature, **(sampling if i == 1 else {})) for i in range(3)]
    healthy = sample(logits[:1], [requests[0]])[0]
    outputs = sample(logits, requests, mask_of([None, allowed, None], 3))
    assert outputs == [healthy, SampledToken(error=NOTHING_ALLOWED, error_param=param), healthy]
    assert not distributions(logits, requests, mask_of([None, allowed, None], 3))[1].any()


@pytest.mark.parametrize("bias", [-100.0, 100.0])
def test_equal_biases_on_all_tokens_change_nothing(bias: float) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert sample(logits, [sampling_request(temperature=0.0, logit_bias=dict.fromkeys(range(3), bias))])[0].token_id == 0


def test_rows_after_drafts_use_the_noise_of_their_own_position() -> None:
    logits = torch.zeros(4, 500)
    request = sampling_request(output=(3, 4), seed=9)
    behind = Sampler(CPU).sample(logits.clone(), [SampledRow(request, request.num_tokens + k) for k in range(4)])
    grown = []
    for _ in range(4):
        grown.append(sample(logits[:1], [request])[0])
        request.token_ids.append(7)
    assert behind == grown


def test_min_tokens_forbids_end_tokens_in_rows_after_drafts_by_their_position() -> None:
    request = sampling_request(temperature=0.0, min_tokens=2)
    rows = [SampledRow(request, request.num_tokens + depth) for depth in range(3)]
    outputs = Sampler(CPU).sample(torch.tensor([[9.0, 1.0]] * 3), rows)
    assert [output.token_id for output in outputs] == [1, 1, 0]
