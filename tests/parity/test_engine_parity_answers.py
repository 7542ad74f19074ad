"""Tokens and log-probabilities of prompts and outputs equal those of transformers, for one answer and for several."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from engine.offline.outputs import Logprob, RequestOutput
from tests.support.engines import KV_CACHE_BYTES, generation_request, run_to_end, small_engine
from tests.support.parity import LOGPROB_TOLERANCE
from tests.support.tiny_models import VOCAB_SIZE, greedy, saved_model

TOP = 5
MAX_TOKENS = 12
LENGTHS = (1, 2, 15, 16, 17, 33, 70)
FAMILIES = ("llama", "gemma2", "qwen3", "mistral-window")


def make_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


class ReferenceModel:
    def __init__(self, family: str) -> None:
        self.directory, self.model = saved_model(family)

    def llm(self, **options: Any) -> LLM:
        return LLM(self.directory, device="cpu", threads=1, **{"kv_cache_bytes": KV_CACHE_BYTES, "max_num_seqs": 16, **options})

    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probabilities of all tokens at each position after the first: [len(token_ids) - 1, V]"""
        with torch.inference_mode():
            logits: torch.Tensor = self.model(torch.tensor([token_ids])).logits[0, :-1]
        return logits.double().log_softmax(-1)


@pytest.fixture(scope="module")
def llama() -> ReferenceModel:
    return ReferenceModel("llama")


def assert_entries(entries: list[dict[int, Logprob]], token_ids: list[int], expected: torch.Tensor) -> None:
    """Each entry holds its own token first, with the probability and rank of `expected`, and the TOP likeliest."""
    assert len(entries) == len(token_ids) == len(expected)
    for entry, token_id, row in zip(entries, token_ids, expected, strict=True):
        top = row.topk(TOP)
        assert next(iter(entry)) == token_id
        assert set(entry) == {token_id, *top.indices.tolist()}
        for key, value in entry.items():
            assert value.logprob == pytest.approx(row[key].item(), abs=LOGPROB_TOLERANCE)
            assert value.rank == 1 + int((row > row[key]).sum())


def assert_output(case: ReferenceModel, output: RequestOutput) -> None:
    prompt = output.prompt_token_ids
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    in_prompt = [entry for entry in output.prompt_logprobs[1:] if entry is not None]
    assert_entries(in_prompt, prompt[1:], case.logprobs([*prompt, 0])[: len(prompt) - 1])
    for answer in output.outputs:
        assert answer.logprobs is not None
        assert_entries(answer.logprobs, answer.token_ids, case.logprobs(prompt + answer.token_ids)[len(prompt) - 1 :])
        own = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(own))


SCORED = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_mixed_lengths_in_one_batch_equal_transformers(family: str) -> None:
    case = ReferenceModel(family)
    with case.llm() as llm:
        for output in llm.generate(make_prompts(), SCORED, use_tqdm=False):
            assert_output(case, output)


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 4, "max_num_batched_tokens": 7},
        {"max_num_seqs": 1},
        {"num_gpu_blocks_override": 8, "max_model_len": 100, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 8, "max_model_len": 100, "swap_space": 0.001},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    ],
    ids=["chunks", "alone", "recomputed", "swapped", "speculative"],
)
def test_chunked_preempted_swapped_and_drafted_prompts_equal_transformers(
    llama: ReferenceModel, options: dict[str, Any]
) -> None:
    with llama.llm(**options) as llm:
        for output in llm.generate(make_prompts(), SCORED, use_tqdm=False):
            assert_output(llama, output)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_prompt_preempted_within_its_chunks_is_scored_once(llama: ReferenceModel, num_steps: int) -> None:
    (prompt,) = make_prompts((70,))
    engine = small_engine(llama.directory, max_num_seqs=4, max_num_batched_tokens=20)
    assert engine.submit(generation_request("a", prompt, max_tokens=2, prompt_logprobs=TOP)) == []
    events = [event for _ in range(num_steps) for event in engine.step()]
    engine._scheduler.preempt(*engine._scheduler.running)
    events += run_to_end(engine, [])["a"]
    entries = [entry for event in events for entry in event.prompt_logprobs or []]
    expected = llama.logprobs([*prompt, 0])[torch.arange(69), torch.tensor(prompt[1:])]
    found = torch.tensor([entry.logprob for entry in entries], dtype=torch.float64)
    torch.testing.assert_close(found, expected[: len(prompt) - 1], rtol=0, atol=LOGPROB_TOLERANCE)


