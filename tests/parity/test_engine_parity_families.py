"""Greedy output equals transformers, token for token, for every family and however the work was cut up."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import run_to_end, small_engine, tokens, wanted
from tests.support.tiny_models import EOS, FAMILY_SETTINGS, VOCAB_SIZE, greedy, make_model

PROMPT_LENS = (1, 15, 16, 17, 33, 70)
MAX_TOKENS = 24


def make_prompts(lengths: tuple[int, ...], seed: int = 3) -> list[list[int]]:
    numbers = random.Random(seed)
    return [[numbers.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@dataclass
class Case:
    """A model directory with the outputs that transformers gives for `prompts`."""

    directory: Path
    model: Any
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    @cache
    def make(family: str) -> Case:
        directory = tmp_path_factory.mktemp(family)
        model = make_model(family, directory)
        prompts = make_prompts(PROMPT_LENS)
        return Case(directory, model, prompts, [greedy(model, prompt, MAX_TOKENS) for prompt in prompts])

    return make


families = pytest.mark.parametrize("family", list(FAMILY_SETTINGS))


def assert_same(case: Case, **options: Any) -> None:
    engine = small_engine(case.directory, **options)
    requests = [wanted(str(i), prompt, max_tokens=MAX_TOKENS) for i, prompt in enumerate(case.prompts)]
    events = run_to_end(engine, requests)
    assert [tokens(events[str(i)]) for i in range(len(requests))] == case.expected


@families
def test_each_prompt_alone(family: str, case_of: Callable[[str], Case]) -> None:
    assert_same(case_of(family), max_num_seqs=1, enable_prefix_caching=False)


@families
def test_prompts_of_mixed_lengths_in_one_batch(family: str, case_of: Callable[[str], Case]) -> None:
    assert_same(case_of(family))


@families
def test_prompts_in_chunks_of_a_few_tokens(family: str, case_of: Callable[[str], Case]) -> None:
    assert_same(case_of(family), max_num_seqs=4, max_num_batched_tokens=7)


@families
def test_requests_that_were_preempted_and_computed_again(family: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(family)
    engine = small_engine(case.directory, num_kv_blocks=8, max_model_len=100, block_size=16, enable_prefix_caching=False)
    requests = [wanted(str(i), prompt, max_tokens=MAX_TOKENS) for i, prompt in enumerate(case.prompts)]
    events = run_to_end(engine, requests)
    assert [tokens(events[str(i)]) for i in range(len(requests))] == case.expected
    assert engine.status().preemptions_total > 0


@families
def test_prompts_whose_prefix_was_cached_by_an_earlier_one(family: str, case_of: Callable[[str], Case]) -> None:
    case = case_of(family)
    engine = small_engine(case.directory)
    first = run_to_end(engine, [wanted("first", case.prompts[-1], max_tokens=MAX_TOKENS)])
    again = run_to_end(engine, [wanted("again", case.prompts[-1], max_tokens=MAX_TOKENS)])
    assert tokens(first["first"]) == tokens(again["again"]) == case.expected[-1]
    assert again["again"][-1].num_cached_tokens == 64


@pytest.mark.parametrize("block_size", [1, 4, 32])
def test_other_block_sizes(block_size: int, case_of: Callable[[str], Case]) -> None:
    assert_same(case_of("llama"), block_size=block_size, max_num_batched_tokens=20)


def test_sharded_weights_give_the_same_tokens_as_one_file(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path, sharded=True)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    prompt = make_prompts((9,))[0]
    events = run_to_end(small_engine(tmp_path), [wanted("a", prompt, max_tokens=MAX_TOKENS)])
    assert tokens(events["a"]) == greedy(model, prompt, MAX_TOKENS)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_tied_embeddings_serve_as_the_output_head(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path, tie_word_embeddings=True)
    prompt = make_prompts((9,))[0]
    events = run_to_end(small_engine(tmp_path), [wanted("a", prompt, max_tokens=MAX_TOKENS)])
    assert tokens(events["a"]) == greedy(model, prompt, MAX_TOKENS)


def test_a_request_ends_with_the_end_of_sequence_token_where_transformers_ends(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path, vocab_size=8)
    prompts = [[a, b] for a in range(3, 8) for b in range(3, 8)]
    expected = [greedy(model, prompt, 60, stops_at_eos=True) for prompt in prompts]
    assert any(ids[-1] == EOS for ids in expected), "no prompt of this test reaches the end-of-sequence token"
    engine = small_engine(tmp_path)
    events = run_to_end(engine, [wanted(str(i), p, max_tokens=60, ignore_eos=False) for i, p in enumerate(prompts)])
    assert [tokens(events[str(i)]) for i in range(len(prompts))] == expected


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128])
def test_grouped_heads_and_head_sizes(heads: tuple[int, int], head_dim: int, tmp_path: Path) -> None:
    model = make_model("llama", tmp_path, num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=head_dim)
    prompts = make_prompts((5, 18))
    engine = small_engine(tmp_path, max_num_batched_tokens=16)
    events = run_to_end(engine, [wanted(str(i), prompt, max_tokens=8) for i, prompt in enumerate(prompts)])
    assert [tokens(events[str(i)]) for i in range(2)] == [greedy(model, prompt, 8) for prompt in prompts]
