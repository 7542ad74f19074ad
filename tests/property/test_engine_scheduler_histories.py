"""Random histories of requests under a scheduler with tiny pools: no block leaks or is shared wrongly, every request ends once,
and no waiting tenant is served less than another by more than the bound of docs/fairness.md.

`GATEHOUSE_SCRIPTS` sets the number of scripts, 40 by default; `python -m tests.support.scheduler_fuzz` prints gaps in service.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from engine.protocol import Priority
from engine.scheduling.request import Request
from tests.support.scheduler_fuzz import SchedulerFuzz, SchedulerSetup, run_random_script

NUM_SCRIPTS = int(os.environ.get("GATEHOUSE_SCRIPTS", "40"))
TENANTS = (("alice", 1), ("bob", 2), ("charlie", 4))


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, forks, aborts, preempts, fails, expires and steps in any order, with all checks after each operation."""

    requests = Bundle("requests")

    @initialize(
        num_blocks=st.integers(3, 12),
        block_size=st.sampled_from([1, 2, 4]),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.integers(0, 12),
        caches=st.booleans(),
        host_blocks=st.sampled_from([0, 2, 12]),
        drafts=st.booleans(),
        global_prefix=st.sampled_from([(), (1, 1, 2, 1)]),
        protected_percent=st.sampled_from([0, 50]),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        spare_budget: int,
        caches: bool,
        host_blocks: int,
        drafts: bool,
        global_prefix: tuple[int, ...],
        protected_percent: int,
    ) -> None:
        setup = SchedulerSetup(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            spare_budget=spare_budget,
            caches=caches,
            host_blocks=host_blocks,
            drafts=drafts,
            global_prefix=global_prefix,
            protected_percent=protected_percent,
            tenants=TENANTS,
        )
        self.fuzz = SchedulerFuzz(setup, random.Random(0))

    @rule(
        target=requests,
        data=st.data(),
        tenant=st.integers(0, len(TENANTS) - 1),
        priority=st.sampled_from([Priority.STANDARD, Priority.STANDARD, Priority.INTERACTIVE, Priority.BATCH]),
        patience_s=st.sampled_from([None, None, None, 3.0]),
        num_answers=st.sampled_from([1, 1, 1, 3]),
    )
    def add(self, data: st.DataObject, tenant: int, priority: Priority, patience_s: float | None, num_answers: int) -> object:
        longest = self.fuzz.limits.max_model_len
        length = data.draw(st.integers(1, max(1, longest - 1)))
        token_ids = [2 if position % 3 == 2 else 1 for position in range(length)]
        return multiple(
            *self.fuzz.add(
                tenant,
                token_ids,
                data.draw(st.integers(min(longest, length + 1), longest)),
                priority=priority,
                deadline_s=None if patience_s is None else self.fuzz.now_s + patience_s,
                num_answers=num_answers,
            )
        )

    @rule(request=consumes(requests))
    def abort(self, request: Request) -> None:
        self.fuzz.abort(request)

    @rule(request=requests)
    def preempt(self, request: Request) -> None:
        if request in self.fuzz.scheduler.running:
            self.fuzz.scheduler.preempt(request)

    @rule()
    def expire(self) -> None:
        self.fuzz.expire()

    @rule(fails=st.integers(0, 20))
    def step(self, fails: int) -> None:
        self.fuzz.step(fails=fails == 20)

    @rule()
    def drain(self) -> None:
        self.fuzz.drain()

    @invariant()
    def check_everything(self) -> None:
        if hasattr(self, "life"):
            self.fuzz.check()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("first", range(0, NUM_SCRIPTS, 20))
def test_random_scripts_of_2_to_64_tenants_keep_all_invariants(first: int) -> None:
    for seed in range(first, min(first + 20, NUM_SCRIPTS)):
        fuzz = run_random_script(seed)
        assert len(fuzz.ended) == len(fuzz.delivered), "every request ends exactly once"


@pytest.mark.parametrize("caches", [False, True])
def test_a_long_random_history_leaks_nothing(caches: bool) -> None:
    fuzz = SchedulerFuzz(SchedulerSetup(num_blocks=9, spare_budget=5, caches=caches, host_blocks=4), rng := random.Random(11))
    longest = fuzz.limits.max_model_len
    for _ in range(2500):
        if len(fuzz.live) < 12 and rng.random() < 0.3:
            length = rng.randrange(1, longest)
            fuzz.add(rng.randrange(2), [1 + position % 2 for position in range(length)], rng.randint(length + 1, longest))
        elif fuzz.live and rng.random() < 0.02:
            fuzz.abort(rng.choice(list(fuzz.live)))
        else:
            fuzz.step(fails=rng.randrange(0, 21) == 0)
        fuzz.check()
    fuzz.drain()
    totals = fuzz.scheduler.totals
    assert totals.preemptions > 0
    assert fuzz.scheduler.kv.num_swapped_out > 0
    assert (totals.prefix_cache_hit_tokens > 0) == caches
