"""The probe: one harmless token that tells a broken device from bad requests. Knows no torch."""

from __future__ import annotations

from engine.protocol import SamplingParams
from engine.scheduling.request import Request, table_of
from engine.scheduling.scheduled_batch import ScheduledRequest


def probe_item(block_id: int) -> ScheduledRequest:
    """The greedy token after token 0, computed in the given block."""
    request = Request(
        request_id="probe",
        tenant_id="",
        sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=1),
        token_ids=[0],
        num_prompt_tokens=1,
        max_total_tokens=2,
        stop_ids=frozenset(),
        arrived_s=0.0,
        block_table=table_of([block_id]),
    )
    return ScheduledRequest(request, 0, 1, samples=True)
