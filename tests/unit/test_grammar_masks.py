"""Grammar masks of a step: one row per answer, advanced by its accepted tokens."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from engine.grammar.masks import GrammarMasks, allow_all
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.spec import GrammarError
from tests.support.sampling import sampling_request

VOCAB_SIZE = 40
BAD_TOKEN = 39


class CountingGrammar:
    """A grammar that allows the tokens 0, 1, 2, … in this order; at token `fails_at` filling its mask fails."""

    def __init__(self, fails_at: int = VOCAB_SIZE) -> None:
        self.spec = None
        self.fails_at = fails_at

    def start(self) -> CountingState:
        return CountingState(self.fails_at)


class CountingState:
    """The state of one answer: its next allowed token."""

    def __init__(self, fails_at: int) -> None:
        self.next = 0
        self.fails_at = fails_at

    def fill_mask(self, row: Any) -> None:
        if self.next >= self.fails_at:
            raise GrammarError("guided_regex", "too far")
        row[:] = 0
        row[self.next // 32] = 1 << self.next % 32

    def accept(self, token_id: int) -> None:
        if token_id != self.next:
            raise GrammarError("guided_regex", f"{token_id} is not {self.next}")
        self.next += 1


@pytest.fixture
def masks() -> Iterator[GrammarMasks]:
    masks = GrammarMasks(VOCAB_SIZE)
    yield masks
    masks.close()


def compiled_grammar(fails_at: int = VOCAB_SIZE) -> CompiledGrammar:
    return cast(CompiledGrammar, CountingGrammar(fails_at))


def mask_rows(masks: GrammarMasks, *requests: Any) -> list[list[int]]:
    filled = masks.fill(requests)
    assert filled is not None
    assert not filled.result().errors
    return cast(list[list[int]], filled.result().rows.tolist())


def test_each_row_has_the_mask_of_its_own_answer(masks: GrammarMasks) -> None:
    first, free, second = (sampling_request(name) for name in ("first", "free", "second"))
    for request in (first, second):
        masks.start(request, compiled_grammar())
    assert masks.accept(second, [0, 1, 2]) is None
    assert mask_rows(masks, first, free, second) == [[1, 0], [-1, -1], [8, 0]]
    assert mask_rows(masks, second, first) == [[8, 0], [1, 0]], "a step may be repeated"
    assert masks.accept(free, [5]) is None
    assert masks.accept(first, [0]) is None
    assert mask_rows(masks, second, first) == [[8, 0], [2, 0]]
    assert masks.accept(second, range(3, 33)) is None
    assert mask_rows(masks, second) == [[0, 2]]


def test_rows_without_a_grammar_need_no_masks(masks: GrammarMasks) -> None:
    guided, free = sampling_request("guided"), sampling_request("free")
    were_empty = [masks.are_empty]
    assert masks.fill([free]) is None
    masks.start(guided, compiled_grammar())
    were_empty.append(masks.are_empty)
    assert masks.fill([free]) is None
    assert masks.nothing_forbidden(2).rows.tolist() == [[-1, -1], [-1, -1]]
    del guided
    gc.collect()
    assert [*were_empty, masks.are_empty] == [True, False, True], "a grammar is followed for as long as its answer exists"


def test_masks_that_allow_all_have_a_word_for_every_32_tokens_and_are_on_their_device() -> None:
    device = torch.device("meta")
    masks = [allow_all(3, vocab_size, device) for vocab_size in (31, 32, 33, 64, 65)]
    assert [tuple(rows.shape) for rows in masks] == [(3, 1), (3, 1), (3, 2), (3, 2), (3, 3)]
    assert {(rows.dtype, rows.device) for rows in masks} == {(torch.int32, device)}


def test_a_mask_that_fails_is_an_error_of_its_row_only(masks: GrammarMasks) -> None:
    good, bad = sampling_request("good"), sampling_request("bad")
    masks.start(bad, compiled_grammar(fails_at=1))
    masks.start(good, compiled_grammar())
    assert masks.accept(bad, [0]) is None
    filled = masks.fill([good, bad])
    assert filled is not None
    assert filled.result().rows[0].tolist() == [1, 0]
    assert {row: str(error) for row, error in filled.result().errors.items()} == {1: "too far"}


def test_a_forbidden_token_is_an_error_of_its_answer(masks: GrammarMasks) -> None:
    request = sampling_request("a")
    masks.start(request, compiled_grammar())
    error = masks.accept(request, [0, BAD_TOKEN, 1])
    assert (str(error), error and error.param) == ("39 is not 1", "guided_regex")
    assert mask_rows(masks, request) == [[2, 0]], "nothing behind it was accepted"


def mask_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("grammar-masks")}


def test_masks_of_two_steps_are_filled_one_after_the_other(masks: GrammarMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    before, request, released = mask_threads(), sampling_request("a"), threading.Event()
    monkeypatch.setattr(CountingState, "fill_mask", lambda _state, _row: released.wait(60))
    masks.start(request, compiled_grammar())
    filled = [masks.fill([request]), masks.fill([request])]
    assert len(mask_threads() - before) == 1
    released.set()
    assert all(future is not None and not future.result(timeout=60).errors for future in filled)


def test_closing_the_masks_ends_their_thread() -> None:
    before, masks, request = mask_threads(), GrammarMasks(VOCAB_SIZE), sampling_request("a")
    masks.start(request, compiled_grammar())
    assert len(mask_threads() - before) == 1
    masks.close()
    assert mask_threads() - before == set()
