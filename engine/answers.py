"""The answers of a submitted request: a `Request` of the scheduler for each. Knows no torch."""

from __future__ import annotations

from engine.protocol import EngineInfo, GenerationRequest
from engine.sampling.randomness import seed_of_answer
from engine.scheduling.request import Request


def make_answers(submitted: GenerationRequest, info: EngineInfo, *, now_s: float) -> list[Request]:
    """One request per answer, each with a seed of its own, of a submission that passed `check_request`. Only the first answer
    has the queue deadline: once it has begun, the request no longer waits for its turn, and ending it would waste what it has
    generated. If the first one expires, the others end with it; else the gateway's deadline of the whole request bounds their
    wait."""
    sampling, limit, token_ids = submitted.sampling, info.max_model_len, list(submitted.prompt_token_ids)
    seed, deadline_s = sampling.seed, submitted.queue_deadline_s
    assert seed is not None, f"request {submitted.request_id} was not checked"
    stop_ids = frozenset(sampling.stop_token_ids).union(info.eos_token_ids if sampling.stops_at_eos else ())
    return [
        Request(
            request_id=submitted.request_id,
            tenant_id=submitted.tenant_id,
            sampling=sampling.with_checked(seed=seed_of_answer(seed, index)) if index else sampling,
            token_ids=token_ids,
            shares_token_ids=sampling.num_answers > 1,
            num_prompt_tokens=len(token_ids),
            max_total_tokens=min(limit, len(token_ids) + (sampling.max_tokens or limit)),
            stop_ids=stop_ids,
            arrived_s=now_s,
            index=index,
            weight=submitted.weight,
            priority=submitted.priority,
            queue_deadline_s=None if index or deadline_s is None else now_s + deadline_s,
        )
        for index in range(sampling.num_answers)
    ]
