"""The engines' token counts are compared with the ledger: they agree whenever nothing runs."""

from __future__ import annotations

from appliance.serving.live_requests import LiveRequest
from appliance.serving.usage_reconciliation import UsageReconciliation
from engine.protocol import EngineStatus, TokenEvent
from tests.support.clock import START
from tests.support.engine_messages import engine_status


def status(prompt: int, generation: int) -> EngineStatus:
    return engine_status(prompt_tokens_total=prompt, generation_tokens_total=generation)


def ready(prompt: int = 0, generation: int = 0) -> UsageReconciliation:
    """A reconciliation whose engine had counted this much when it became ready."""
    reconciliation = UsageReconciliation()
    reconciliation.note_process_ready()
    reconciliation.note_status(status(prompt, generation))
    return reconciliation


def test_tokens_counted_while_loading_are_ignored() -> None:
    reconciliation = ready(prompt=100, generation=50)
    assert reconciliation.unexplained_tokens == 0
    reconciliation.note_submitted()
    reconciliation.note_status(status(110, 55))
    reconciliation.note_settled(generated_tokens=5, billed_completion=5, billed_prompt=10)
    assert reconciliation.unexplained_tokens == 0


def test_unrecorded_tokens_show_up_once_nothing_runs() -> None:
    reconciliation = ready()
    reconciliation.note_submitted()
    reconciliation.note_status(status(10, 7))
    assert reconciliation.unexplained_tokens == 0, "a request is on its way"
    reconciliation.note_settled(generated_tokens=5, billed_completion=5, billed_prompt=10)
    assert reconciliation.unexplained_tokens == 2


def test_more_in_the_ledger_than_was_counted_is_a_difference_too() -> None:
    reconciliation = ready()
    reconciliation.note_submitted()
    reconciliation.note_settled(generated_tokens=3, billed_completion=3, billed_prompt=0)
    assert reconciliation.unexplained_tokens == 3


def test_output_past_a_stop_string_or_for_closed_requests_is_explained() -> None:
    reconciliation = ready()
    reconciliation.note_submitted()
    reconciliation.note_status(status(10, 9))
    reconciliation.note_settled(generated_tokens=8, billed_completion=5, billed_prompt=10)
    reconciliation.note_discarded(1)
    assert (reconciliation.unexplained_tokens, reconciliation.discarded_tokens) == (0, 4)


def test_a_new_engine_process_counts_from_zero() -> None:
    reconciliation = ready()
    reconciliation.note_submitted()
    reconciliation.note_status(status(10, 5))
    reconciliation.note_process_ready()
    reconciliation.note_status(status(3, 3))
    reconciliation.note_status(status(3, 5))
    reconciliation.note_settled(generated_tokens=7, billed_completion=7, billed_prompt=10)
    assert reconciliation.unexplained_tokens == 0


def test_an_engine_without_a_status_is_not_compared() -> None:
    reconciliation = UsageReconciliation()
    reconciliation.note_submitted()
    reconciliation.note_settled(generated_tokens=5, billed_completion=5, billed_prompt=10)
    assert reconciliation.unexplained_tokens == 0


def test_rejected_drafts_of_all_answers_add_up() -> None:
    live = LiveRequest(
        id="req", tenant_id="tn", tenant_name="bob", key_id="key", key_prefix="gh", model="demo", endpoint="/", stream=True,
        prompt_tokens=3, admitted_at=START, admitted_monotonic_s=0.0, num_answers=2,
    )  # fmt: skip
    for index, rejected in ((0, 2), (1, 3), (0, 5), (1, 3)):
        event = TokenEvent("req", [1], 1, 3, index=index, num_rejected_draft_tokens=rejected)
        live.apply_event(event, monotonic_s=1.0)
    assert live.rejected_tokens == 8
