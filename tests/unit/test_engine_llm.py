"""`LLM`, the offline entry point: options, prompts, outputs, errors and interrupts."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from engine import LLM, SamplingParams
from engine.errors import EngineBroken, EngineConfigError, EngineError, PromptError
from engine.grammar.compile_queue import CompileQueue
from engine.offline.gc_thresholds import OLDER_PER_FULL
from engine.options import LIMITS, EngineOptions
from engine.scheduling.token_events import StepEvents
from tests.support.tiny_models import greedy, saved_model, saved_text_model

SMALL: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 1_000_000, "threads": 1}
DOCUMENTED_DEFAULTS: dict[str, Any] = {
    "dtype": "auto",
    "device": "auto",
    "max_model_len": None,
    "max_num_seqs": 256,
    "max_num_batched_tokens": None,
    "block_size": 16,
    "num_gpu_blocks_override": None,
    "gpu_memory_utilization": 0.9,
    "swap_space": 0,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "speculative_config": None,
    "tensor_parallel_size": 1,
    "enforce_eager": False,
    "seed": 0,
}
"""Parameters of `LLM` that scripts rely on, with their defaults."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Path:
    return saved_text_model()


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(model, **SMALL)


def test_options_have_the_documented_defaults() -> None:
    parameters = inspect.signature(LLM).parameters
    assert {name: parameters[name].default for name in DOCUMENTED_DEFAULTS} == DOCUMENTED_DEFAULTS


def test_every_engine_option_is_a_parameter_of_llm_with_the_same_default() -> None:
    parameters = inspect.signature(LLM).parameters
    assert LIMITS.keys() - parameters.keys() == {"name", "num_kv_blocks", "colocated_models"}
    options = {field.name: field.default for field in dataclasses.fields(EngineOptions) if field.name in parameters}
    own = {name: parameters[name].default for name in options}
    assert {name for name in options if own[name] != options[name]} == {"model", "max_num_seqs"}


def test_greedy_tokens_of_token_id_prompts_are_those_of_transformers() -> None:
    directory, reference = saved_model("llama")
    prompts = [[5, 6, 7], [8], list(range(10, 40))]
    outputs = LLM(directory, **SMALL).generate(prompts, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [greedy(reference, prompt, 8) for prompt in prompts]
    assert [output.prompt_token_ids for output in outputs] == prompts


def test_a_text_a_list_of_texts_token_ids_and_a_mapping_are_accepted_as_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("hello")
    answers = [llm.generate(prompt, GREEDY) for prompt in ("hello", ["hello"], ids, [ids], {"prompt_token_ids": ids})]
    assert all(len(answer) == 1 for answer in answers)
    assert len({tuple(answer[0].outputs[0].token_ids) for answer in answers}) == 1
    assert answers[0][0].prompt == "hello"
    assert answers[0][0].outputs[0].text == llm.tokenizer.decode(answers[0][0].outputs[0].token_ids)


def test_each_prompt_may_have_its_own_sampling_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 3)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(["a", "b"], params)] == [1, 3]
    with pytest.raises(PromptError, match="2 sampling_params were given for 1 prompts"):
        llm.generate("a", params)


def test_sampling_repeats_for_the_same_request_seed_and_for_the_same_llm_seed(model: Path) -> None:
    seeded = SamplingParams(max_tokens=12, seed=3, ignore_eos=True)
    unseeded = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = []
    for seed in (1, 1, 2):
        llm = LLM(model, seed=seed, **SMALL)
        runs.append([llm.generate("x", params)[0].outputs[0].token_ids for params in (seeded, unseeded)])
    assert runs[0] == runs[1]
    assert runs[0][0] == runs[2][0]
    assert runs[0][1] != runs[2][1]


def test_a_stop_string_cuts_the_text_before_itself_and_ends_the_answer(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole = llm.generate("abc", params)[0].outputs[0]
    printable = next(i for i in range(4, len(whole.text)) if "\ufffd" not in whole.text[i : i + 2])
    stop = whole.text[printable : printable + 2]
    output = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=[stop, "never there"]))[0]
    assert output.outputs[0].text == whole.text[: whole.text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert len(output.outputs[0].token_ids) < 40


def test_a_stop_token_is_in_the_token_ids_but_not_in_the_text(llm: LLM) -> None:
    first = llm.generate("abc", GREEDY)[0].outputs[0].token_ids[0]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop_token_ids=[first])
    (output,) = llm.generate("abc", params)[0].outputs
    assert (output.token_ids, output.text, output.finish_reason, output.stop_reason) == ([first], "", "stop", first)


def test_logprobs_contain_the_sampled_token_and_the_most_likely_ones(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
    (output,) = llm.generate("abc", params)[0].outputs
    assert output.logprobs is not None
    assert [next(iter(entry)) for entry in output.logprobs] == output.token_ids
    assert all(len(entry) == 2 for entry in output.logprobs)
    best = [entry[token_id] for entry, token_id in zip(output.logprobs, output.token_ids, strict=True)]
    assert [entry.rank for entry in best] == [1, 1, 1]
    assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in best))