def test_a_cached_prefix_is_recomputed_if_its_logprobs_are_requested(llama: ReferenceModel) -> None:
    prompt = make_prompts((70,))
    with llama.llm() as llm:
        llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        (output,) = llm.generate(prompt, SCORED, use_tqdm=False)
        (plain,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
    assert_output(llama, output)
    assert plain.num_cached_tokens == 64


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}], ids=str)
def test_each_of_several_greedy_answers_equals_transformers(llama: ReferenceModel, options: dict[str, Any]) -> None:
    prompts = make_prompts((1, 17, 32, 70))
    params = SamplingParams(n=4, temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP)
    with llama.llm(**options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert [answer.token_ids for answer in output.outputs] == [greedy(llama.model, prompt, MAX_TOKENS)] * 4
        assert_output(llama, output)


def test_a_sampled_answer_does_not_depend_on_the_number_of_answers(llama: ReferenceModel) -> None:
    def answers(n: int, prompts: list[list[int]]) -> list[list[list[int]]]:
        params = SamplingParams(n=n, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP)
        with llama.llm() as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        for output in outputs:
            assert_output(llama, output)
        return [[answer.token_ids for answer in output.outputs] for output in outputs]

    prompts = make_prompts((17, 5, 40))
    four, two, alone = answers(4, prompts), answers(2, prompts), answers(4, prompts[:1])
    assert len({tuple(tokens) for tokens in four[0]}) == 4
    assert [each[:2] for each in four] == two
    assert alone[0] == four[0]


def test_best_of_returns_the_answers_with_the_highest_cumulative_logprob(llama: ReferenceModel) -> None:
    common: dict[str, Any] = {"seed": 11, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    prompts = make_prompts((17, 5))
    with llama.llm() as llm:
        all_answers = llm.generate(prompts, SamplingParams(n=6, logprobs=0, **common), use_tqdm=False)
        best = llm.generate(prompts, SamplingParams(n=2, best_of=6, **common), use_tqdm=False)
    for everything, chosen in zip(all_answers, best, strict=True):
        ranked = sorted(everything.outputs, key=lambda answer: -(answer.cumulative_logprob or 0.0))
        assert [answer.token_ids for answer in chosen.outputs] == [answer.token_ids for answer in ranked[:2]]
        assert [answer.index for answer in chosen.outputs] == [0, 1]
        assert [answer.logprobs for answer in chosen.outputs] == [None, None]


def test_echo_returns_the_prompt_with_its_logprobs(llama: ReferenceModel) -> None:
    (prompt,) = make_prompts((17,))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, echo=True, logprobs=TOP)
    with llama.llm() as llm:
        ((answer,),) = (output.outputs for output in llm.generate([prompt], params, use_tqdm=False))
    assert answer.token_ids[:-3] == prompt
    assert answer.logprobs is not None
    assert answer.logprobs[0] == {}
    assert_entries(answer.logprobs[1:], answer.token_ids[1:], llama.logprobs(answer.token_ids))


def test_a_prompt_with_several_answers_is_computed_once(llama: ReferenceModel) -> None:
    (prompt,) = make_prompts((70,))
    with llama.llm(enable_prefix_caching=False) as llm:
        before = llm.status().prompt_tokens_total
        llm.generate([prompt], SamplingParams(n=4, max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert llm.status().prompt_tokens_total - before <= len(prompt)
