"""Token events of a request become its output: several answers, best_of, echo, stop strings, log-probabilities, metrics."""

from __future__ import annotations

from typing import Any

import pytest

from engine.offline.completion import Completion, engine_params
from engine.offline.outputs import Logprob, RequestOutput
from engine.protocol import FinishReason, GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from engine.text.tokenizer import Tokenizer
from tests.support.tiny_tokenizer import write_tokenizer

PROMPT = "ab"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer(directory)


def make_completion(tokenizer: Tokenizer | None, *, prompt: str | None = PROMPT, **sampling: Any) -> Completion:
    params = SamplingParams(seed=1, **sampling)
    ids = tokenizer.encode(PROMPT) if tokenizer is not None else [5, 6]
    request = GenerationRequest(request_id="0", tenant_id="alice", prompt_token_ids=ids, sampling=engine_params(params))
    return Completion(request, sampling=params, prompt=prompt, tokenizer=tokenizer, eos_token_ids=[2])


def event(token_ids: list[int], *, index: int = 0, **fields: Any) -> TokenEvent:
    return TokenEvent(
        request_id="0", index=index, token_ids=token_ids, num_output_tokens=0, num_prompt_tokens_computed=2, **fields
    )


def logprob_entries(*logprobs: float) -> list[TokenLogprob]:
    return [TokenLogprob(logprob=value, rank=3, top_token_ids=[7, 8], top_logprobs=[-0.1, -0.2]) for value in logprobs]


def result_after(completion: Completion, *events: TokenEvent) -> RequestOutput:
    for each in events:
        completion.add_event(each)
    assert completion.is_finished
    return completion.result()


def test_events_are_assigned_to_answers_by_index(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, n=2)
    x, y = tokenizer.encode("xy")
    output = result_after(
        completion,
        event([x], index=1),
        event([y], index=0),
        event([x], index=0, finish_reason=FinishReason.LENGTH),
        event([2], index=1, finish_reason=FinishReason.STOP),
    )
    assert [(answer.index, answer.text, answer.finish_reason) for answer in output.outputs] == [
        (0, "yx", "length"),
        (1, "x", "stop"),
    ]
    assert output.outputs[1].token_ids == [x, 2]
    assert output.outputs[1].stop_reason is None


def test_a_request_is_finished_when_its_last_answer_is(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, n=2)
    completion.add_event(event([9], finish_reason=FinishReason.LENGTH))
    assert not completion.is_finished
    completion.add_event(event([9], index=1, finish_reason=FinishReason.LENGTH))
    assert completion.is_finished


def test_best_of_returns_the_answers_with_the_highest_cumulative_logprob_first(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, n=2, best_of=4)
    assert completion.request.sampling.logprobs == 0
    sums = [-3.0, -1.0, -0.5, -2.0]
    events = [
        event([9, 10 + index], index=index, finish_reason=FinishReason.LENGTH, logprobs=logprob_entries(-0.25, total + 0.25))
        for index, total in enumerate(sums)
    ]
    output = result_after(completion, *events)
    assert [(answer.index, answer.token_ids[1]) for answer in output.outputs] == [(0, 12), (1, 11)]
    assert [answer.cumulative_logprob for answer in output.outputs] == [-0.5, -1.0]
    assert output.outputs[0].logprobs is None


def test_best_of_never_returns_a_failed_answer(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, n=1, best_of=2)
    output = result_after(
        completion,
        event([], index=0, finish_reason=FinishReason.ERROR, error="broken"),
        event([9], index=1, finish_reason=FinishReason.LENGTH, logprobs=logprob_entries(-50.0)),
    )
    assert output.outputs[0].error is None


def test_an_error_event_sets_error_and_error_param_of_the_answer(tokenizer: Tokenizer) -> None:
    failed = event([], finish_reason=FinishReason.ERROR, error="no such text", error_param="guided_regex")
    (answer,) = result_after(make_completion(tokenizer, guided_regex="a"), failed).outputs
    assert (answer.finish_reason, answer.error, answer.error_param) == ("error", "no such text", "guided_regex")


def test_logprobs_map_ids_to_logprob_rank_and_text(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, logprobs=2)
    (answer,) = result_after(completion, event([68], finish_reason=FinishReason.LENGTH, logprobs=logprob_entries(-1.5))).outputs
    assert answer.logprobs is not None
    assert list(answer.logprobs[0]) == [68, 7, 8]
    assert answer.logprobs[0][68] == Logprob(-1.5, 3, tokenizer.decode([68]))
    assert [answer.logprobs[0][top].rank for top in (7, 8)] == [1, 2]
    assert answer.cumulative_logprob == -1.5


