"""Verification of drafts: tokens equal to plain decoding, or its distribution with rejection sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.protocol import TokenLogprob
from engine.sampling.acceptance import accept_by_rejection, accept_equal
from engine.sampling.randomness import key, signed, stream
from engine.sampling.sampler import NOT_FINITE, SampledToken
from engine.speculation.options import SpeculativeOptions
from kernels import ops
from kernels.ops import DRAFT, plain_sampling
from tests.support.engines import generation_request, run_to_end, small_engine, tokens
from tests.support.tiny_models import saved_model

NUM_DRAWS = 4000
NUM_SINGLE = 100  # how many of the draws are compared with `accept_by_rejection`, which takes one request at a time


def sampled_tokens(*token_ids: int | None) -> list[SampledToken]:
    return [SampledToken(token_id=i) if i is not None else SampledToken(error=NOT_FINITE) for i in token_ids]


@pytest.mark.parametrize(
    ("sampled", "draft_ids", "expected"),
    [
        ((5,), [], [5]),
        ((5, 6, 7), [5, 6], [5, 6, 7]),
        ((5, 6, 7), [5, 9], [5, 6]),
        ((5, 6, 7), [9, 6], [5]),
        ((5, None, 7), [5, 6], [5]),
        ((5, None, 7), [9, 6], [5]),
    ],
    ids=str,
)
def test_drafts_are_accepted_while_they_equal_the_sampled_tokens(
    sampled: tuple[int | None, ...], draft_ids: list[int], expected: list[int]
) -> None:
    assert accept_equal(sampled_tokens(*sampled), draft_ids).token_ids == expected


def test_a_failed_first_row_is_the_error_of_its_request() -> None:
    output = accept_equal([SampledToken(error="nothing allowed", error_param="bad_words"), *sampled_tokens(5)], [5])
    assert (output.token_ids, output.error, output.error_param) == ([], "nothing allowed", "bad_words")


def test_logprobs_are_returned_for_accepted_tokens_only() -> None:
    rows = [SampledToken(token_id=i, logprob=TokenLogprob(logprob=-float(i))) for i in (1, 2, 3)]
    assert [entry.logprob for entry in accept_equal(rows, [1, 9]).logprobs or []] == [-1.0, -2.0]


def histogram(token_ids: list[int], size: int) -> torch.Tensor:
    return torch.bincount(torch.tensor(token_ids), minlength=size).double() / len(token_ids)


def assert_follows(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Pearson's χ² over categories that are expected at all, at a probability of error of about 1 in 10,000."""
    expected = expected.double()
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token was drawn that has no probability"
    statistic = (NUM_DRAWS * (counts - expected).square()[possible] / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 4.0 * (2 * freedom) ** 0.5 + 6.0, f"χ² is {statistic:.1f} with {freedom} degrees of freedom"


@pytest.mark.parametrize("closeness", [0.0, 0.5, 0.95])
def test_rejection_sampling_follows_the_target_distribution(closeness: float) -> None:
    generator = torch.Generator().manual_seed(2)
    size, depth = 6, 2
    target = torch.rand(depth + 1, size, generator=generator).square_()
    target[:, 1] = 0.0  # filtered out by the request
    target /= target.sum(dim=-1, keepdim=True)
    other = torch.rand(depth, size, generator=generator)
    draft = closeness * target[:depth] + (1 - closeness) * other / other.sum(dim=-1, keepdim=True)
    position = 10
    keys = torch.tensor([[signed(key(seed, position + i, draw=DRAFT)) for i in range(depth)] for seed in range(NUM_DRAWS)])
    draft_ids = plain_sampling.draw_weighted(draft.repeat(NUM_DRAWS, 1), keys.flatten()).view(NUM_DRAWS, depth)
    accepted = ops.operations(target.device).reject_drafts(
        target.expand(NUM_DRAWS, -1, -1),
        draft.expand(NUM_DRAWS, -1, -1),
        draft_ids,
        torch.full((NUM_DRAWS,), depth, dtype=torch.int32),
        torch.tensor([signed(stream(seed)) for seed in range(NUM_DRAWS)]),
        torch.full((NUM_DRAWS,), position),
    )
    answers = [[token for token in row if token != ops.NO_TOKEN] for row in accepted.tolist()]
    for seed in range(NUM_SINGLE):
        alone = accept_by_rejection(target, draft, draft_ids[seed].tolist(), seed=seed, position=position)
        assert alone.token_ids == answers[seed], "the tokens of a request do not depend on its batch"
    firsts = [answer[0] for answer in answers]
    seconds = [answer[1] for answer in answers if len(answer) > 1]
    assert_follows(histogram(firsts, size), target[0])
    share = torch.minimum(target[0], draft[0]).sum().item()
    assert len(seconds) / NUM_DRAWS == pytest.approx(share, abs=0.04), "the first draft token is accepted with Σ min(p, q)"
    assert (histogram(seconds, size) - target[1]).abs().max() < 0.04


def test_equal_distributions_accept_every_draft() -> None:
    row = torch.tensor([0.25, 0.5, 0.25])
    for seed in range(50):
        assert len(accept_by_rejection(row.repeat(3, 1), row.repeat(2, 1), [1, 0], seed=seed, position=3).token_ids) == 3


def test_a_row_without_a_distribution_fails_only_if_no_token_precedes_it() -> None:
    row, nothing = torch.tensor([0.0, 1.0]), torch.zeros(2)
    draft = torch.tensor([[0.0, 1.0]])
    assert accept_by_rejection(torch.stack([nothing, row]), draft, [1], seed=1, position=3).error == NOT_FINITE
    assert accept_by_rejection(torch.stack([row, nothing]), draft, [1], seed=1, position=3).token_ids == [1]


@pytest.fixture(scope="module")
def models() -> tuple[Path, Path]:
    """A target model with a small vocabulary, and a draft model that agrees with it at times."""
    large, small = (saved_model("llama", vocab_size=12, num_hidden_layers=layers) for layers in (2, 1))
    return large.directory, small.directory


def speculation(method: str, model: Path | None = None, depth: int = 3) -> dict[str, Any]:
    return {
        "speculative_config": SpeculativeOptions(
            method=method, model=model, num_speculative_tokens=depth, disable_by_batch_size=64, prompt_lookup_min=1
        )
    }


def generate(model: Path, sampling: dict[str, Any], count: int, **options: Any) -> list[list[int]]:
    engine = small_engine(model, max_num_seqs=128, **options)
    requests = [generation_request(str(i), [5, 6, 7] * 3, **{"seed": i, "max_tokens": 3, **sampling}) for i in range(count)]
    events = run_to_end(engine, requests)
    return [tokens(events[str(i)]) for i in range(count)]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.3}, {"temperature": 1.0, "top_k": 4}, {"temperature": 0.8, "top_p": 0.7}],
    ids=str,
)
def test_tokens_with_a_draft_model_have_the_distribution_of_plain_decoding(
    sampling: dict[str, Any], models: tuple[Path, Path]
) -> None:
    count, size = 600, 12
    plain = generate(models[0], sampling, count)
    speculative = generate(models[0], sampling, count, **speculation("draft_model", models[1]))
    assert speculative != plain, "rejection draws other tokens for the same seed"
    for position in range(3):
        ours, theirs = (histogram([answer[position] for answer in answers], size) for answers in (speculative, plain))
        pooled = (ours + theirs) / 2
        statistic = (count / 2 * (ours - theirs).square() / pooled.clamp(min=1e-9)).sum().item()
        freedom = int((pooled > 0).sum()) - 1
        assert statistic < freedom + 4.0 * (2 * freedom) ** 0.5 + 6.0, f"position {position}: χ² is {statistic:.1f}"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8, "logprobs": 2}], ids=str)
