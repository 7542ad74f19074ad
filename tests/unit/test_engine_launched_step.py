"""The results of a launched step, from the tokens that arrive: one for each item of the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.grammar.spec import GrammarError
from engine.protocol import TokenLogprob
from engine.runner.launched_step import LaunchedStep
from engine.runner.token_return import ImmediateFetch
from engine.scheduling.scheduled_batch import RowResult, StepOutput
from kernels.ops import NO_TOKEN

REFUSED = GrammarError("grammar", "it cannot be followed")


def score_row(token_id: int, logprob: float) -> list[int]:
    """A token with its log-probability, rank 1, and no other token."""
    return [1, token_id, *torch.tensor([logprob], dtype=torch.float64).view(torch.int64).tolist()]


def outputs(
    tokens: list[int], *, scores: list[list[int]] | None = None, num_items: int | None = None, **step: Any
) -> list[RowResult]:
    """The results of a step that sampled `tokens`, of as many items unless said otherwise."""
    table = None if scores is None else torch.tensor(scores)
    items = len(tokens) if num_items is None else num_items
    return LaunchedStep(items, len(tokens), fetch=ImmediateFetch(tokens, table), **step).outputs()


def test_items_that_do_not_sample_have_an_empty_output_in_their_places() -> None:
    assert outputs([7, 8], num_items=5, rows=[1, 4]) == [StepOutput(), 7, StepOutput(), StepOutput(), 8]


def test_a_step_that_samples_nothing_has_an_empty_output_for_each_item() -> None:
    assert outputs([], num_items=2, rows=[]) == [StepOutput(), StepOutput()]


def test_tokens_of_padding_are_no_results() -> None:
    assert LaunchedStep(2, 2, fetch=ImmediateFetch([7, 8, 0, 0])).outputs() == [7, 8]


def test_a_row_for_which_no_token_was_drawn_has_no_result_even_if_it_is_scored() -> None:
    scored = outputs([NO_TOKEN, 8], scores=[score_row(0, 0.0), score_row(8, -0.5)], scored=[(0, 0), (1, 0)])
    assert scored == [None, StepOutput([8], [TokenLogprob(logprob=-0.5, rank=1, top_token_ids=[], top_logprobs=[])])]


@pytest.mark.parametrize(("tokens", "lacks_tokens"), [([7, 8], False), ([7, NO_TOKEN], True)])
def test_a_step_says_whether_a_row_has_no_token(tokens: list[int], *, lacks_tokens: bool) -> None:
    step = LaunchedStep(2, 2, fetch=ImmediateFetch(tokens))
    step.outputs()
    assert step.lacks_tokens == lacks_tokens


def test_a_row_that_got_no_mask_ends_with_the_reason() -> None:
    failed = StepOutput(error="it cannot be followed", error_param="grammar")
    assert outputs([7, 8], errors={1: REFUSED}) == [7, failed]


def test_a_row_that_got_no_mask_ends_beside_one_that_verifies_drafts() -> None:
    failed = StepOutput(error="it cannot be followed", error_param="grammar")
    verified = outputs([4, 5, 6, 9], num_items=2, depths={0: 2}, inputs=[3, 4, 5, 9], errors={3: REFUSED})
    assert verified == [StepOutput([4, 5, 6]), failed]


def test_drafts_are_not_accepted_where_the_first_token_could_not_be_drawn() -> None:
    assert outputs([9, NO_TOKEN, 5], num_items=2, depths={1: 1}, inputs=[8, 3, 4]) == [9, None]


def test_drafts_known_only_to_the_device_are_compared_with_the_inputs_that_arrive() -> None:
    fetch = ImmediateFetch([4, 9, 6], inputs=[3, 4, 5])
    assert LaunchedStep(1, 3, depths={0: 2}, fetch=fetch).outputs() == [StepOutput([4, 9])]
