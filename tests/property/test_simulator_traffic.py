"""Random traffic through the simulator: every policy computes every token once, frees all blocks and serves all requests."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.simulator.cache_bounds import cache_bounds
from engine.simulator.models import find_gpu, find_model
from engine.simulator.replay import POLICIES, Replay, Setup
from engine.simulator.trace import HASH_BLOCK_TOKENS, TracedRequest
from engine.simulator.workload import Workload

LLAMA, H200 = find_model("llama-3.1-8b"), find_gpu("h200")
TENANTS = st.sampled_from([f"tenant-{number}" for number in range(6)])
ARRIVALS = st.floats(0, 3)
BLOCKS = 200


@st.composite
def traced_requests(draw: st.DrawFn) -> TracedRequest:
    """A request that may share its first blocks of 512 tokens with others of its tenant."""
    ids: list[int] = []
    for depth in range(draw(st.integers(0, 4))):
        ids.append((ids[-1] if ids else depth) * 3 + draw(st.integers(1, 2)))
    length = HASH_BLOCK_TOKENS * len(ids) or draw(st.integers(1, 3000))
    cut = draw(st.sampled_from([0, 1, 15, 16, 17, 500])) if ids else 0
    return TracedRequest(draw(ARRIVALS), draw(TENANTS), length - cut, draw(st.integers(1, 60)), tuple(ids))


TRAFFIC = st.lists(traced_requests(), min_size=1, max_size=60)


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    traffic=TRAFFIC,
    policy=st.sampled_from(list(POLICIES)),
    seats=st.integers(1, 24),
    budget=st.sampled_from([None, 64, 700]),
    host_cache_gib=st.sampled_from([0.0, 0.5]),
)
def test_every_policy_computes_each_token_once_and_serves_all_requests(
    traffic: list[TracedRequest], policy: str, seats: int, budget: int | None, host_cache_gib: float
) -> None:
    setup = Setup(
        model=LLAMA, gpu=H200, policy=policy, max_num_seqs=seats, token_budget=budget, num_kv_blocks=BLOCKS, max_tokens=60,
        host_cache_gib=host_cache_gib, weights={"tenant-1": 4},
    )  # fmt: skip
    replay = Replay(setup, Workload("random", sorted(traffic, key=lambda request: request.arrival_s)))
    replay.run()
    replay.scheduler.check_invariants()
    tenants = replay.recorder.tenants.values()
    served = [request for request in traffic if request.input_tokens < setup.max_model_len]
    limit = setup.max_model_len
    outputs = sum(min(request.output_tokens, limit - request.input_tokens) for request in served)
    assert replay.scheduler.totals.generation_tokens == outputs
    assert sum(len(tenant.outcomes) for tenant in tenants) == len(served)
    assert sum(tenant.num_refused for tenant in tenants) == len(traffic) - len(served)
    assert all(tenant.num_queued == 0 for tenant in tenants)
    assert replay.pool.num_used == 0
    assert replay.recorder.running_max <= seats


@settings(max_examples=60, deadline=None, derandomize=True)
@given(traffic=TRAFFIC, num_blocks=st.integers(1, 40))
def test_the_clairvoyant_cache_is_an_upper_bound_of_lru(traffic: list[TracedRequest], num_blocks: int) -> None:
    whole = [r for r in traffic if r.block_ids]
    whole = [
        TracedRequest(r.arrival_s, r.tenant, HASH_BLOCK_TOKENS * len(r.block_ids) + 1, 1, (*r.block_ids, -i))
        for i, r in enumerate(whole)
    ]
    bounds = cache_bounds(whole, num_blocks * HASH_BLOCK_TOKENS)
    if bounds is not None:
        assert bounds.lru_tokens <= bounds.clairvoyant_tokens <= bounds.unbounded_tokens <= bounds.prompt_tokens
