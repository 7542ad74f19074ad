"""A scheduler with fakes for everything around it, and random scripts for it: shared by property tests and the 10,000 scripts.

    python -m tests.support.scheduler_fuzz 10000 [first seed]

runs that many random scripts and prints the largest service gap as a share of the proven bound.
"""

from __future__ import annotations

import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from engine.protocol import FinishReason, Priority, SamplingParams, TokenEvent
from engine.scheduling.accounts import Account, account_of
from engine.scheduling.backlog import Backlog
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.costs import TokenCosts
from engine.scheduling.drafting import NO_DRAFT, Draft, Drafter
from engine.scheduling.fair_policy import SCAN_ACCOUNTS_MAX, FairPolicy
from engine.scheduling.lead_tracking import FairSettings
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policy import Start
from engine.scheduling.prefill_order import scan_limit
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest, StepOutput
from engine.scheduling.scheduler import Scheduler

END_TOKEN = 0
STEPS_TO_DRAIN_MAX = 6000
NUM_ACTIONS = 120
"""Of a script."""
COSTS = TokenCosts(prefill_token_ps=1000, prefill_pair_ps=20, decode_token_ps=1300, decode_context_ps=50, swap_in_block_ps=400)
Content = tuple[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class SchedulerSetup:
    """Sizes, tenants and options of one script."""

    num_blocks: int = 12
    block_size: int = 2
    max_num_seqs: int = 4
    spare_budget: int = 6
    caches: bool = True
    host_blocks: int = 0
    drafts: bool = False
    global_prefix: tuple[int, ...] = ()
    protected_percent: int = 0
    quantum_tokens: int = 8
    tenants: tuple[tuple[str, int], ...] = (("alice", 1), ("bob", 2))

    @property
    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_seqs + self.spare_budget,
            max_model_len=self.num_blocks * self.block_size,
            block_size=self.block_size,
        )

    @property
    def settings(self) -> FairSettings:
        quantum_ps = COSTS.prefill_ps(0, self.quantum_tokens)
        return FairSettings(quantum_ps=quantum_ps, hysteresis_ps=2 * quantum_ps, cap_ps=4 * quantum_ps)

    def scheduler(self, clock: Callable[[], float], drafter: Drafter | None) -> Scheduler:
        pool = BlockPool(self.num_blocks, protected_percent=self.protected_percent)
        prefix_cache = PrefixCache(pool, self.block_size) if self.caches else None
        if prefix_cache is not None and self.global_prefix:
            prefix_cache.share_globally(self.global_prefix)
        return Scheduler(
            self.limits,
            pool,
            clock=clock,
            costs=COSTS,
            prefix_cache=prefix_cache,
            num_host_blocks=self.host_blocks,
            drafter=drafter,
            policy=partial(FairPolicy, settings=self.settings),
        )

    def meter(self) -> GapMeter:
        return GapMeter(self.settings.quantum_ps, self.settings.cap_ps, math.lcm(*(weight for _, weight in self.tenants)))


