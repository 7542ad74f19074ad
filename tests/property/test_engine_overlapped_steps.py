"""Steps launched ahead over slots give the tokens of the plain runner, whatever arrives, leaves, waits or stops meanwhile."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.loop import Engine
from engine.protocol import FinishReason, TokenEvent
from tests.support.engines import evict_all, overlapped_engine, preempt_all, run_to_end, small_engine, wanted
from tests.support.tiny_models import EOS, VOCAB_SIZE, make_model

FAMILIES = ("llama", "mistral-window", "gemma2", "qwen3", "qwen3_moe")
MAX_LEN = 64

# What a request may ask for; the last four need the host between two steps and take the synchronous way.
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "stops": {"ignore_eos": False, "temperature": 1.3, "stop_token_ids": list(range(3, 40, 3))},
    "stops late": {"stop_token_ids": list(range(2, 90)), "min_tokens": 5},
    "biased": {"logit_bias": {7: 9.0, 8: 8.5}},
    "two answers": {"n": 2, "temperature": 0.8},
    "penalised": {"repetition_penalty": 1.4},
    "scored": {"logprobs": 1},
    "prompt scored": {"prompt_logprobs": 1},
    "without words": {"bad_words_token_ids": [[5], [6, 7]]},
}


class Asked(NamedTuple):
    """One request, when it comes, and after how many steps it is aborted, if it is."""

    prompt: tuple[int, ...]
    wish: str
    max_tokens: int
    seed: int
    arrives: int
    aborted_after: int | None

    def submit(self, engine: Engine, name: str) -> list[TokenEvent]:
        chosen = {"seed": self.seed, "max_tokens": self.max_tokens, **WISHES[self.wish]}
        chosen["max_tokens"] = max(self.max_tokens, chosen.get("min_tokens", 1))
        return engine.submit(wanted(name, self.prompt, **chosen))


prompts = st.integers(1, 37).flatmap(
    lambda length: st.sampled_from((3, 50, 90)).map(lambda first: tuple((first + 7 * i) % VOCAB_SIZE for i in range(length)))
)
asked = st.builds(
    Asked,
    prompt=prompts,
    wish=st.sampled_from(sorted(WISHES)) | st.sampled_from(("greedy", "sampled", "stops")),
    max_tokens=st.integers(1, 24),
    seed=st.integers(0, 3),
    arrives=st.integers(0, 12),
    aborted_after=st.none() | st.none() | st.integers(0, 12),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        make_model(family, folder / family)
    return folder


@cache
def alone(folder: Path, family: str, prompt: tuple[int, ...], wish: str, max_tokens: int, seed: int) -> dict[int, Any]:
    """Tokens and end of each answer from the plain runner, with nobody beside it."""
    engine = small_engine(folder / family, max_model_len=MAX_LEN)
    once = Asked(prompt, wish, max_tokens, seed, 0, None)
    return answers(once.submit(engine, "a") + run_to_end(engine, [])["a"])


def answers(events: list[TokenEvent]) -> dict[int, Any]:
    """By index: tokens, log-probabilities asked for, reason of the end, and the counts of the last event."""
    found: dict[int, Any] = {}
    for event in events:
        tokens, num_scores, *_ = found.get(event.index, ([], 0))
        num_scores += len(event.logprobs or ()) + len(event.prompt_logprobs or ())
        counts = event.num_output_tokens, event.num_prompt_tokens_computed
        found[event.index] = tokens + event.token_ids, num_scores, event.finish_reason, counts
    return found


def run(engine: Engine, requests: list[Asked], *, preempt_at: int | None) -> list[dict[int, Any]]:
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
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check_invariants()
        step += 1
    assert engine.status().kv_blocks_used == 0, "blocks were lost"
    return [answers(events[str(index)]) for index in range(len(requests))]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    family=st.sampled_from(FAMILIES),
    requests=st.lists(asked, min_size=1, max_size=9),
    budget=st.sampled_from((7, 16, 512)),
    block_size=st.sampled_from((1, 4, 16)),
    seats=st.sampled_from((2, 5, 16)),
    spare_blocks=st.sampled_from((0, 8, 1000)),
    caches=st.booleans(),
    preempt_at=st.none() | st.integers(1, 12),
    swap_space=st.sampled_from((0.0, 0.002)),
    by_columns=st.booleans(),
)
def test_tokens_are_those_of_the_plain_runner(
    folder: Path,
    family: str,
    requests: list[Asked],
    budget: int,
    block_size: int,
    seats: int,
    spare_blocks: int,
    caches: bool,
    preempt_at: int | None,
    swap_space: float,
    by_columns: bool,
) -> None:
    engine = overlapped_engine(
        folder / family,
        max_num_batched_tokens=max(budget, seats),
        block_size=block_size,
        max_num_seqs=seats,
        max_model_len=MAX_LEN,
        num_kv_blocks=MAX_LEN // block_size + spare_blocks * 16 // block_size,
        enable_prefix_caching=caches,
        swap_space=swap_space,
        by_columns=by_columns,
    )
    for found, each in zip(run(engine, requests, preempt_at=preempt_at), requests, strict=True):
        expected = alone(folder, family, *each[:4])
        for index, (tokens, num_scores, reason, counts) in found.items():
            if reason is FinishReason.ABORTED:
                assert tokens == expected[index][0][: len(tokens)], "an aborted answer had begun otherwise"
                assert counts[0] == len(tokens)
            else:
                assert (tokens, num_scores, reason, counts) == expected[index]
        assert found.keys() == expected.keys()


def test_a_stop_token_is_seen_one_step_late_and_what_was_launched_behind_it_is_thrown_away(folder: Path) -> None:
    engine = overlapped_engine(folder / "llama")
    for name, stops in (("a", []), ("b", list(range(VOCAB_SIZE)))):
        engine.submit(wanted(name, [5, 6, 7], max_tokens=8, stop_token_ids=stops))
    events = [engine.step() for _ in range(3)]
    assert [len(each) for each in events] == [0, 2, 1], "a's first token, b's only one; then a's second"
    launched = engine._under_way
    assert launched is not None
    assert len(launched.flight.requests) == 1, "nobody plans a request that has ended"
    ended = next(event for event in events[1] if event.request_id == "b")
    assert (ended.num_output_tokens, ended.finish_reason) == (1, FinishReason.STOP)
    assert ended.token_ids[0] in range(VOCAB_SIZE)
    assert EOS in range(VOCAB_SIZE)


def test_a_request_is_not_launched_beyond_its_last_token(folder: Path) -> None:
    engine = overlapped_engine(folder / "llama")
    engine.submit(wanted("a", [5, 6, 7], max_tokens=3))
    sizes = []
    while engine.has_requests:
        engine.step()
        sizes.append(0 if engine._under_way is None else len(engine._under_way.flight.requests))
    assert sizes == [1, 1, 1, 0]
