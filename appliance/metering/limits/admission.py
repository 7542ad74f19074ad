"""Admission control: checks a request against all limits of its tenant, key and model, all or nothing. No engine, no HTTP.

Check and reservation are atomic: there is no `await` between them, and everything runs in one event loop. A request reserves
its prompt, whose length is known exactly, and its expected output; the estimate never changes the request itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.base.clock import Clock
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.allowance_loader import AllowanceLoader
from appliance.metering.limits.allowances import Allowance, Hold
from appliance.metering.limits.decisions import SHADOW, LimitDecision, LimitKind
from appliance.metering.limits.limit_waits import LimitWait
from appliance.metering.limits.needs import Needs, needs_of
from appliance.metering.limits.output_estimates import OutputEstimates
from appliance.metering.limits.owners import ALL_TENANTS, Owner, owners_of
from appliance.metering.limits.queue import AdmissionQueue, CallLater, Refusals, WaitObserver, call_on_loop, may_wait
from appliance.metering.limits.rate_limits import RateLimitState, rate_limit_state
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.rules import Rule, rules_for
from appliance.metering.limits.running_requests import RunningRequests
from appliance.metering.limits.saved_levels import Levels
from appliance.metering.limits.sums import SavedLevel, SumsReader
from appliance.metering.limits.windows import Moment
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal

NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsDryRun:
    """What the limits would decide on a request: each decision, and the tokens it would reserve. `patience_s` is how long it
    may wait for room."""

    decisions: Sequence[LimitDecision]
    tokens: int
    patience_s: float

    @property
    def refusals(self) -> list[LimitDecision]:
        """Return the refusing decisions, without those of limits in shadow mode."""
        return [decision for decision in self.decisions if not decision.allowed and decision.mode != SHADOW]

    @property
    def would_wait(self) -> bool:
        """Return whether the request is refused now and would wait for room."""
        return bool(self.refusals) and may_wait(self.refusals, self.patience_s)


class Admission:
    """Enforces the limits of every tenant, key and model. Belongs to one event loop. Budgets of models, and of tenants without
    a currency of their own, are in `currency`."""

    def __init__(
        self,
        clock: Clock,
        sums: SumsReader,
        *,
        currency: str,
        calendar: BillingCalendar,
        call_later: CallLater = call_on_loop,
        waits: WaitObserver | None = None,
    ) -> None:
        self._clock = clock
        self._currency = currency
        self._calendar = calendar
        self._allowances: dict[Owner, Allowance] = {}
        self.output_estimates = OutputEstimates(sums, clock)
        self._running = RunningRequests(self._moment)
        self._unsaved: set[Allowance] = set()
        self._queue = AdmissionQueue(clock, call_later=call_later, observer=waits)
        self._loader = AllowanceLoader(sums, self._allowances, self._running, self._moment)
        self._today: Moment | None = None

    async def admit(self, request: AdmissionRequest, wait_s: float = 0.0, wait: LimitWait | None = None) -> Reservation:
        """Return the request's reservation, which must be settled or voided exactly once.

        Raises RequestExceedsLimit, BudgetExceeded or RateLimitExceeded; then nothing was reserved. After `retry_after_s` of the
        latter, every limit that refused has room again unless others have used it. If that is within `wait_s`, the request
        waits instead, and `wait` receives its place and for how long; a caller that is cancelled meanwhile reserves nothing.
        With the `wait` of an earlier admission that was voided, the request has the place and the deadline of that one.
        """
        allowances = await self._allowances_of(request)
        wait = LimitWait() if wait is None else wait

        def attempt() -> Reservation | Refusals:
            return self._try(request, allowances, wait.arrival)

        result = attempt()
        if isinstance(result, Reservation):
            return result
        left_s = wait_s if wait.arrival is None else wait.deadline_s - self._clock.monotonic_s()
        has_place = wait.arrival is not None or self._queue.has_room(result, request.tenant_id)
        if not has_place or not may_wait(result.decisions, left_s):
            raise result.error
        return await self._queue.wait(result, attempt, wait, wait_s)

    def reconfigure(self, principals: Mapping[str, Principal], policies: Mapping[str, ModelPolicy]) -> None:
        """Apply changed limits to waiting and running requests. Waiting requests try again, since a limit may have been raised,
        or lowered below their need. `principals` are by key id, `policies` by model. Allowances that are not loaded yet take
        their limits from the next request."""
        touched: set[Allowance] = set()
        for running in self._running:
            if (principal := principals.get(running.request.key_id)) is not None:
                running.set_cut_at_budget(principal.tenant.cut_at_budget)
        waiting = {(waiter.request.key_id, waiter.request.model) for waiter in self._queue.waiting}
        for key_id, model in waiting | {(running.request.key_id, running.request.model) for running in self._running}:
            if (principal := principals.get(key_id)) is not None:
                loaded = self._loaded(principal.tenant.id, key_id, model)
                self._configure(loaded, self.rules(principal, model, policies.get(model)))
                touched.update(loaded)
        self._queue.wake(touched)

    def rules(self, principal: Principal, model: str, policy: ModelPolicy | None) -> list[Rule]:
        """Return the limits that apply to the principal's requests for a model with this policy."""
        return rules_for(principal, model, policy, self._currency)

    async def dry_run(self, request: AdmissionRequest, wait_s: float = 0.0) -> LimitsDryRun:
        """Return every limit's decision on a request sent now, and whether it would wait up to `wait_s`. Reserves nothing."""
        allowances = await self._allowances_of(request)
        needs = needs_of(request, allowances, self.output_estimates)
        at = self._moment()
        decisions = [
            self._running.estimate(allowance, decision)
            for allowance, need in needs.by_allowance.items()
            for decision in allowance.decisions(need, at, self._queue.ahead(allowance))
        ]
        return LimitsDryRun(decisions=decisions, tokens=needs.enforced.expected.tokens, patience_s=wait_s)

    def correct(self, correction: UsageEvent) -> None:
        """Count a correction that has just been committed, and retry the requests that wait for what it returns."""
        self._loader.note_correction(correction)
        loaded = self._loaded(correction.tenant_id, correction.key_id, correction.model)
        for allowance in loaded:
            allowance.correct(correction)
        self._queue.wake(loaded)

    def start(self) -> None:
        """Start reading the lengths of earlier answers in the background."""
        self.output_estimates.start()

    async def stop(self) -> None:
        """Stop the tasks that read the ledger."""
        await self.output_estimates.stop()
        await self._loader.stop()

    def snapshot(self, principal: Principal, model: str | None = None) -> RateLimitState:
        """Return the state for the x-ratelimit headers, over enforced limits only. Changes nothing and reads no database.

        The principal's limits may have changed since it was read: loaded allowances report their current ones.
        """
        at = self._moment()
        found: list[tuple[Allowance | None, Limits]] = []
        for rule in rules_for(principal, model, None, self._currency):
            allowance = self._allowances.get(rule.owner)
            if allowance is None and rule.mode != SHADOW:
                found.append((None, rule.limits))
            elif allowance is not None and allowance.is_enforced:
                found.append((allowance, allowance.limits))
        shared = None if model is None else self._allowances.get(Owner("model", ALL_TENANTS, model))
        if shared is not None and shared.is_enforced:
            found.append((shared, shared.limits))
        return rate_limit_state(found, at)

    def in_use(self, owner: Owner) -> Mapping[LimitKind, int]:
        """Return how much of each limit per minute that was ever set, and of concurrency, an owner has in use; empty if it is
        not loaded. Changes nothing and reads no database."""
        allowance = self._allowances.get(owner)
        return {} if allowance is None else allowance.in_use(self._moment())

    def unsaved_levels(self) -> Levels:
        """Return the levels of the buckets that changed since the last call."""
        changed, self._unsaved = self._unsaved, set()
        at = self._moment()
        return {
            allowance.owner: {
                kind: SavedLevel(capacity=bucket.capacity, units=bucket.units(at.monotonic_s), saved_at=at.now)
                for kind, bucket in allowance.buckets.items()
            }
            for allowance in changed
        }

    def mark_unsaved(self, owners: Iterable[Owner]) -> None:
        """Return the levels of these owners again at the next call: they could not be saved."""
        self._unsaved |= {self._allowances[owner] for owner in owners}

    async def _allowances_of(self, request: AdmissionRequest) -> list[Allowance]:
        """Return the allowances that apply to a request, with current limits. New ones are first loaded from the ledger."""
        rules = self.rules(request.principal, request.model, request.policy)
        self.output_estimates.lengths_of(request.key_id, request.model)  # begins to read them while the allowances are loaded
        if any(rule.owner not in self._allowances for rule in rules):
            await self._loader.ensure_loaded(rules)
        self._configure(self._loaded(request.tenant_id, request.key_id, request.model), rules)
        return [self._allowances[rule.owner] for rule in rules]

    def _loaded(self, tenant_id: str, key_id: str, model: str) -> list[Allowance]:
        """Return the loaded allowances that a request of this key for this model counts towards."""
        owners = owners_of(tenant_id, key_id, model)
        return [self._allowances[owner] for owner in owners if owner in self._allowances]

    def _configure(self, allowances: Iterable[Allowance], rules: Iterable[Rule]) -> None:
        """Apply the current limits; those of an allowance without a rule were removed."""
        at, by_owner = self._moment(), {rule.owner: rule for rule in rules}
        for allowance in allowances:
            rule = by_owner.get(allowance.owner)
            if rule is None:
                allowance.configure(NO_LIMITS, allowance.mode, at)
            else:
                allowance.currency = rule.currency
                allowance.configure(rule.limits, rule.mode, at)

    def _try(self, request: AdmissionRequest, allowances: Sequence[Allowance], arrival: int | None) -> Reservation | Refusals:
        """Reserve in every allowance, or in none and return why. A new request (`arrival` None) leaves room for all waiters.
        Awaits nothing, so that nothing happens between the check and the reservation."""
        needs = needs_of(request, allowances, self.output_estimates)  # at each attempt: limits may have changed
        at = self._moment()
        refused: list[tuple[Allowance, LimitDecision]] = []
        shadow_refusals: dict[Allowance, list[LimitDecision]] = {}
        for allowance, need in needs.by_allowance.items():
            refusals = allowance.refusals(need, at, self._queue.ahead(allowance, arrival))
            if allowance.is_enforced:
                refused += [(allowance, decision) for decision in refusals]
            elif refusals:
                shadow_refusals[allowance] = refusals
        if refused:
            return Refusals(
                request=request,
                needs=needs,
                by=refused,
                day_left_s=(at.next_day_start - at.now).total_seconds(),
                estimate=self._running.estimate,
            )
        reservation = Reservation(
            request,
            needs.enforced,
            self._take(request, needs, shadow_refusals.keys(), at),
            admitted_at=at.now,
            moment=self._moment,
            on_end=self._ended,
            on_recorded=self._loader.note_recorded,
            shadow_refusals=[decision for refusals in shadow_refusals.values() for decision in refusals],
            cut_at_budget=request.principal.tenant.cut_at_budget,
        )
        self._running.add(reservation)
        self.output_estimates.note_started(request)
        self._unsaved.update(needs.by_allowance)
        return reservation

    def _take(self, request: AdmissionRequest, needs: Needs, shadow_refusing: Collection[Allowance], at: Moment) -> list[Hold]:
        """Take from every allowance that the request counts towards. On an unexpected error, everything is given back."""
        holds: list[Hold] = []
        try:
            for allowance, need in needs.by_allowance.items():
                holds.append(allowance.take_in_shadow(need, at) if allowance in shadow_refusing else allowance.take(need, at))
            for other in self._loaded(request.tenant_id, request.key_id, request.model):
                if other not in needs.by_allowance:  # limits that were removed and may be set again, or set while it waited
                    other.enter(at)
                    holds.append(other.adopt(needs.enforced, at.day))
        except Exception:
            for hold in holds:
                hold.void(at.monotonic_s)
            raise
        return holds

    def _ended(self, reservation: Reservation, output_tokens: int) -> None:
        self._running.discard(reservation)
        self._loader.note_ended(reservation)
        allowances = [hold.allowance for hold in reservation.holds]
        self._unsaved.update(allowances)
        self.output_estimates.note_ended(reservation.request, output_tokens)
        self._queue.wake(allowances)

    def _moment(self) -> Moment:
        """Read both clocks. The calendar is computed once a day."""
        now, today = self._clock.now(), self._today
        if today is None or not today.now <= now < today.next_day_start:
            today = self._today = Moment(
                self._calendar.day_start(now), 0.0, self._calendar.day_of(now), self._calendar.next_day_start(now)
            )
        return Moment(now, self._clock.monotonic_s(), today.day, today.next_day_start)