class FakeCache:
    """Content of device and host blocks: (owner, tokens up to here) of each written slot, in place of keys and values."""

    def __init__(self, setup: SchedulerSetup) -> None:
        self._size = setup.block_size
        self._global_prefix = setup.global_prefix
        self._caches = setup.caches
        self._device: dict[int, Content] = {}
        self._host: dict[int, Content] = {}

    def move(self, batch: ScheduledBatch) -> None:
        moves = batch.moves
        written = {host for _, host in moves.swap_out}
        assert not written & {host for host, _ in moves.swap_in}, "a host block is written and read in the same step"
        assert len({target for _, target in moves.swap_in}) == len(moves.swap_in), "two contents for one block"
        for pairs, source, target in (
            (moves.swap_out, self._device, self._host),
            (moves.swap_in, self._host, self._device),
            (moves.copies, self._device, self._device),
        ):
            for first, second in pairs:
                for offset in range(self._size):
                    if (content := source.get(first * self._size + offset)) is not None:
                        target[second * self._size + offset] = content

    def compute(self, batch: ScheduledBatch) -> None:
        """Write the slots of the batch, then check that every request reads only its own prefix."""
        targets: set[int] = set()
        for item in batch.items:
            tokens = [*item.request.token_ids, *item.draft_token_ids]
            for position in range(item.start, item.start + item.num_tokens):
                slot = self._slot(item.request, position)
                assert slot not in targets, "two requests write the same slot"
                targets.add(slot)
                self._device[slot] = self._content(item.request, tokens, position)
        for item in batch.items:
            tokens = [*item.request.token_ids, *item.draft_token_ids]
            for position in range(item.start + item.num_tokens):
                held = self._device.get(self._slot(item.request, position), ("nobody", ()))
                owner, prefix = self._content(item.request, tokens, position)
                assert held[1] == prefix, f"{item.request.request_id} reads another prefix"
                assert held[0] == owner or self._is_global(tokens, position), f"{item.request.request_id} reads of others"

    def _slot(self, request: Request, position: int) -> int:
        return request.block_table[position // self._size] * self._size + position % self._size

    def _content(self, request: Request, tokens: list[int], position: int) -> Content:
        owner = request.tenant_id if self._caches else f"{request.tenant_id} {request.request_id}"
        return owner, tuple(tokens[: position + 1])

    def _is_global(self, tokens: list[int], position: int) -> bool:
        """Whether the prefix is globally shared: a fork may hold the beginning of such a block, filled by its parent."""
        num_global = len(self._global_prefix) // self._size * self._size
        return self._caches and position < num_global and tuple(tokens[: position + 1]) == self._global_prefix[: position + 1]


class RandomDrafter:
    """Drafts random tokens, and counts drafted and accepted ones."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.num_drafted = self.num_accepted = 0

    def pays(self, num_running: int) -> bool:
        return True

    def draft(self, request: Request, *, limit: int, num_running: int) -> Draft:
        depth = self._rng.randint(0, min(limit, 3))
        return Draft(depth, [self._rng.randrange(1, 3) for _ in range(depth)]) if depth else NO_DRAFT

    def read(self, num_running: int) -> None:
        """Do nothing: it reads no text."""

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted


@dataclass
class GapMeter:
    """Service per weight, computed from batches alone, of accounts that are backlogged at the same time.

    `gap` is the largest difference between two accounts over any interval in which both were backlogged throughout. `gap`,
    `bound` and `largest_step` are in units of 1 / `scale` picoseconds, so that division by any weight is exact.
    """

    quantum_ps: int
    cap_ps: int
    scale: int
    service: dict[Account, int] = field(default_factory=lambda: defaultdict(int))
    largest_step: int = 0
    recovery_ps: int = 0
    gap: int = 0
    _ranges: dict[tuple[Account, Account], tuple[int, int]] = field(default_factory=dict)

    @property
    def bound(self) -> int:
        """2(U + Q), where U = cap + the largest service of one account in one step, or a secured request beyond the cap."""
        return 2 * (self.scale * (self.cap_ps + self.recovery_ps + self.quantum_ps) + self.largest_step)

    def charge(self, batch: ScheduledBatch) -> None:
        step: dict[Account, int] = defaultdict(int)
        arrived = {target for _, target in batch.moves.swap_in}
        for item in batch.decodes:
            step[account_of(item.request)] += COSTS.decode_ps(1, item.start)
            step[account_of(item.request)] += COSTS.prefill_ps(item.start + 1, item.num_draft_tokens)
        for item in batch.prefills:
            step[account_of(item.request)] += COSTS.prefill_ps(item.start, item.num_tokens)
            swapped_in = arrived.intersection(item.request.block_table)
            arrived -= swapped_in
            step[account_of(item.request)] += len(swapped_in) * COSTS.swap_in_block_ps
        for account, cost in step.items():
            self.service[account] += cost
            self.largest_step = max(self.largest_step, cost * self.scale // account.weight)

    def observe(self, backlogged: set[Account], joined: set[Account]) -> None:
        """`joined`: accounts whose backlog began since the last call."""
        chosen = sorted(backlogged, key=lambda account: (account.priority, account.tenant_id))[:10]
        served = {account: self.service[account] * self.scale // account.weight for account in chosen}
        ranges: dict[tuple[Account, Account], tuple[int, int]] = {}
        for number, one in enumerate(chosen):
            for other in chosen[number + 1 :]:
                if one.priority is not other.priority:
                    continue
                difference = served[one] - served[other]
                low, high = difference, difference
                if (one, other) in self._ranges and not {one, other} & joined:
                    low, high = self._ranges[one, other]
                    low, high = min(low, difference), max(high, difference)
                ranges[one, other] = low, high
                self.gap = max(self.gap, high - low)
        self._ranges = ranges
        assert self.gap <= self.bound, f"service gap {self.gap} above the bound {self.bound}"


class SchedulerFuzz:
    """Operations on a scheduler (add, fork, abort, preempt, fail, expire, step), in any order; `check` must hold after each."""

    def __init__(self, setup: SchedulerSetup, rng: random.Random) -> None:
        self.setup = setup
        self.rng = rng
        self.limits = setup.limits
        self.now_s = 0.0
        self.drafter = RandomDrafter(rng) if setup.drafts else None
        self.scheduler = setup.scheduler(lambda: self.now_s, self.drafter)
        assert isinstance(self.scheduler.policy, FairPolicy)
        self.policy = self.scheduler.policy
        self.cache = FakeCache(setup)
        self.meter = setup.meter()
        self.live: dict[Request, None] = {}
        self.ended: dict[Request, TokenEvent] = {}
        self.delivered: dict[Request, int] = {}
        self.num_delivered_drafts = 0
        self.joined: set[Account] = set()  # those whose backlog began since the last look
        for backlog in self.policy.backlogs.values():
            self._note_joins(backlog)
        self.num_prompts = 0

    def _note_joins(self, backlog: Backlog) -> None:
        join = backlog.join

        def noted(account: Account, step: int) -> None:
            if account.round is None:
                self.joined.add(account)
            join(account, step)

        backlog.join = noted  # type: ignore[method-assign]

    def add(
        self, tenant: int, token_ids: list[int], max_total_tokens: int, *, priority: Priority = Priority.STANDARD,
        deadline_s: float | None = None, num_answers: int = 1,
    ) -> list[Request]:  # fmt: skip
        tenant_id, weight = self.setup.tenants[tenant % len(self.setup.tenants)]
        self.num_prompts += 1
        requests: list[Request] = []
        for index in range(num_answers):
            request = Request(
                request_id=str(self.num_prompts),
                index=index,
                tenant_id=tenant_id,
                weight=weight,
                priority=priority,
                queue_deadline_s=deadline_s,
                sampling=SamplingParams(seed=1),
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                max_total_tokens=max_total_tokens,
                stop_ids=frozenset({END_TOKEN}),
                arrived_s=self.now_s,
                forked_from=requests[0] if requests else None,
            )
            self.live[request] = None
            self.delivered[request] = 0
            self.scheduler.add(request)
            requests.append(request)
        return requests

    def abort(self, request: Request) -> None:
        event = self.scheduler.abort(request)
        assert (event is not None) == (request in self.live)
        if event is not None:
            assert event.finish_reason is FinishReason.ABORTED
            self.record_event(request, event)

    def preempt(self) -> None:
        running = self.scheduler.running
        if running:
            self.scheduler.preempt(self.rng.choice(running))

    def expire(self) -> None:
        by_id = {(request.request_id, request.index): request for request in self.live}
        for event in self.scheduler.expire():
            request = by_id[event.request_id, event.index]
            assert event.finish_reason is FinishReason.DEADLINE
            assert request.queue_deadline_s is not None
            assert request.queue_deadline_s <= self.now_s
            assert request.num_output_tokens == 0
            self.record_event(request, event)

    def step(self, *, fails: bool = False) -> None:
        """One step; its first request fails if `fails`."""
        if not self.scheduler.has_requests:
            return
        self.now_s += 1.0
        batch = self.scheduler.schedule()
        assert 0 < batch.num_tokens <= self.limits.max_num_batched_tokens
        assert batch.num_tokens == sum(item.num_tokens for item in batch.items)
        assert len({item.request for item in batch.items}) == len(batch.items)
        self.check_work_is_conserved(batch)
        self.cache.move(batch)
        self.cache.compute(batch)
        self.meter.charge(batch)
        self.observe_gap()
        requests = {(item.request.request_id, item.request.index): item.request for item in batch.items}
        outputs = [self.output(item) for item in batch.items]
        if fails:
            outputs[0] = StepOutput(error="broken")
        accepted = {item.request: len(output.token_ids) - 1 for item, output in zip(batch.items, outputs, strict=True)}
        for event in self.scheduler.apply(batch, outputs):
            request = requests[event.request_id, event.index]
            self.num_delivered_drafts += max(0, min(len(event.token_ids), accepted[request]))
            self.record_event(request, event)

    def output(self, item: ScheduledRequest) -> StepOutput:
        if not item.samples:
            return StepOutput()
        num_accepted = self.rng.randint(0, item.num_draft_tokens)
        return StepOutput([*item.draft_token_ids[:num_accepted], self.rng.choice((END_TOKEN, 1, 1, 1, 2, 2, 2))])

    def record_event(self, request: Request, event: TokenEvent) -> None:
        assert request not in self.ended, "an event after the last one"
        assert (event.request_id, event.index) == (request.request_id, request.index)
        self.delivered[request] += len(event.token_ids)
        assert event.num_output_tokens == self.delivered[request] == request.num_output_tokens
        assert event.num_rejected_draft_tokens == request.num_rejected_draft_tokens
        if event.finish_reason is not None:
            assert request.status is RequestStatus.FINISHED
            assert request.num_tokens <= request.max_total_tokens
            self.ended[request] = event
            del self.live[request]

    def drain(self) -> None:
        """Step until idle: every request must end, whatever happened before."""
        for _ in range(STEPS_TO_DRAIN_MAX):
            if not self.scheduler.has_requests:
                break
            self.step()
            self.check()
        assert not self.live, f"starved: {[request.request_id for request in self.live]}"
        assert self.scheduler.pool.num_used == 0

    def check(self) -> None:
        self.scheduler.check_invariants()
        assert set(self.scheduler.live()) == set(self.live)
        assert self.scheduler.totals.generation_tokens == sum(self.delivered.values())
        assert self.scheduler.accounts.aggregate.service_at(self.scheduler.accounts.step) == sum(self.meter.service.values())
        for account in self.scheduler.accounts:
            served = account.service_at(self.scheduler.accounts.step)
            assert served == self.meter.service[account], f"{account.tenant_id} was charged {served}"
        if self.drafter is not None:
            assert self.scheduler.totals.accepted_draft_tokens == self.num_delivered_drafts
            rejected = sum(request.num_rejected_draft_tokens for request in (*self.live, *self.ended))
            assert rejected == self.drafter.num_drafted - self.drafter.num_accepted
        self.observe_gap()

    def observe_gap(self) -> None:
        backlogged = {account for backlog in self.policy.backlogs.values() for account in backlog}
        step, policy = self.scheduler.accounts.step, self.policy
        for account in backlogged:
            lead = policy.backlogs[account.priority].lead_at(account, step)
            assert -lead <= policy.settings.quantum_ps * account.weight, "a deficit above the quantum"
        assert backlogged.issuperset(policy._leads.ahead), "an account without a backlog is kept as being ahead"
        self.meter.recovery_ps = policy.recovery_max_ps
        self.meter.observe(backlogged, self.joined)
        self.joined = set()

    def check_work_is_conserved(self, batch: ScheduledBatch) -> None:
        """Check that no seat is idle while a request could start, except of accounts that are ahead or behind a reservation."""
        scheduler, policy = self.scheduler, self.policy
        has_seat = scheduler.num_running < self.limits.max_num_seqs
        if not has_seat or batch.num_tokens == self.limits.max_num_batched_tokens or all_wait_for_one(policy):
            return
        if batch.moves.swap_out:  # blocks swapped out by this step were not on the host yet when it was scheduled
            return
        for backlog in policy.backlogs.values():
            accounts = list(backlog)
            if len(accounts) > SCAN_ACCOUNTS_MAX:
                continue
            for account in accounts:
                if not account.is_paused and not policy.is_ahead(account):
                    for request in islice(account.waiting, scan_limit(len(accounts))):
                        assert scheduler.admission.can_start(request) is not Start.NOW, (
                            f"{request.request_id} could have started"
                        )


def all_wait_for_one(policy: FairPolicy) -> bool:
    """Whether all others must wait for one request that, or whose class, was overtaken too often."""
    return policy._reserved is not None or policy._overdue_class() is not None


def random_setup(rng: random.Random) -> SchedulerSetup:
    num_tenants = rng.choice((2, 2, 3, 4, 8, 16, 64))
    return SchedulerSetup(
        num_blocks=rng.randint(3, 40),
        block_size=rng.choice((1, 2, 4)),
        max_num_seqs=rng.randint(1, 12),
        spare_budget=rng.randint(0, 16),
        caches=rng.random() < 0.7,
        host_blocks=rng.choice((0, 0, 3, 20)),
        drafts=rng.random() < 0.3,
        global_prefix=rng.choice(((), (), (1, 1, 2, 1, 1, 2, 1, 1))),
        protected_percent=rng.choice((0, 0, 50)),
        quantum_tokens=rng.choice((2, 8, 16)),
        tenants=tuple((f"t{number}", rng.choice((1, 2, 4))) for number in range(num_tenants)),
    )


def random_prompt(rng: random.Random, length: int) -> list[int]:
    """A prompt with one of few beginnings, so that prefixes are shared."""
    period = rng.choice((2, 3, 3, 5))
    return [2 if position % period == period - 1 else 1 for position in range(length)]


def run_random_script(seed: int) -> SchedulerFuzz:
    """Run one script to the end. Some tenants flood, others send requests now and then."""
    rng = random.Random(seed)
    fuzz = SchedulerFuzz(random_setup(rng), rng)
    longest = fuzz.limits.max_model_len
    floods = rng.sample(range(64), rng.randint(1, 64))
    mixed = rng.random() < 0.3
    for _ in range(NUM_ACTIONS):
        action = rng.random()
        if action < 0.45 and longest > 1 and len(fuzz.live) < 60:
            tenant = rng.choice(floods) if rng.random() < 0.8 else rng.randrange(64)
            length = rng.randint(1, longest - 1) if rng.random() < 0.3 else rng.randint(1, max(1, longest // 4))
            fuzz.add(
                tenant,
                random_prompt(rng, length),
                min(longest, length + rng.choice((1, 2, 5, 20, longest))),
                priority=rng.choice(list(Priority)) if mixed else Priority.STANDARD,
                deadline_s=fuzz.now_s + rng.randint(0, 20) if rng.random() < 0.1 else None,
                num_answers=rng.choice((1, 1, 1, 2, 3)),
            )
        elif action < 0.48 and fuzz.live:
            fuzz.abort(rng.choice(list(fuzz.live)))
        elif action < 0.5:
            fuzz.preempt()
        elif action < 0.52:
            fuzz.expire()
        else:
            fuzz.step(fails=rng.random() < 0.02)
        fuzz.check()
    fuzz.drain()
    return fuzz


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    shares: list[float] = []
    for seed in range(first, first + count):
        try:
            meter = run_random_script(seed).meter
        except BaseException:
            sys.stdout.write(f"seed {seed} failed\n")
            raise
        shares.append(float(meter.gap / meter.bound))
    shares.sort()
    worst, p99 = shares[-1], shares[int(len(shares) * 0.99)]
    sys.stdout.write(f"{count} scripts: gap / bound at most {worst:.3f}, 99 % of scripts below {p99:.3f}\n")


if __name__ == "__main__":
    main()
