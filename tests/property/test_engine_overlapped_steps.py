"""Steps launched ahead over slots give the tokens of the plain runner, whatever arrives, leaves, waits or stops meanwhile."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.lark import to_lark
from engine.grammar.matcher import CompiledGrammar, of_text, token_trie
from engine.grammar.spec import GrammarSpec
from engine.grammar.vocabulary import Vocabulary
from engine.loop import Engine
from engine.protocol import FinishReason, TokenEvent, TokenLogprob
from engine.runner.batch_inputs import InputRow
from engine.runner.step_rows import FIRST, NONE
from kernels import ops
from tests.support.engines import evict_all, overlapped_engine, preempt_all, run_to_end, small_engine, wanted
from tests.support.tiny_models import EOS, VOCAB_SIZE, make_model

FAMILIES = ("llama", "mistral-window", "gemma2", "qwen3", "qwen3_moe")
MAX_LEN = 64
CPU = torch.device("cpu")

# What a request may ask for. "typical" is computed in the plain way, and so is a prompt with scores; masks are the host's.
WISHES: dict[str, dict[str, Any]] = {
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
    "typical": {"typical_p": 0.8},
}
LETTERS = Vocabulary((b"",) * 3 + tuple(bytes([byte]) for byte in range(3, VOCAB_SIZE)), (EOS,))


class LetterGrammars:
    """Compiles at once, for tokens of one letter."""

    def __init__(self) -> None:
        self._trie = token_trie(LETTERS)

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        done: Future[CompiledGrammar] = Future()
        done.set_result(CompiledGrammar(self._trie, of_text(to_lark(spec), first_space=False), spec))
        return done

    def close(self) -> None:
        """Nothing was opened."""


GRAMMARS = LetterGrammars()


def with_grammars(engine: Engine) -> Engine:
    """The engine, with grammars for its letters."""
    assert engine._grammars is not None
    engine._grammars._compiler = GRAMMARS
    return engine


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
    engine = with_grammars(small_engine(folder / family, max_model_len=MAX_LEN))
    once = Asked(prompt, wish, max_tokens, seed, 0, None)
    return answers(once.submit(engine, "a") + run_to_end(engine, [])["a"])


def answers(events: list[TokenEvent]) -> dict[int, Any]:
    """By index: tokens, their scores and those of the prompt, reason of the end, and the counts of the last event."""
    found: dict[int, Any] = {}
    for event in events:
        tokens, (own, prompt), *_ = found.get(event.index, ([], ([], [])))
        scored = own + (event.logprobs or []), prompt + (event.prompt_logprobs or [])
        counts = event.num_output_tokens, event.num_prompt_tokens_computed
        found[event.index] = tokens + event.token_ids, scored, event.finish_reason, counts
    return found


def assert_same_scores(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    """Beside others the logits of a request may differ in the last bits."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.rank, one.top_token_ids) == (other.rank, other.top_token_ids)
        numbers = [other.logprob, *other.top_logprobs]
        assert [one.logprob, *one.top_logprobs] == pytest.approx(numbers, rel=1e-4, abs=1e-5)


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
    )
    for found, each in zip(run(with_grammars(engine), requests, preempt_at=preempt_at), requests, strict=True):
        expected = alone(folder, family, *each[:4])
        for index, (tokens, scored, reason, counts) in found.items():
            for some, all_of_them in zip(scored, expected[index][1], strict=True):
                assert_same_scores(some, all_of_them[: len(some)])
            if reason is FinishReason.ABORTED:
                assert tokens == expected[index][0][: len(tokens)], "an aborted answer had begun otherwise"
                assert counts[0] == len(tokens)
            else:
                assert tokens == expected[index][0]
                assert [len(each) for each in scored] == [len(each) for each in expected[index][1]]
                assert (reason, counts) == expected[index][2:]
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


def test_steps_with_prompts_attend_in_the_workspaces_of_decode_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = overlapped_engine(folder / "gemma2").runner._target  # type: ignore[attr-defined]
    found = ops.operations(CPU)
    table = replace(found, decode_workspace=lambda shape, rows, columns, *_: (shape, rows, columns))
    monkeypatch.setattr("engine.runner.paged_decoder.operations", lambda _: table)
    shapes = decoder.attention_shapes
    assert len(shapes) == 2, "a window and none"
    decoder._planners = [ops.PagedPlanner(shape, dtype=torch.float32, device=CPU) for shape in shapes]
    kept = decoder.keep_workspaces(16, 4)
    assert kept == [(shape, 16, 4) for shape in shapes]
    plans = decoder.prepare([InputRow([1], 4, [0], FIRST), InputRow([1, 2, 3], 0, [1], NONE)]).attention
    assert all(plan.workspace is workspace for plan, workspace in zip(plans, kept, strict=True))


def test_a_request_is_not_launched_beyond_its_last_token(folder: Path) -> None:
    engine = overlapped_engine(folder / "llama")
    engine.submit(wanted("a", [5, 6, 7], max_tokens=3))
    sizes = []
    while engine.has_requests:
        engine.step()
        sizes.append(0 if engine._under_way is None else len(engine._under_way.flight.requests))
    assert sizes == [1, 1, 1, 0]


@pytest.mark.parametrize("wish", sorted(WISHES))
def test_only_what_no_slot_can_hold_is_computed_in_the_plain_way(wish: str, folder: Path) -> None:
    engine = with_grammars(overlapped_engine(folder / "llama", max_model_len=MAX_LEN))
    Asked((5, 6, 7, 8), wish, 6, 1, 0, None).submit(engine, "a")
    engine.submit(wanted("b", [9, 8, 7], max_tokens=6))
    plain = engine.runner.plain.run  # type: ignore[attr-defined]
    with mock.patch.object(engine.runner.plain, "run", side_effect=plain) as spy:  # type: ignore[attr-defined]
        run_to_end(engine, [])
    assert spy.call_count == {"typical": 6, "prompt scored": 1}.get(wish, 0)
