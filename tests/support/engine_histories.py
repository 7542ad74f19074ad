"""Histories of an engine: requests of every kind with their arrivals and aborts, and their results.

`run_alone` returns the plain CPU runner's result for a request by itself, which every other runner must equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from appliance.serving.event_route import next_token_event
from engine.grammar.matcher import token_trie
from engine.grammar.vocabulary import Vocabulary
from engine.loop import Engine
from engine.protocol import FinishReason, TokenEvent, TokenLogprob
from tests.support.engines import evict_all, generation_request, preempt_all, run_to_end, small_engine
from tests.support.grammars import ImmediateCompiler
from tests.support.tiny_models import EOS, VOCAB_SIZE

MAX_LEN = 64

# Sampling options of requests. Prompts with log-probabilities are computed by the plain runner.
SAMPLING_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "stops": {"ignore_eos": False, "temperature": 1.3, "stop_token_ids": list(range(3, 40, 3))},
    "stops late": {"stop_token_ids": list(range(2, 90)), "min_tokens": 5},
    "biased": {"logit_bias": {7: 9.0, 8: 8.5}},
    "two answers": {"n": 2, "temperature": 0.8},
    "repeats less": {"repetition_penalty": 1.4},
    "penalised": {"presence_penalty": 1.5, "frequency_penalty": 0.7, "temperature": 0.8, "logit_bias": {7: 4.0}},
    "scored": {"logprobs": 1},
    "scored more": {"logprobs": 7, "temperature": 1.0, "repetition_penalty": 1.2, "top_p": 0.9},
    "prompt scored": {"prompt_logprobs": 1, "logprobs": 0},
    "without words": {"bad_words_token_ids": [[5], [6, 7]], "temperature": 1.2},
    "long without end": {"stop_token_ids": list(range(2, 90)), "min_tokens": 5, "temperature": 1.1},
    "guided": {"guided_regex": "[a-d]{2}x?[0-9]*[k-m]"},
    "guided, sampled": {"guided_regex": "([a-z]+ )*", "temperature": 1.3, "presence_penalty": 0.5, "logprobs": 3},
    "typical": {"typical_p": 0.8, "temperature": 1.0},
    "typical of some": {"typical_p": 0.7, "top_p": 0.9, "min_p": 0.01, "temperature": 1.2, "logprobs": 1, "min_tokens": 2},
    "typical, guided": {"typical_p": 0.6, "guided_regex": "([a-z]+ )*", "temperature": 1.3, "logit_bias": {8: 3.0}},
    "typical, penalised": {"typical_p": 0.8, "presence_penalty": 1.5, "temperature": 0.9},
    "typical, without words": {"typical_p": 0.8, "bad_words_token_ids": [[5], [6, 7]], "temperature": 1.0, "top_k": 30},
}
LETTERS = Vocabulary((b"",) * 3 + tuple(bytes([byte]) for byte in range(3, VOCAB_SIZE)), (EOS,))
LETTER_GRAMMARS = ImmediateCompiler(token_trie(LETTERS))


def with_grammars(engine: Engine) -> Engine:
    """The engine, with grammars for its letters."""
    assert engine._grammars is not None
    engine._grammars._compiler = LETTER_GRAMMARS
    return engine


class PlannedRequest(NamedTuple):
    """A request, the step at which it arrives, and the number of steps after which it is aborted, if any."""

    prompt: tuple[int, ...]
    sampling: str
    max_tokens: int
    seed: int
    arrives: int
    aborted_after: int | None

    def submit(self, engine: Engine, name: str) -> list[TokenEvent]:
        options = {"seed": self.seed, "max_tokens": self.max_tokens, **SAMPLING_OPTIONS[self.sampling]}
        options["max_tokens"] = max(self.max_tokens, options.get("min_tokens", 1))
        return engine.submit(generation_request(name, self.prompt, **options))


prompts = st.integers(1, 37).flatmap(
    lambda length: st.sampled_from((3, 50, 90)).map(lambda first: tuple((first + 7 * i) % VOCAB_SIZE for i in range(length)))
)
repetitive_prompts = st.builds(
    lambda first, period, times: tuple(range(first, first + period)) * times,
    *(st.sampled_from(values) for values in ((3, 50), (1, 2, 5), (2, 7))),
)
"""Prompts that repeat themselves, as do the outputs of small models."""
planned_requests, repetitive_requests = (
    st.builds(
        PlannedRequest,
        prompt=of_prompts,
        sampling=st.sampled_from(sorted(SAMPLING_OPTIONS)) | st.sampled_from(("greedy", "sampled", "stops")),
        max_tokens=st.integers(1, tokens_max),
        seed=st.integers(0, 3),
        arrives=st.integers(0, 12),
        aborted_after=st.none() | st.none() | st.integers(0, 12),
    )
    for of_prompts, tokens_max in ((prompts, 24), (repetitive_prompts, 28))
)


class EngineLimits(NamedTuple):
    """Resources of an engine: if scarce, requests wait, are chunked, preempted and swapped."""

    budget: int
    block_size: int
    seats: int
    spare_tokens: int
    caches: bool
    swap_space: float

    @property
    def options(self) -> dict[str, Any]:
        return {
            "max_num_batched_tokens": max(self.budget, self.seats),
            "block_size": self.block_size,
            "max_num_seqs": self.seats,
            "max_model_len": MAX_LEN,
            "num_kv_blocks": (MAX_LEN + self.spare_tokens) // self.block_size,
            "enable_prefix_caching": self.caches,
            "swap_space": self.swap_space,
        }


engine_limits = st.builds(
    EngineLimits,
    budget=st.sampled_from((7, 16, 512)),
    block_size=st.sampled_from((4, 16, 1)),
    seats=st.sampled_from((2, 5, 16)),
    spare_tokens=st.sampled_from((0, 128, 16_000)),
    caches=st.booleans(),
    swap_space=st.sampled_from((0.0, 0.002)),
)


@cache
def run_alone(model: Path, prompt: tuple[int, ...], sampling: str, max_tokens: int, seed: int) -> dict[int, Any]:
    """Results of each answer from the plain runner, as the only request."""
    engine = with_grammars(small_engine(model, max_model_len=MAX_LEN))
    request = PlannedRequest(prompt, sampling, max_tokens, seed, 0, None)
    return answers_by_index(request.submit(engine, "a") + run_to_end(engine, [])["a"])


def answers_by_index(events: list[TokenEvent]) -> dict[int, Any]:
    """By index: tokens, log-probabilities of output and prompt, finish reason, and the counts of the last event."""
    results: dict[int, Any] = {}
    for event in events:
        tokens, (own, prompt), *_ = results.get(event.index, ([], ([], [])))
        scored = own + (event.logprobs or []), prompt + (event.prompt_logprobs or [])
        counts = event.num_output_tokens, event.num_prompt_tokens_computed
        results[event.index] = tokens + event.token_ids, scored, event.finish_reason, counts
    return results


def assert_same_scores(results: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    """Compare log-probabilities; in a batch, a request's logits may differ in the last bits."""
    assert len(results) == len(expected)
    for one, other in zip(results, expected, strict=True):
        assert (one.rank, one.top_token_ids) == (other.rank, other.top_token_ids)
        numbers = [other.logprob, *other.top_logprobs]
        assert [one.logprob, *one.top_logprobs] == pytest.approx(numbers, rel=1e-4, abs=1e-5)