@pytest.mark.parametrize("depth", [1, 5])
def test_prompt_lookup_generates_the_tokens_of_plain_decoding(
    sampling: dict[str, Any], depth: int, models: tuple[Path, Path]
) -> None:
    sampling = {"max_tokens": 40, **sampling}
    assert generate(models[0], sampling, 6, **speculation("ngram", depth=depth)) == generate(models[0], sampling, 6)


@pytest.mark.parametrize(
    "options",
    [{}, {"batch_invariant": True}, {"enforce_eager": False}, {"enforce_eager": False, "kv_cache_dtype": "fp8"}],
    ids=str,
)
def test_a_draft_model_generates_the_tokens_of_plain_decoding_where_verification_is_by_equality(
    options: dict[str, Any], models: tuple[Path, Path]
) -> None:
    sampling = {"max_tokens": 30, "temperature": 1.0 if options else 0.0}
    speculative = generate(models[0], sampling, 6, **options, **speculation("draft_model", models[1]))
    assert speculative == generate(models[0], sampling, 6, **options)


def test_only_generated_tokens_are_counted(models: tuple[Path, Path]) -> None:
    engine = small_engine(models[0], **speculation("draft_model", models[0], depth=4))
    events = run_to_end(
        engine, [generation_request(str(i), [5, 6, 7], max_tokens=length) for i, length in enumerate((1, 2, 7, 30))]
    )
    assert [len(tokens(events[str(i)])) for i in range(4)] == [1, 2, 7, 30]
    assert [events[str(i)][-1].num_output_tokens for i in range(4)] == [1, 2, 7, 30]
    status = engine.status()
    assert status.generation_tokens_total == 40
    assert status.accepted_draft_tokens_total == status.draft_tokens_total > 20, "the same model drafts what it would say"
    assert status.steps_total < 15


def test_a_stop_token_among_accepted_drafts_ends_the_answer_there(models: tuple[Path, Path]) -> None:
    plain = generate(models[0], {"max_tokens": 30}, 1)[0]
    end = plain[10]
    sampling = {"max_tokens": 30, "stop_token_ids": [end]}
    speculative = generate(models[0], sampling, 1, **speculation("draft_model", models[0], depth=8))[0]
    assert speculative == plain[: plain.index(end) + 1]