def test_prompt_logprobs_are_joined_over_events_and_begin_with_none(tokenizer: Tokenizer) -> None:
    completion = make_completion(None, prompt_logprobs=1)
    completion.request.prompt_token_ids.extend([7, 8])
    output = result_after(
        completion,
        event([], prompt_logprobs=logprob_entries(-1.0)),
        event([9], prompt_logprobs=logprob_entries(-2.0, -3.0)),
        event([9], finish_reason=FinishReason.LENGTH),
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    values = [entry[token] for entry, token in zip(output.prompt_logprobs[1:], [6, 7, 8], strict=True) if entry]
    assert [value.logprob for value in values] == [-1.0, -2.0, -3.0]
    assert [sorted(entry) for entry in output.prompt_logprobs[1:] if entry] == [[6, 7], [7], [7, 8]]


def test_echo_prepends_prompt_text_token_ids_and_logprobs(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, echo=True, logprobs=1)
    assert completion.request.sampling.prompt_logprobs == 1
    a, b = tokenizer.encode(PROMPT)
    last = event([a], finish_reason=FinishReason.LENGTH, logprobs=logprob_entries(-1.0), prompt_logprobs=logprob_entries(-4.0))
    output = result_after(completion, last)
    (answer,) = output.outputs
    assert (answer.text, answer.token_ids) == ("aba", [a, b, a])
    assert answer.logprobs is not None
    assert [list(entry) for entry in answer.logprobs] == [[], [b, 7], [a, 7]]
    assert answer.cumulative_logprob == -1.0
    assert output.prompt_logprobs is None


def test_echo_decodes_a_prompt_of_token_ids(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, prompt=None, echo=True)
    assert result_after(completion, event([2], finish_reason=FinishReason.STOP)).outputs[0].text == PROMPT


def test_tokens_behind_a_stop_string_are_dropped(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, stop=["EN"], logprobs=0)
    ids = tokenizer.encode("xENyz")
    assert completion.add_event(event(ids, logprobs=logprob_entries(*[-1.0] * 5))) is True
    (answer,) = completion.result().outputs
    assert (answer.text, answer.token_ids, answer.stop_reason) == ("x", ids[:3], "EN")
    assert (answer.finish_reason, answer.cumulative_logprob) == ("stop", -3.0)
    assert completion.add_event(event(ids)) is False, "an answer that has ended takes no more"


def test_add_token_equals_an_event_with_one_token(tokenizer: Tokenizer) -> None:
    first, second, *others = tokenizer.encode("xaEND")
    one_by_one, by_events = (make_completion(tokenizer, n=2, stop=["EN"]) for _ in range(2))
    for completion in (one_by_one, by_events):
        assert not completion.add_event(event([first], index=1))
        completion.add_event(event([first, 2], index=0, finish_reason=FinishReason.STOP))
    for token_id in (second, *others):
        assert one_by_one.add_token(1, token_id) == by_events.add_event(event([token_id], index=1))
    assert not one_by_one.add_token(1, first), "an answer that has ended takes no more"
    assert one_by_one.is_finished
    assert one_by_one.result().outputs == by_events.result().outputs
    assert one_by_one.result().outputs[1].text == "xa"


def test_text_held_back_for_a_stop_string_is_emitted_when_the_answer_ends_otherwise(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, stop=["END"])
    output = result_after(completion, event(tokenizer.encode("xEN"), finish_reason=FinishReason.LENGTH))
    assert output.outputs[0].text == "xEN"


def test_metrics_are_summed_over_the_answers(tokenizer: Tokenizer) -> None:
    completion = make_completion(tokenizer, n=2)
    output = result_after(
        completion,
        event([9, 9, 9], index=0, finish_reason=FinishReason.LENGTH, num_preemptions=1, queue_s=0.5, num_cached_tokens=1),
        event([9], index=1, finish_reason=FinishReason.LENGTH, num_preemptions=2, num_cached_tokens=2),
    )
    assert (output.metrics.num_preemptions, output.metrics.num_accepted_draft_tokens) == (3, 2)
    assert (output.metrics.queue_s, output.num_cached_tokens) == (0.5, 1)
    assert output.metrics.ttft_s is not None
    assert completion.num_output_tokens == 4


def test_answers_of_a_model_without_tokenizer_have_no_text() -> None:
    (answer,) = result_after(
        make_completion(None, logprobs=0), event([9], finish_reason=FinishReason.LENGTH, logprobs=logprob_entries(-1.0))
    ).outputs
    assert answer.text == ""
    assert answer.logprobs is not None
    assert answer.logprobs[0][9].decoded_token is None