def test_chat_renders_the_chat_template_of_the_model(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    single, double = llm.chat(conversation, GREEDY), llm.chat([conversation, conversation], GREEDY)
    assert single[0].prompt == "<s>user: hi\nassistant: "
    assert single[0].prompt_token_ids[0] == 1
    assert [output.outputs[0].token_ids for output in double] == [single[0].outputs[0].token_ids] * 2


def test_a_repeated_prompt_reports_cached_tokens_unless_caching_is_disabled(model: Path) -> None:
    prompt = list(range(3, 43))
    with LLM(model, **SMALL) as llm:
        outputs = [llm.generate([prompt], GREEDY)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 32]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids
    with LLM(model, enable_prefix_caching=False, **SMALL) as llm:
        assert [llm.generate([prompt], GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 0]


def test_a_prompt_that_is_too_long_is_refused_before_any_prompt_runs(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"prompt 1: the prompt has 256 tokens; at most 255 fit"):
        llm.generate([[5], [5] * 256], GREEDY)
    assert len(llm.generate([[5]], GREEDY)) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "awq"},
        {"tensor_parallel_size": 2},
        {"speculative_config": {"method": "eagle"}},
        {"swap_space": -1},
        {"swap_space": "4"},
        {"batch_invariant": 1},
        {"scheduling_policy": "lifo"},
        {"inter_token_target_ms": 0},
        {"kv_cache_dtype": "int4"},
        {"quantization": "int5"},
        {"enable_chunked_prefill": False},
        {"dtype": "int8"},
        {"device": "tpu"},
        {"max_model_len": "256"},
        {"max_num_seqs": 1.5},
        {"max_num_batched_tokens": True},
        {"block_size": None},
        {"num_gpu_blocks_override": 0},
        {"num_gpu_blocks_override": "8"},
        {"gpu_memory_utilization": "all"},
        {"gpu_memory_utilization": float("nan")},
        {"enable_prefix_caching": 1},
        {"enforce_eager": "no"},
        {"seed": "x"},
        {"shared_prefixes": "file"},
        {"shared_prefixes": [None]},
    ],
    ids=str,
)
def test_an_invalid_option_is_named_in_the_error(options: dict[str, Any], model: Path) -> None:
    with pytest.raises(EngineConfigError, match=next(iter(options))):
        LLM(model, **options)


def test_an_unknown_option_is_named_in_the_error(model: Path) -> None:
    unknown: dict[str, Any] = {"disable_log_stats": True}
    with pytest.raises(EngineConfigError, match="disable_log_stats is not an option") as refused:
        LLM(model, **unknown)
    assert refused.value.option == "disable_log_stats"


@pytest.mark.parametrize("model_path", [None, 5, ["a"]])
def test_a_model_that_is_not_a_path_is_refused(model_path: Any) -> None:
    with pytest.raises(EngineConfigError, match="model must be a path"):
        LLM(model_path)


def test_bad_words_are_not_generated(llm: LLM) -> None:
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    (plain,) = llm.generate("abc", SamplingParams(**params))[0].outputs
    letters = [letter for letter in plain.text if letter.isascii() and letter.isprintable() and letter != " "]
    assert letters, "this model writes no letter that could be forbidden"
    (output,) = llm.generate("abc", SamplingParams(**params, bad_words=[letters[0]]))[0].outputs
    assert letters[0] not in output.text
    assert len(output.token_ids) == 12


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guided_answers_follow_their_schema_regex_choice_or_grammar(llm: LLM, temperature: float) -> None:
    forms: list[dict[str, Any]] = [
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "[a-c]{3}-[0-9]"},
        {"guided_json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
                         "additionalProperties": False}},
        {"guided_grammar": 'start: "x" "y"+ "z"'},
    ]  # fmt: skip
    params = [SamplingParams(seed=3, temperature=temperature, max_tokens=200, **form) for form in forms]
    texts = [output.outputs[0].text for output in llm.generate(["abc"] * 4, params)]
    assert texts[0] in ("yes", "no")
    assert re.fullmatch("[a-c]{3}-[0-9]", texts[1])
    assert json.loads(texts[2])["a"] in (1, 2)
    assert re.match("xy", texts[3])


def test_one_call_may_have_more_grammars_than_the_compile_queue_holds(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = CompileQueue.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "waiting_max", 1)
    choices = [f"choice {index}" for index in range(8)]
    params = [SamplingParams(max_tokens=20, guided_choice=[choice]) for choice in choices]
    with LLM(model, **SMALL) as llm:
        outputs = llm.generate(["abc"] * len(choices), params)
    assert [output.outputs[0].text for output in outputs] == choices


