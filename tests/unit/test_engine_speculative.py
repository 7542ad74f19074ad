"""Prompt lookup, the number of draft tokens, requests that cannot be drafted for, and options. No tensors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineConfigError
from engine.protocol import SamplingParams
from engine.scheduling.drafting import NO_DRAFT
from engine.scheduling.request import Request
from engine.speculation.adaptive_drafter import (
    INDEX_TOKENS_MAX,
    INDEX_TOKENS_PER_STEP,
    PROBE_INTERVAL,
    AdaptiveDrafter,
    NgramIndex,
    SpeculationCosts,
    can_draft,
)
from engine.speculation.options import SpeculativeOptions

FREE = SpeculationCosts(rows=(1, 64), times=(1.0, 1.0))
LINEAR = SpeculationCosts(rows=(1, 64), times=(1.0, 64.0))
CURVE = SpeculationCosts(rows=(1, 4, 16, 64), times=(1.0, 1.0, 2.0, 8.0))


def make_request(token_ids: list[int], **sampling: Any) -> Request:
    return Request(
        request_id="a",
        tenant_id="alice",
        sampling=SamplingParams(**{"seed": 1, "max_tokens": 100, **sampling}),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        max_total_tokens=10_000_000,
        stop_ids=frozenset(),
        arrived_s=0.0,
    )


def drafter(costs: SpeculationCosts = FREE, **options: Any) -> AdaptiveDrafter:
    return AdaptiveDrafter(SpeculativeOptions(**{"method": "ngram", "num_speculative_tokens": 4, **options}), costs)


def indexed(token_ids: list[int]) -> NgramIndex:
    index = NgramIndex((3, 2))
    assert index.update(token_ids, len(token_ids))
    return index


def test_prompt_lookup_continues_after_the_latest_match() -> None:
    tokens = [1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 9, 1, 2, 3]
    assert indexed(tokens).continuation(tokens, 3) == [7, 8, 9]


def test_a_longer_match_takes_precedence_over_a_later_shorter_one() -> None:
    tokens = [1, 2, 3, 4, 0, 2, 3, 5, 0, 1, 2, 3]
    assert indexed(tokens).continuation(tokens, 1) == [4]


def test_a_periodic_text_is_continued_with_its_period() -> None:
    assert indexed([5, 6, 5, 6, 5, 6]).continuation([5, 6, 5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]
    assert indexed([7, 7, 7, 7]).continuation([7, 7, 7, 7], 6) == [7] * 6


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4, 5, 6]], ids=str)
def test_a_text_without_repetition_has_no_continuation(tokens: list[int]) -> None:
    assert indexed(tokens).continuation(tokens, 4) == []


def test_an_index_updated_in_parts_equals_one_built_at_once() -> None:
    rng = random.Random(5)
    tokens = [rng.randrange(6) for _ in range(400)]
    growing = NgramIndex((3, 2))
    for end in range(1, len(tokens)):
        prefix = tokens[:end]
        while not growing.update(prefix, 7):
            pass
        assert growing.continuation(prefix, 4) == indexed(prefix).continuation(prefix, 4)


def test_a_step_indexes_a_bounded_part_of_a_long_prompt() -> None:
    request = make_request(list(range(INDEX_TOKENS_PER_STEP)) * 3)
    proposer = drafter()
    drafts = [proposer.draft(request, limit=4, num_running=2) for _ in range(7)]
    assert drafts[:5] == [NO_DRAFT] * 5, "six halves of the index are needed for two requests"
    assert drafts[-1].token_ids == [0, 1, 2, 3]


def test_an_index_of_a_very_long_text_drops_its_beginning() -> None:
    index = NgramIndex((2,))
    tokens = list(range(10 * INDEX_TOKENS_MAX))
    while not index.update(tokens, INDEX_TOKENS_MAX):
        pass
    assert len(index._recent) + len(index._older) <= 2 * INDEX_TOKENS_MAX + 1
    tokens += [0, 1]
    index.update(tokens, 10)
    assert index.continuation(tokens, 1) == [], "the first tokens are out of reach"


def test_an_index_of_a_long_answer_keeps_its_last_tokens_only() -> None:
    index, part = NgramIndex((2,)), INDEX_TOKENS_MAX // 4
    tokens: list[int] = []
    for start in range(0, 5 * INDEX_TOKENS_MAX, part):
        tokens += range(start, start + part)
        assert index.update(tokens, part)
        assert len(index._recent) + len(index._older) <= 2 * (INDEX_TOKENS_MAX + part)
    for distance, expected in ((INDEX_TOKENS_MAX, True), (3 * INDEX_TOKENS_MAX, False)):
        first = len(tokens) - distance
        assert (index.continuation([*tokens, first, first + 1], 1) == [first + 2]) is expected


def test_depth_is_maximal_if_rows_are_free_and_zero_if_they_cost_as_much_as_steps() -> None:
    assert FREE.best_depth(0.5, 1, 8) == 8
    assert LINEAR.best_depth(0.99, 1, 8) == 0


def test_depth_grows_with_acceptance_and_shrinks_with_the_batch() -> None:
    by_acceptance = [CURVE.best_depth(share / 10, 1, 16) for share in range(11)]
    assert by_acceptance == sorted(by_acceptance)
    assert (by_acceptance[0], by_acceptance[10]) == (0, 15), "sixteen rows are where the curve turns"
    by_batch = [CURVE.best_depth(0.9, running, 16) for running in (1, 2, 4, 8, 16, 64)]
    assert by_batch == sorted(by_batch, reverse=True)
    assert by_batch[-1] == 0


def test_depth_shrinks_with_the_cost_of_the_draft_model() -> None:
    depths = [
        SpeculationCosts(rows=(1, 64), times=(1.0, 1.0), draft_step=step).best_depth(0.8, 1, 16)
        for step in (0.0, 0.1, 0.3, 0.7)
    ]
    assert depths == sorted(depths, reverse=True)
    assert (depths[0], depths[-1]) == (16, 1)


def test_the_crossover_is_the_largest_batch_in_which_a_draft_pays() -> None:
    crossover = CURVE.crossover(0.9)
    assert CURVE.best_depth(0.9, crossover, 1) == 1
    assert CURVE.best_depth(0.9, crossover + 1, 1) == 0
    assert LINEAR.crossover(1.0) == 0


def test_nothing_is_drafted_beyond_the_crossover_or_disable_by_batch_size() -> None:
    repeating = make_request([1, 2, 3] * 5)
    assert drafter(CURVE).draft(repeating, limit=4, num_running=1).num_tokens == 4
    assert drafter(CURVE).draft(repeating, limit=4, num_running=CURVE.crossover(0.9) + 1) == NO_DRAFT
    assert drafter(CURVE, disable_by_batch_size=2).draft(repeating, limit=4, num_running=3) == NO_DRAFT


def test_rejected_drafts_reduce_the_depth_to_occasional_probes_and_accepted_ones_restore_it() -> None:
    proposer, request = drafter(CURVE, num_speculative_tokens=8), make_request([1, 2, 3] * 9)
    depths = []
    for _ in range(60):
        draft = proposer.draft(request, limit=8, num_running=2)
        depths.append(draft.num_tokens)
        if draft.num_tokens:
            proposer.observe(request, draft.num_tokens, 0)
        request.token_ids.append(1 + request.num_tokens % 3)
    assert depths[0] > 1
    assert depths[-2 * PROBE_INTERVAL :].count(1) == 2
    assert sum(depths[-2 * PROBE_INTERVAL :]) == 2
    for _ in range(3 * PROBE_INTERVAL):
        draft = proposer.draft(request, limit=8, num_running=2)
        proposer.observe(request, draft.num_tokens, draft.num_tokens)
        request.token_ids.append(1 + request.num_tokens % 3)
    assert draft.num_tokens > 1, "a text that repeats itself again is drafted again"


def test_a_draft_never_exceeds_the_limit_of_the_scheduler() -> None:
    proposer, request = drafter(num_speculative_tokens=8), make_request([1, 2] * 9)
    assert [proposer.draft(request, limit=limit, num_running=1).num_tokens for limit in (0, 1, 3, 20)] == [0, 1, 3, 8]
    by_model = drafter(method="draft_model", model=Path("small"), num_speculative_tokens=8)
    assert by_model.draft(request, limit=3, num_running=1) == (3, [])


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"bad_words": ["a"], "bad_words_token_ids": [[1, 2]]},
        {"min_tokens": 3},
        {"guided_choice": ["yes", "no"]},
    ],
    ids=str,
)
def test_nothing_is_drafted_if_sampling_depends_on_earlier_tokens(sampling: dict[str, Any]) -> None:
    request = make_request([1, 2] * 9, **sampling)
    assert not can_draft(request)
    assert drafter().draft(request, limit=4, num_running=1) == NO_DRAFT


def test_min_tokens_forbids_drafts_until_it_is_reached() -> None:
    request = make_request([1, 2] * 9, min_tokens=2, temperature=1.0, top_k=3, logit_bias={5: 1.0})
    assert not can_draft(request)
    request.token_ids += [1, 2]
    assert can_draft(request)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "field method must be one of ngram, draft_model"),
        ({"method": "eagle"}, "field method must be one of ngram, draft_model, not 'eagle'"),
        ({"method": "draft_model"}, "field model must be a model directory"),
        ({"method": "ngram", "model": "x"}, "field model .* is not used by ngram"),
        ({"method": "draft_model", "model": 5}, "field model must be a path, not 5"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "field num_speculative_tokens must be a whole number between 1"),
        ({"method": "ngram", "num_speculative_tokens": True}, "field num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": "4"}, "field num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_max": 99}, "field prompt_lookup_max"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "field prompt_lookup_min .* between 1 and 2"),
        ({"method": "ngram", "disable_by_batch_size": 0}, "field disable_by_batch_size"),
        ({"method": "ngram", "draft_tensor_parallel_size": 1}, "unknown fields: draft_tensor_parallel_size"),
        ([("method", "ngram")], "must be a mapping"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_invalid_speculative_config_names_its_field(value: Any, message: str) -> None:
    with pytest.raises(EngineConfigError, match=message) as refused:
        SpeculativeOptions.parse(value)
    assert refused.value.option == "speculative_config"


def test_ngram_sizes_follow_prompt_lookup_min_and_max() -> None:
    options = SpeculativeOptions.parse({"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2})
    assert options.ngram_sizes == (4, 3, 2)
    assert SpeculativeOptions.parse({"method": "draft_model", "model": "small"}).ngram_sizes == ()
