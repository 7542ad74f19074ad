"""The cost of one request for the step loop, which delays all others: counted, not timed."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from engine import sampling_params
from engine.grammar.masks import allow_all
from engine.protocol import EngineInfo, InvalidOption, SamplingParams
from engine.sampling.host_masks import forbid_tokens
from engine.sampling.logits_rules import ForbiddenTokens, SampledRow
from engine.sampling.randomness import seed_of_answer
from engine.scheduling.request import UNKNOWN_TOKEN, Request
from engine.submission import make_answers
from tests.support.engines import generation_request
from tests.support.sampling import next_rows, sampling_request


def _forbidden_tokens(request: Request, rules: ForbiddenTokens) -> set[int]:
    return set(rules.of(next_rows([request])[0]).tolist())


def _forbidden_by_linear_search(request: Request) -> set[int]:
    """The simple reference: compare every word with the end of the output."""
    output = request.token_ids[request.num_prompt_tokens :]
    words = request.sampling.bad_words_token_ids or []
    return {word[-1] for word in words if len(word) <= len(output) + 1 and output[len(output) - len(word) + 1 :] == word[:-1]}


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_of_bad_words_equals_a_linear_search(seed: int) -> None:
    rng = random.Random(seed)
    words = [[rng.randrange(4) for _ in range(rng.randrange(1, 6))] for _ in range(40)]
    request, rules = sampling_request(prompt=(0, 1, 2, 3), bad_words_token_ids=words), ForbiddenTokens()
    for _ in range(200):
        assert _forbidden_tokens(request, rules) == _forbidden_by_linear_search(request)
        request.token_ids.append(rng.randrange(4))


class CountingList(list[int]):
    """A list that counts reads of its items."""

    num_reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(index)


def test_a_step_does_not_compare_every_bad_word_with_the_text() -> None:
    words = [[first, 7, last] for first in range(100, 132) for last in range(200, 232)]
    request, rules = sampling_request(output=(100, 7), bad_words_token_ids=words), ForbiddenTokens()
    assert _forbidden_tokens(request, rules) == set(range(200, 232))

    request.token_ids = tokens = CountingList([*request.token_ids, 100, 7])
    assert _forbidden_tokens(request, rules) == set(range(200, 232))
    assert tokens.num_reads <= 4, "each of 1,024 words was held against the text"


def test_a_step_does_not_reread_a_text_that_matches_the_start_of_a_long_bad_word() -> None:
    words = [[7] * 3000, [9, *[7] * 3000]]
    request, rules = sampling_request(output=(7,) * 2000, bad_words_token_ids=words), ForbiddenTokens()
    assert _forbidden_tokens(request, rules) == set()

    request.token_ids = tokens = CountingList([*request.token_ids, 7])
    assert _forbidden_tokens(request, rules) == set()
    assert tokens.num_reads <= 1, "the text was read again"
    request.token_ids = [*tokens, *[7] * 998]
    assert _forbidden_tokens(request, rules) == _forbidden_by_linear_search(request) == {7}


def test_a_text_that_became_shorter_is_read_again() -> None:
    request, rules = sampling_request(output=(3, 4), bad_words_token_ids=[[3, 4, 5], [3, 6], [6]]), ForbiddenTokens()
    assert _forbidden_tokens(request, rules) == {5, 6}
    del request.token_ids[-1]
    assert _forbidden_tokens(request, rules) == {6}
    request.token_ids += [4]
    assert _forbidden_tokens(request, rules) == {5, 6}


def test_an_unknown_token_is_read_once_it_is_known() -> None:
    request, rules = sampling_request(output=(3, UNKNOWN_TOKEN), bad_words_token_ids=[[3, 4, 5]]), ForbiddenTokens()
    assert _forbidden_tokens(request, rules) == set()
    request.token_ids[-1] = 4
    assert _forbidden_tokens(request, rules) == {5}


def test_single_token_bad_words_and_end_tokens_are_collected_once() -> None:
    singles = [[token_id] for token_id in range(1000)]
    request, rules = sampling_request(bad_words_token_ids=singles), ForbiddenTokens()
    first = rules.of(next_rows([request])[0])
    request.token_ids.append(5)
    assert rules.of(next_rows([request])[0]) is first

    ends = sampling_request(end_ids=tuple(range(300)), min_tokens=9)
    first = rules.of(next_rows([ends])[0])
    assert first.tolist() == list(range(300))
    assert rules.of(SampledRow(ends, ends.num_tokens)) is first


def test_answers_of_a_request_share_the_tree_of_bad_words() -> None:
    words = [[3, 4], [5]]
    sampling = SamplingParams(seed=1, n=3, bad_words_token_ids=words)
    rules, answers = ForbiddenTokens(), [sampling_request(str(index)) for index in range(3)]
    for request in answers:
        request.sampling = sampling.with_checked(seed=2)
        rules.of(next_rows([request])[0])
    assert len({id(cursor.tree) for cursor in rules._bad_words._cursors.values()}) == 1

    del request
    answers.clear()
    assert not rules._bad_words._trees, "a tree outlives its requests"


def test_a_mask_loses_exactly_the_forbidden_tokens() -> None:
    words = [[token_id] for token_id in (0, 31, 32, 63, 64, 99)]
    request = sampling_request(bad_words_token_ids=[*words, [1, 31]], output=(1,))
    masks = allow_all(1, 100, torch.device("cpu"))
    forbid_tokens(masks, next_rows([request]), ForbiddenTokens())
    allowed = np.unpackbits(masks[0].numpy().view(np.uint8), bitorder="little")[:100]
    assert [token_id for token_id in range(100) if not allowed[token_id]] == [0, 31, 32, 63, 64, 99]


def test_sampling_parameters_are_validated_once_for_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    request = generation_request("a", [1, 2], n=128, seed=5, bad_words_token_ids=[[1, 2]])
    checks: list[object] = []
    monkeypatch.setattr(sampling_params, "_check_bad_words", checks.append)
    info = cast(EngineInfo, SimpleNamespace(max_model_len=64, eos_token_ids=[9]))
    answers = make_answers(request, info, now_s=0.0)
    assert not checks
    assert [answer.sampling.seed for answer in answers[1:]] == [seed_of_answer(5, index) for index in range(1, 128)]
    assert {answer.sampling.n for answer in answers} == {128}
    assert request.sampling.seed == 5


@pytest.mark.parametrize("ids", [[True], [-1], [1, 2**31], [1.0], ["1"], [None]])
def test_invalid_token_ids_are_found_among_many_valid_ones(ids: list[Any]) -> None:
    with pytest.raises(InvalidOption, match="must hold token ids"):
        SamplingParams(bad_words_token_ids=[[1, 2], [*range(100), *ids]])
