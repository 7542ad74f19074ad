"""Masks of a step: each answer's in its own row, behind the tokens that were accepted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any, cast

import pytest

from engine.grammar.masks import GrammarMasks
from engine.grammar.matcher import CompiledGrammar
from engine.grammar.spec import GrammarError
from tests.support.sampling import sampling_request

VOCAB_SIZE = 40
BAD_TOKEN = 39


class CountingGrammar:
    """A grammar whose answers are 0, 1, 2, …, each number by its own token; from `fails_at` on it has no masks."""

    def __init__(self, fails_at: int = VOCAB_SIZE) -> None:
        self.spec = None
        self.fails_at = fails_at

    def start(self) -> CountingState:
        return CountingState(self.fails_at)


class CountingState:
    """How far one answer has counted."""

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


def grammar(fails_at: int = VOCAB_SIZE) -> CompiledGrammar:
    return cast(CompiledGrammar, CountingGrammar(fails_at))


def rows(masks: GrammarMasks, *requests: Any) -> list[list[int]]:
    filled = masks.fill(requests)
    assert filled is not None
    assert not filled.result().errors
    return cast(list[list[int]], filled.result().rows.tolist())


def test_every_row_has_the_mask_of_its_own_answer(masks: GrammarMasks) -> None:
    first, free, second = (sampling_request(name) for name in ("first", "free", "second"))
    for request in (first, second):
        masks.start(request, grammar())
    assert masks.accept(second, [0, 1, 2]) is None
    assert rows(masks, first, free, second) == [[1, 0], [-1, -1], [8, 0]]
    assert rows(masks, second, first) == [[8, 0], [1, 0]], "a step may be repeated"
    assert masks.accept(free, [5]) is None
    assert masks.accept(first, [0]) is None
    assert rows(masks, second, first) == [[8, 0], [2, 0]]
    assert masks.accept(second, range(3, 33)) is None
    assert rows(masks, second) == [[0, 2]]


def test_rows_without_a_grammar_need_no_masks(masks: GrammarMasks) -> None:
    guided, free = sampling_request("guided"), sampling_request("free")
    empty = [masks.are_empty]
    assert masks.fill([free]) is None
    masks.start(guided, grammar())
    empty.append(masks.are_empty)
    assert masks.fill([free]) is None
    assert masks.nothing_forbidden(2).rows.tolist() == [[-1, -1], [-1, -1]]
    del guided
    gc.collect()
    assert [*empty, masks.are_empty] == [True, False, True], "a grammar is followed for as long as its answer exists"


def test_an_answer_without_a_mask_has_a_reason_and_the_others_have_masks(masks: GrammarMasks) -> None:
    good, bad = sampling_request("good"), sampling_request("bad")
    masks.start(bad, grammar(fails_at=1))
    masks.start(good, grammar())
    assert masks.accept(bad, [0]) is None
    filled = masks.fill([good, bad])
    assert filled is not None
    assert filled.result().rows[0].tolist() == [1, 0]
    assert {row: str(error) for row, error in filled.result().errors.items()} == {1: "too far"}


def test_a_token_that_a_grammar_does_not_allow_is_an_error_of_its_answer(masks: GrammarMasks) -> None:
    request = sampling_request("a")
    masks.start(request, grammar())
    error = masks.accept(request, [0, BAD_TOKEN, 1])
    assert (str(error), error and error.param) == ("39 is not 1", "guided_regex")
    assert rows(masks, request) == [[2, 0]], "nothing behind it was accepted"
