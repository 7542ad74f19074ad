"""Bad input gets a typed error that names the field, without affecting concurrent requests."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import PromptError
from engine.loop import Engine
from engine.offline.outputs import GenerationFailed
from engine.protocol import FinishReason, GenerationRequest, InvalidOption, Priority, TokenEvent
from engine.text.tokenizer import Tokenizer
from tests.support.engines import KV_CACHE_BYTES, generation_request, run_to_end, small_engine, tokens
from tests.support.tiny_models import saved_text_model
from tests.support.tiny_tokenizer import VOCAB_SIZE

CONTEXT = 256
NEIGHBOURS = {"x": [5, 6, 7], "y": list(range(20, 60)), "z": [9] * 17}
IMPOSSIBLE: dict[str, Any] = {"type": "string", "enum": [1, 2]}

# fields of the request or of its sampling parameters, and the field that the error names
REFUSED_BY_ENGINE: list[tuple[dict[str, Any], str]] = [
    ({"prompt_token_ids": []}, "prompt_token_ids"),
    ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
    ({"prompt_token_ids": [5, VOCAB_SIZE]}, "prompt_token_ids"),
    ({"prompt_token_ids": [2**70]}, "prompt_token_ids"),
    ({"prompt_token_ids": [True, 5]}, "prompt_token_ids"),
    ({"prompt_token_ids": [5.0]}, "prompt_token_ids"),
    ({"prompt_token_ids": [math.nan]}, "prompt_token_ids"),
    ({"prompt_token_ids": [None]}, "prompt_token_ids"),
    ({"prompt_token_ids": ["a"]}, "prompt_token_ids"),
    ({"prompt_token_ids": None}, "prompt_token_ids"),
    ({"prompt_token_ids": "text"}, "prompt_token_ids"),
    ({"prompt_token_ids": [5] * CONTEXT}, "prompt_token_ids"),
    ({"sampling": {"seed": None}}, "seed"),
    ({"sampling": {"stop_token_ids": [VOCAB_SIZE]}}, "stop_token_ids"),
    ({"sampling": {"logit_bias": {VOCAB_SIZE: 1.0}}}, "logit_bias"),
    ({"sampling": {"bad_words_token_ids": [[5], [6, VOCAB_SIZE]]}}, "bad_words_token_ids"),
    ({"sampling": {"bad_words": ["no ids beside it"]}}, "bad_words"),
    ({"weight": 0}, "weight"),
    ({"weight": 10**9}, "weight"),
    ({"weight": 1.5}, "weight"),
    ({"weight": True}, "weight"),
    ({"priority": "urgent"}, "priority"),
    ({"queue_deadline_s": -1.0}, "queue_deadline_s"),
    ({"queue_deadline_s": math.nan}, "queue_deadline_s"),
    ({"queue_deadline_s": "soon"}, "queue_deadline_s"),
    ({"request_id": "x"}, "request_id"),
    ({"sampling": {"guided_json": "{"}}, "guided_json"),
    ({"sampling": {"guided_json": "[]"}}, "guided_json"),
    ({"sampling": {"guided_json": "false"}}, "guided_json"),
    ({"sampling": {"guided_json": IMPOSSIBLE}}, "guided_json"),
    ({"sampling": {"guided_json": {"type": "no such type"}}}, "guided_json"),
    ({"sampling": {"guided_json": {"$ref": "#/nowhere"}}}, "guided_json"),
    ({"sampling": {"guided_regex": "("}}, "guided_regex"),
    ({"sampling": {"guided_regex": "[z-a]"}}, "guided_regex"),
    ({"sampling": {"guided_grammar": "start: nowhere"}}, "guided_grammar"),
]

# sampling parameters refused when they are constructed or when `LLM` submits them, and the field that the error names
REFUSED_BY_LLM: list[tuple[dict[str, Any], str]] = [
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": None}, "temperature"),
    ({"top_k": 1.5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"best_of": -1}, "best_of"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 10**12}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"seed": -1}, "seed"),
    ({"logprobs": 1000}, "logprobs"),
    ({"stop": ["x" * 10_000_000]}, "stop"),
    ({"stop": ["x"] * 1_000_000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"logit_bias": {VOCAB_SIZE + 5: 1.0}}, "logit_bias"),
    ({"logit_bias": {5: math.inf}}, "logit_bias"),
    ({"bad_words": ["x" * 10_000_000]}, "bad_words"),
    ({"bad_words": ["fine", "\ud800"]}, "bad_words"),
    ({"stop": ["\udfff"]}, "stop"),
    ({"guided_json": IMPOSSIBLE}, "guided_json"),
    ({"guided_json": {"pattern": "("}}, "guided_json"),
    ({"guided_regex": "x" * 10_000_000}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["a", ""]}, "guided_choice"),
]

BAD_PROMPTS: list[tuple[Any, str]] = [
    ([[]], "prompt 0: the prompt is empty"),
    (["fine", ""], "prompt 1: the prompt is empty"),
    ([{"prompt": ""}], "prompt 0: the prompt is empty"),
    (["fine", "a\ud800"], "prompt 1: the text holds half of a surrogate pair"),
    (["fine", "x" * 10_000_000], "prompt 1: the prompt has 10000000 characters and so at least"),
    ([[5], [VOCAB_SIZE]], "prompt 1: the prompt has token ids outside"),
    ([[5], [-1]], "prompt 1: the prompt has token ids outside"),
    ([[5], [5, True]], "prompt 1: the prompt has token ids that are not integers: bool"),
    ([[5], [5.5]], "prompt 1: the prompt has token ids that are not integers: float"),
    ([5.5], "prompt 0: the prompt has token ids that are not integers: float"),
    ([[5], None], "prompt 1: a prompt must be text or token ids, not NoneType"),
    (None, "prompts must be text"),
    ([[5], [5] * CONTEXT], "prompt 1: the prompt has 256 tokens; at most 255 fit"),
    (["fine", "x" * 10_000], "prompt 1: the prompt has 10000 characters and so at least 500 tokens"),
    ([{"prompt": "a", "image": 1}], "prompt 0: a prompt has unknown fields: image"),
]


@pytest.fixture(scope="module")
def model() -> Path:
    return saved_text_model()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    made = small_engine(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, device="cpu", kv_cache_bytes=KV_CACHE_BYTES, threads=1, max_num_seqs=16) as made:
        yield made


def neighbour_requests() -> list[GenerationRequest]:
    return [generation_request(name, prompt, max_tokens=20, temperature=0.7, seed=4) for name, prompt in NEIGHBOURS.items()]


def bad_request(changes: dict[str, Any]) -> GenerationRequest:
    params: dict[str, Any] = {"temperature": 0.0, "seed": 1, "max_tokens": 4, **changes.get("sampling", {})}
    fields = {
        "request_id": "bad", "tenant_id": "bob", "prompt_token_ids": [5], **changes, "sampling": SamplingParams(**params),
    }  # fmt: skip
    return GenerationRequest(**fields)


@pytest.fixture(scope="module")
def undisturbed_tokens(engine: Engine) -> dict[str, list[int]]:
    return {name: tokens(events) for name, events in run_to_end(engine, neighbour_requests()).items()}


@pytest.mark.parametrize(("changes", "param"), REFUSED_BY_ENGINE, ids=lambda value: str(value)[:50])
def test_an_invalid_request_is_refused_by_field_and_concurrent_requests_are_unaffected(
    engine: Engine, undisturbed_tokens: dict[str, list[int]], changes: dict[str, Any], param: str
) -> None:
    for request in neighbour_requests():
        assert engine.submit(request) == []
    events = engine.step() + engine.step()
    rejected = engine.submit(bad_request(changes))
    for request_id, more in run_to_end(engine, []).items():
        (events if request_id in NEIGHBOURS else rejected).extend(more)
    assert [event.error_param for event in rejected] == [param]
    assert [event.finish_reason for event in rejected] == [FinishReason.ERROR]
    assert rejected[0].error
    assert len(rejected[0].error) < 1000
    assert {name: tokens(events_of(events, name)) for name in NEIGHBOURS} == undisturbed_tokens


def events_of(events: list[TokenEvent], name: str) -> list[TokenEvent]:
    return [event for event in events if event.request_id == name]


def test_requests_exactly_at_the_limits_are_accepted(engine: Engine) -> None:
    request = GenerationRequest(
        request_id="fine", tenant_id="bob", prompt_token_ids=[VOCAB_SIZE - 1] * (CONTEXT - 1), weight=1000,
        priority=Priority.BATCH, queue_deadline_s=3600.0,
        sampling=SamplingParams(seed=0, max_tokens=2**31 - 1, logit_bias={VOCAB_SIZE - 1: 1.0}, stop_token_ids=[0]),
    )  # fmt: skip
    events = run_to_end(engine, [request])["fine"]
    assert len(tokens(events)) == 1
    assert events[-1].error is None


@pytest.mark.parametrize(("sampling", "param"), REFUSED_BY_LLM, ids=lambda value: str(value)[:50])
def test_invalid_sampling_parameters_raise_an_error_that_names_the_field_and_llm_stays_usable(
    llm: LLM, sampling: dict[str, Any], param: str
) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    before = [output.outputs[0].token_ids for output in llm.generate(list(NEIGHBOURS.values()), greedy, use_tqdm=False)]
    with pytest.raises(InvalidOption) as refused:
        llm.generate(["a", "b"], [greedy, SamplingParams(**sampling)], use_tqdm=False)
    assert refused.value.param == param
    assert {"guided_json": "the schema"}.get(param, param) in str(refused.value)
    after = [output.outputs[0].token_ids for output in llm.generate(list(NEIGHBOURS.values()), greedy, use_tqdm=False)]
    assert after == before


@pytest.mark.parametrize(("prompts", "message"), BAD_PROMPTS, ids=lambda value: str(value)[:50])
def test_an_invalid_prompt_raises_an_error_that_names_its_index_and_llm_stays_usable(
    llm: LLM, prompts: Any, message: str
) -> None:
    with pytest.raises(PromptError) as refused:
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    assert str(refused.value).startswith(message)
    assert len(llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)) == 1


def test_an_error_found_after_submission_comes_with_the_outputs_of_the_other_prompts(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    bad = SamplingParams(guided_json=IMPOSSIBLE)
    with pytest.raises(GenerationFailed, match="prompt 1: the schema cannot be satisfied") as failed:
        llm.generate([[5], [6], [7]], [greedy, bad, greedy], use_tqdm=False)
    first, second, third = (output.outputs[0] for output in failed.value.outputs)
    assert (len(first.token_ids), second.finish_reason, len(third.token_ids)) == (6, "error", 6)
    assert [second.error_param, second.token_ids] == ["guided_json", []]


def test_integer_sampling_parameters_equal_their_float_values(llm: LLM) -> None:
    params = [
        SamplingParams(temperature=number(1), top_p=number(1), presence_penalty=number(1), logit_bias={5: number(-100)}, seed=3)
        for number in (int, float)
    ]
    first, second = (output.outputs[0] for output in llm.generate([[5, 6], [5, 6]], params, use_tqdm=False))
    assert first.token_ids == second.token_ids
    assert 5 not in first.token_ids
    assert [type(value) for value in (params[0].temperature, *(params[0].logit_bias or {}).values())] == [float, float]


def test_a_text_that_exceeds_the_context_by_its_length_alone_is_refused_without_tokenising(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(_: object, text: str, **__: object) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenised")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with pytest.raises(PromptError, match=r"prompt 0: .* 5000000 characters .* at most 255 tokens fit the context"):
        llm.generate("x" * 5_000_000, SamplingParams(max_tokens=1), use_tqdm=False)


def test_an_empty_text_is_refused_even_if_the_tokenizer_adds_a_first_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *_, **__: [1])
    with pytest.raises(PromptError, match="prompt 0: the prompt is empty"):
        llm.generate("", SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_lone_surrogate_in_a_text_to_embed_is_refused(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"text 1: .* half of a surrogate pair"):
        llm.embed(["fine", "\ud800"], use_tqdm=False)


def test_an_empty_list_of_prompts_returns_no_outputs(llm: LLM) -> None:
    assert llm.generate([], SamplingParams()) == []
