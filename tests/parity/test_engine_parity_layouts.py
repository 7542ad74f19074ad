"""Requests with random parameters have the same answers alone, together, in chunks, preempted and with drafts."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.offline.outputs import RequestOutput
from tests.support.engines import KV_CACHE_BYTES
from tests.support.tiny_models import saved_text_model
from tests.support.tiny_tokenizer import VOCAB_SIZE

NUM_REQUESTS = 32
CHOICES: dict[str, list[Any]] = {
    "max_tokens": [1, 5, 20, 30],
    "temperature": [0.0, 0.5, 1.0, 1.5],
    "top_k": [0, 5, 50],
    "top_p": [1.0, 0.9, 0.5],
    "min_p": [0.0, 0.1],
    "typical_p": [1.0, 0.7],
    "repetition_penalty": [1.0, 1.2],
    "presence_penalty": [0, 0.5],
    "frequency_penalty": [0, -0.3],
    "logprobs": [None, 0, 3],
    "prompt_logprobs": [None, None, 2],
    "n": [1, 1, 3],
    "best_of": [None, None, 4],
    "ignore_eos": [True, False],
    "echo": [False, True],
    "min_tokens": [0, 1],
    "bad_words": [None, ["a", "the"]],
    "stop": [[], ["e"], ["zz", "q"]],
    "logit_bias": [None, {5: 3.0, 70: -5.0}],
    "guided_regex": [None, None, "[a-z ]{3,9}(x|y)"],
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "chunks": {"max_num_seqs": 8, "max_num_batched_tokens": 16},
    "swapped": {"num_gpu_blocks_override": 20, "max_model_len": 256, "swap_space": 0.01},
    "recomputed": {"num_gpu_blocks_override": 20, "max_model_len": 256, "enable_prefix_caching": False},
    "speculative": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


def make_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(5)
    lengths = [rng.choice([1, 7, 16, 17, 40, 100]) for _ in range(NUM_REQUESTS)]
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    params = [
        SamplingParams(seed=rng.randrange(2**63), **{name: rng.choice(values) for name, values in CHOICES.items()})
        for _ in range(NUM_REQUESTS)
    ]
    return prompts, params


def run_requests(layout: dict[str, Any]) -> list[list[tuple[Any, ...]]]:
    options = {"device": "cpu", "threads": 1, "kv_cache_bytes": KV_CACHE_BYTES * 2, "max_num_seqs": 16, **layout}
    prompts, params = make_requests()
    with LLM(saved_text_model(), **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        is_preempting = llm.status().preemptions_total > 0
    assert is_preempting == ("num_gpu_blocks_override" in layout)
    for output, sampling in zip(outputs, params, strict=True):
        assert_shape(output, sampling)
    return [[(a.text, a.token_ids, a.finish_reason, a.stop_reason) for a in output.outputs] for output in outputs]


def assert_shape(output: RequestOutput, sampling: SamplingParams) -> None:
    """The output has no error and the requested numbers of answers, entries and alternatives."""
    assert [answer.index for answer in output.outputs] == list(range(sampling.n))
    assert all(answer.error is None for answer in output.outputs)
    assert (output.prompt_logprobs is None) == (sampling.prompt_logprobs is None)
    if output.prompt_logprobs is not None:
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for answer in output.outputs:
        assert (answer.logprobs is None) == (sampling.logprobs is None)
        if answer.logprobs is not None and sampling.logprobs is not None:
            assert len(answer.logprobs) == len(answer.token_ids)
            assert all(len(entry) <= sampling.logprobs + 1 for entry in answer.logprobs)


@pytest.fixture(scope="module")
def answers_together() -> list[list[tuple[Any, ...]]]:
    return run_requests({})


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_answers_do_not_depend_on_how_they_are_computed(layout: str, answers_together: list[list[tuple[Any, ...]]]) -> None:
    assert run_requests(LAYOUTS[layout]) == answers_together
