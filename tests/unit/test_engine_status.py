"""The status of an engine: each figure comes from its own place, and a tenant's line has preempted answers first."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

from engine.engine_status import StepFigures, make_status
from engine.overlap import Fallbacks
from engine.protocol import PlainReason, Priority, RequestProgress, TenantProgress
from engine.scheduling.request import Request, RequestStatus
from tests.support.scheduling import make_request

FIGURES = StepFigures(steps_total=15, step_ms=16.0, num_batched_tokens=17)
FALLBACKS = Fallbacks(18, "lost", Counter({PlainReason.PROMPT_LOGPROBS: 19}))


class Grammars:
    """Answers that wait for their grammar."""

    def __init__(self, *parked: Request) -> None:
        self.parked = parked

    def requests(self) -> tuple[Request, ...]:
        return self.parked

    def __len__(self) -> int:
        return len(self.parked)


def scheduler(*waiting: Request, running: tuple[Request, ...] = (), tenants: tuple[TenantProgress, ...] = ()) -> Any:
    """A scheduler of which only figures are read, each another number."""
    host_tier = SimpleNamespace(num_blocks=20, num_used=21)
    kv = SimpleNamespace(host_tier=host_tier, num_swapped_in=13, num_swapped_out=14)
    return SimpleNamespace(
        pool=SimpleNamespace(num_blocks=1, num_used=2, num_cached=3, num_free=4),
        totals=SimpleNamespace(
            prompt_tokens=5, generation_tokens=6, prefix_cache_hit_tokens=7, preemptions=8, draft_tokens=9,
            accepted_draft_tokens=10,
        ),
        kv=kv, num_running=11, num_waiting=12,
        waiting=lambda: list(waiting), running=[*running], accounts=SimpleNamespace(progress=lambda: list(tenants)),
    )  # fmt: skip


def status(planned: Any, grammars: Grammars | None = None, *, with_requests: bool = True) -> Any:
    return make_status(planned, cast("Any", grammars or Grammars()), FIGURES, FALLBACKS, with_requests=with_requests)


def test_each_figure_comes_from_its_own_place() -> None:
    figures = asdict(status(scheduler(), Grammars(make_request("parked", 1)), with_requests=False))
    assert figures == {
        "kv_blocks_total": 1, "kv_blocks_used": 2, "kv_blocks_cached": 3, "kv_blocks_free": 4,
        "prompt_tokens_total": 5, "generation_tokens_total": 6, "prefix_cache_hit_tokens_total": 7, "preemptions_total": 8,
        "draft_tokens_total": 9, "accepted_draft_tokens_total": 10, "num_running": 11, "num_waiting": 12 + 1,
        "swapped_in_blocks_total": 13, "swapped_out_blocks_total": 14,
        "steps_total": 15, "step_ms": 16.0, "num_batched_tokens": 17,
        "fallback_steps_total": 18, "fallback_reason": "lost", "plain_steps_total": {"prompt_logprobs": 19},
        "host_blocks_total": 20, "host_blocks_used": 21,
        "requests": None, "tenants": None,
    }  # fmt: skip


def test_an_answer_shows_its_own_progress() -> None:
    running = make_request("a", 5, index=2)
    running.status, running.num_computed_tokens, running.num_preemptions = RequestStatus.DECODE, 4, 3
    running.block_table = cast("Any", [7, 8])
    running.token_ids += [9]
    (progress,) = status(scheduler(running=(running,))).requests
    assert progress == RequestProgress(
        request_id="a", state="decode", queue_position=None, kv_blocks=2, num_computed_tokens=4, num_output_tokens=1,
        num_preemptions=3, index=2,
    )  # fmt: skip


def test_a_tenants_line_has_preempted_answers_first_and_each_class_has_its_own() -> None:
    preempted = make_request("preempted", 1)
    preempted.num_preemptions = 2
    waiting = (
        make_request("a", 1), make_request("a", 1, index=1), make_request("b", 1), preempted,
        make_request("batch", 1, priority=Priority.BATCH), make_request("bobs", 1, tenant="bob"),
    )  # fmt: skip
    result = status(scheduler(*waiting), Grammars(make_request("parked", 1)))
    positions = [(row.request_id, row.index, row.queue_position) for row in result.requests]
    assert positions == [
        ("a", 0, 1), ("a", 1, 1), ("b", 0, 2), ("preempted", 0, 0), ("batch", 0, 0), ("bobs", 0, 0), ("parked", 0, 3),
    ]  # fmt: skip


def test_tenants_have_their_parked_answers_even_if_the_scheduler_does_not_know_them() -> None:
    alice = TenantProgress(tenant_id="alice", num_running=1, num_waiting=1, kv_blocks=2, service_s=0.5)
    idle = TenantProgress(tenant_id="idle", num_running=0, num_waiting=7, kv_blocks=0, service_s=0.1)
    parked = Grammars(make_request("c", 1), make_request("d", 1, tenant="bob"), make_request("e", 1, tenant="bob"))
    assert status(scheduler(make_request("b", 1), tenants=(alice, idle)), parked).tenants == [
        TenantProgress(tenant_id="alice", num_running=1, num_waiting=2, kv_blocks=2, service_s=0.5),
        TenantProgress(tenant_id="idle", num_running=0, num_waiting=0, kv_blocks=0, service_s=0.1),
        TenantProgress(tenant_id="bob", num_running=0, num_waiting=2, kv_blocks=0, service_s=0.0),
    ]


def test_figures_count_steps_and_describe_the_last_one() -> None:
    figures = StepFigures()
    for num_tokens, step_s in ((5, 1.0), (3, 0.25)):
        figures.record(cast("Any", SimpleNamespace(num_tokens=num_tokens)), step_s)
    assert (figures.steps_total, figures.num_batched_tokens, figures.step_ms) == (2, 3, 250.0)