def test_each_of_several_answers_has_its_own_text_stop_and_finish_reason(llm: LLM) -> None:
    params: dict[str, Any] = {"n": 4, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    whole = [answer.text for answer in llm.generate("abc", SamplingParams(**params))[0].outputs]
    assert len(set(whole)) == 4
    stop = next(letter for letter in whole[0] if letter.isascii() and letter.isprintable())
    outputs = llm.generate("abc", SamplingParams(**params, stop=[stop]))[0].outputs
    for answer, text in zip(outputs, whole, strict=True):
        assert answer.text == text.split(stop)[0]
        assert (answer.finish_reason, answer.stop_reason) == (("stop", stop) if stop in text else ("length", None))


@pytest.mark.parametrize(("threshold", "during_call"), [(10, OLDER_PER_FULL), (OLDER_PER_FULL + 1, OLDER_PER_FULL + 1)])
def test_full_garbage_collections_are_rarer_during_a_call_and_the_threshold_is_restored(
    threshold: int, during_call: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, thresholds_seen = llm._generating_engine(), set[int]()
    step, (young, older, before) = engine.step_in_columns, gc.get_threshold()

    def recording_step() -> StepEvents:
        thresholds_seen.add(gc.get_threshold()[2])
        return step()

    monkeypatch.setattr(engine, "step_in_columns", recording_step)
    gc.set_threshold(young, older, threshold)
    try:
        llm.generate([[1, 2, 3]], GREEDY)
        with pytest.raises(PromptError):
            llm.generate([[]], GREEDY)
        assert gc.get_threshold() == (young, older, threshold)
    finally:
        gc.set_threshold(young, older, before)
    assert thresholds_seen == {during_call}


def test_an_interrupted_call_aborts_its_requests_and_llm_stays_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    engine = llm._engine
    assert engine is not None
    steps = iter([engine.step_in_columns, engine.step_in_columns])

    def interrupted() -> Any:
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(engine, "step_in_columns", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "def"], SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    assert not engine.has_requests
    engine.check_invariants()
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == before


def test_an_interrupt_during_a_step_is_raised_when_the_step_has_ended(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    engine = llm._engine
    assert engine is not None
    run, handler = engine.runner.run, signal.getsignal(signal.SIGINT)
    finished: list[int] = []

    def interrupted(items: Any) -> Any:
        if len(finished) == 2:
            signal.raise_signal(signal.SIGINT)
        outputs = run(items)
        finished.append(len(items))
        return outputs

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "def"], SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    assert finished == [2, 6, 6], "the step was not computed to its end, or others behind it were"
    assert signal.getsignal(signal.SIGINT) is handler
    engine.check_invariants()
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == before


def test_a_second_interrupt_ends_the_step_at_once_and_llm_stays_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = llm.generate("abc", GREEDY)[0].outputs[0].token_ids
    engine = llm._engine
    assert engine is not None
    runs = iter([engine.runner.run, engine.runner.run])

    def interrupted(items: Any) -> Any:
        run = next(runs, None)
        if run is not None:
            return run(items)
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["abc", "def"], SamplingParams(n=3, max_tokens=50, ignore_eos=True))
    engine.check_invariants()
    assert llm.generate("abc", GREEDY)[0].outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("method", "error", "message"),
    [
        ("step_in_columns", EngineBroken("blocks cannot be moved"), "must be created anew: blocks cannot be moved"),
        ("abort_all", AssertionError("a block was lost"), "KeyboardInterrupt came within a step, .*: a block was lost"),
    ],
)
def test_a_broken_engine_refuses_further_calls(
    method: str, error: Exception, message: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, **SMALL)
    assert llm._engine is not None
    with monkeypatch.context() as patched:
        patched.setattr(llm._engine, "step_in_columns", Mock(side_effect=KeyboardInterrupt))
        patched.setattr(llm._engine, method, Mock(side_effect=error))
        with pytest.raises((EngineBroken, KeyboardInterrupt)):
            llm.generate("abc", GREEDY)
    with pytest.raises(EngineBroken, match=message):
        llm.generate("abc", GREEDY)


def test_metrics_report_accepted_draft_tokens(model: Path) -> None:
    with LLM(model, **SMALL, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        (output,) = llm.generate([[5, 6, 7] * 20], SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True))
        accepted = llm.status().accepted_draft_tokens_total
    assert output.metrics.num_accepted_draft_tokens == accepted > 0


def test_a_closed_llm_refuses_work(model: Path) -> None:
    llm = LLM(model, **SMALL)
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate("a", GREEDY)
    with pytest.raises(EngineError, match="closed"):
        llm.embed("a")


@pytest.mark.parametrize(
    "module", ["engine", "engine.protocol", "engine.transport", "engine.text.tokenizer", "engine.text.chat_template"]
)
def test_modules_that_the_gateway_imports_do_not_import_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2]).returncode == 0