def run_history(engine: Engine, requests: list[PlannedRequest], *, preempt_at: int | None) -> list[dict[int, Any]]:
    """Run the requests; return their results as the gateway reconstructs them."""
    events: dict[str, list[TokenEvent]] = {str(index): [] for index in range(len(requests))}
    step = 0
    while engine.has_requests or step <= max(each.arrives for each in requests):
        for index, each in enumerate(requests):
            if each.arrives == step:
                events[str(index)] += each.submit(engine, str(index))
            if each.aborted_after is not None and each.arrives + each.aborted_after + 1 == step:
                events[str(index)] += engine.abort(str(index))
        if step == preempt_at:
            preempt_all(engine)
            evict_all(engine)
        outputs = engine.step_in_columns()
        for event in outputs.others:
            events[event.request_id].append(event)
        for (request_id, index, token_id), expected in zip(
            outputs.decoded, outputs.as_events()[len(outputs.others) :], strict=True
        ):
            last = next(event for event in reversed(events[request_id]) if event.index == index)
            gateway_event = next_token_event(last, token_id)
            events[request_id].append(gateway_event)
            assert gateway_event == replace(expected, num_preemptions=gateway_event.num_preemptions), (
                "the gateway would hear something else"
            )
        engine.check_invariants()
        step += 1
    assert engine.status().kv_blocks_used == 0, "blocks were lost"
    return [answers_by_index(events[str(index)]) for index in range(len(requests))]


def assert_as_alone(model: Path, requests: Sequence[PlannedRequest], results_of: Sequence[dict[int, Any]]) -> None:
    """Assert that each request has the same result as alone; an aborted one, the beginning of it."""
    for results, each in zip(results_of, requests, strict=True):
        expected = run_alone(model, *each[:4])
        for index, (tokens, scored, reason, counts) in results.items():
            for some, all_of_them in zip(scored, expected[index][1], strict=True):
                assert_same_scores(some, all_of_them[: len(some)])
            if reason is FinishReason.ABORTED:
                assert tokens == expected[index][0][: len(tokens)], "an aborted answer had begun otherwise"
                assert counts[0] == len(tokens)
            else:
                assert tokens == expected[index][0]
                assert [len(each) for each in scored] == [len(each) for each in expected[index][1]]
                assert (reason, counts) == expected[index][2:]
        assert results.keys() == expected.keys()
