"""Whether a request may begin: all limits of its tenant, key and model at once, all or nothing. Knows no engine and no HTTP.

Between the check and the taking there is no `await`, so in one event loop nothing can come between. What is reserved is the
prompt, which is known exactly, and the output that is to be expected; the expectation never changes the request itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from appliance.base.clock import Clock
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.allowances import Allowance, Hold
from appliance.metering.limits.decisions import SHADOW, LimitDecision, LimitKind
from appliance.metering.limits.first_reads import FirstReads
from appliance.metering.limits.needs import Needs, needs_of
from appliance.metering.limits.output_estimates import OutputEstimates
from appliance.metering.limits.owners import ALL_TENANTS, Owner, owners_of
from appliance.metering.limits.queue import (
    AdmissionQueue,
    Later,
    Refusals,
    Waiter,
    WaitObserver,
    may_wait,
    on_the_loop,
)
from appliance.metering.limits.rate_limits import RateLimitState, rate_limit_state
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.rules import rules_for
from appliance.metering.limits.running import Running
from appliance.metering.limits.saved_levels import Levels
from appliance.metering.limits.sums import SavedLevel, SumsReader
from appliance.metering.limits.windows import Moment
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal

NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What would happen to a request now: what each limit says, the tokens to be reserved, and whether it would wait."""

    decisions: Sequence[LimitDecision]
    tokens: int
    would_wait: bool

    @property
    def refusals(self) -> list[LimitDecision]:
        """Return what refuses; limits in shadow mode refuse nobody."""
        return [decision for decision in self.decisions if not decision.allowed and decision.mode != SHADOW]


class Admission:
    """Guards the limits of every tenant, key and model. Belongs to one event loop. A tenant without a currency of its own has
    its budget in `currency`, as have models."""

    def __init__(
        self,
        clock: Clock,
        sums: SumsReader,
        *,
        currency: str,
        calendar: BillingCalendar,
        later: Later = on_the_loop,
        waits: WaitObserver | None = None,
    ) -> None:
        self._clock = clock
        self._currency = currency
        self._calendar = calendar
        self._allowances: dict[Owner, Allowance] = {}
        self.output_estimates = OutputEstimates(sums, clock)
        self._live = Running(self._moment)
        self._unsaved: set[Allowance] = set()
        self._queue = AdmissionQueue(clock, later=later, observer=waits)
        self._first_reads = FirstReads(sums, self._allowances, self._live, self._moment)
        self._today: Moment | None = None

    async def admit(self, request: AdmissionRequest, wait_s: float = 0.0) -> Reservation:
        """Return what was reserved for the request, which must be settled or voided once.

        Raises RequestExceedsLimit, BudgetExceeded or RateLimitExceeded; then nothing was taken. After `retry_after_s` of the
        latter every limit that refused has room again, if nobody else takes it. If that is within `wait_s`, the request waits
        for it instead; a caller that is cancelled meanwhile takes nothing.
        """
        allowances = await self._allowances_of(request)
        # No await from here to the taking.
        needs = needs_of(request, allowances, self.output_estimates)
        answer = self._try(request, needs)
        if isinstance(answer, Reservation):
            return answer
        if not may_wait(answer.decisions, wait_s) or not self._queue.has_room(answer, request.tenant_id):
            raise answer.error
        tokens = {allowance: need.expected.tokens for allowance, need in needs.each.items()}
        return await self._queue.wait(request, answer, tokens, lambda waiter: self._try(request, needs, waiter), wait_s)

    @property
    def waiting(self) -> list[AdmissionRequest]:
        """Return the requests that wait for room."""
        return self._queue.waiting

    def reconfigure(self, principals: Mapping[str, Principal], policies: Mapping[str, ModelPolicy]) -> None:
        """Hold those who wait or run to the limits as they are now. Who waits tries again: a limit may be raised, or lowered
        below what they need. `principals` are by the id of the key, `policies` by model. A limit that has had no request yet
        counts from the next one on."""
        at, touched = self._moment(), set()
        for running in self._live:
            if (principal := principals.get(running.request.key_id)) is not None:
                running.hold_to_budget(principal.tenant.cut_at_budget)
        waiting = {(request.key_id, request.model) for request in self._queue.waiting}
        for key_id, model in waiting | {(running.request.key_id, running.request.model) for running in self._live}:
            principal = principals.get(key_id)
            if principal is None:
                continue
            rules = {rule.owner: rule for rule in rules_for(principal, model, policies.get(model), self._currency)}
            for owner in owners_of(principal.tenant.id, key_id, model):
                allowance, rule = self._allowances.get(owner), rules.get(owner)
                if allowance is None:
                    continue
                touched.add(allowance)
                if rule is not None:
                    allowance.bill_in(rule.currency)
                allowance.configure(rule.limits if rule else NO_LIMITS, rule.mode if rule else allowance.mode, at)
        self._queue.wake(touched)

    async def forecast(self, request: AdmissionRequest, wait_s: float = 0.0) -> Forecast:
        """Return what every limit would say now, and what would come of it with a patience of `wait_s`. Takes nothing."""
        allowances = await self._allowances_of(request)
        needs = needs_of(request, allowances, self.output_estimates)
        at = self._moment()
        decisions = [
            self._live.estimate(allowance, decision)
            for allowance, need in needs.each.items()
            for decision in allowance.decisions(need, at, self._queue.ahead(allowance))
        ]
        made = Forecast(decisions=decisions, tokens=needs.common.expected.tokens, would_wait=False)
        return replace(made, would_wait=bool(made.refusals) and may_wait(made.refusals, wait_s))

    def correct(self, correction: UsageEvent) -> None:
        """Count a correction that has just been committed, and let those try again who wait for what it gives back."""
        self._first_reads.corrected(correction)
        owners = owners_of(correction.tenant_id, correction.key_id, correction.model)
        known = [self._allowances[owner] for owner in owners if owner in self._allowances]
        for allowance in known:
            allowance.correct(correction)
        self._queue.wake(known)

    def start(self) -> None:
        """Begin to read how long earlier answers were."""
        self.output_estimates.start()

    async def stop(self) -> None:
        """End what reads the ledger."""
        await self.output_estimates.stop()
        await self._first_reads.stop()

    def refuse_waiting(self, error: Exception) -> None:
        """Tell every request that waits for room that nothing will come."""
        self._queue.refuse_all(error)

    def snapshot(self, principal: Principal, model: str | None = None) -> RateLimitState:
        """Return the state for the x-ratelimit headers: of limits that refuse. Changes nothing and reads no database.

        Limits of a principal may have been changed since it was read: of owners that are known those count that hold now.
        """
        at = self._moment()
        found: list[tuple[Allowance | None, Limits]] = []
        for rule in rules_for(principal, model, None, self._currency):
            allowance = self._allowances.get(rule.owner)
            if allowance is None and rule.mode != SHADOW:
                found.append((None, rule.limits))
            elif allowance is not None and allowance.enforces:
                found.append((allowance, allowance.limits))
        if model is not None and (shared := self._allowances.get(Owner("model", ALL_TENANTS, model))) is not None:
            found += [(shared, shared.limits)] if shared.enforces else []
        return rate_limit_state(found, at)

    def taken(self, owner: Owner) -> Mapping[LimitKind, int]:
        """Return what is taken of each limit per minute and of concurrent requests, whatever they are by now; of limits that
        never were, nothing is known. Changes nothing and reads no database."""
        allowance = self._allowances.get(owner)
        return {} if allowance is None else allowance.taken(self._moment())

    def unsaved_levels(self) -> Levels:
        """Return the levels of buckets that changed since the last call."""
        changed, self._unsaved = self._unsaved, set()
        at = self._moment()
        return {
            allowance.owner: {
                kind: SavedLevel(capacity=bucket.capacity, units=bucket.units(at.monotonic_s), saved_at=at.now)
                for kind, bucket in allowance.buckets.items()
            }
            for allowance in changed
        }

    def save_again(self, owners: Iterable[Owner]) -> None:
        """Hear that the levels of these owners could not be saved."""
        self._unsaved |= {self._allowances[owner] for owner in owners}

    async def _allowances_of(self, request: AdmissionRequest) -> list[Allowance]:
        """Return the allowances that hold for a request, as the limits are now. Of new ones the ledger is read once."""
        rules = rules_for(request.principal, request.model, request.policy, self._currency)
        self.output_estimates.lengths_of(request.key_id, request.model)
        for rule in rules:
            if rule.owner not in self._allowances:
                await self._first_reads.ensure_known(rules)
                break
        at = self._moment()
        allowances = [self._allowances[rule.owner] for rule in rules]
        for rule, allowance in zip(rules, allowances, strict=True):
            allowance.bill_in(rule.currency)
            allowance.configure(rule.limits, rule.mode, at)
        for beside in self._beside(request, allowances):
            beside.configure(NO_LIMITS, beside.mode, at)  # it had limits of its own for the model
        return allowances

    def _beside(self, request: AdmissionRequest, allowances: Collection[Allowance]) -> list[Allowance]:
        """Return what a request counts against beside the `allowances` whose limits hold for it: whose limits have gone, and
        may come back, and whose came while it waited."""
        known = map(self._allowances.get, owners_of(request.tenant_id, request.key_id, request.model))
        return [allowance for allowance in known if allowance is not None and allowance not in allowances]

    def _try(self, request: AdmissionRequest, needs: Needs, waiter: Waiter | None = None) -> Reservation | Refusals:
        """Reserve in every allowance, or in none and return why not. Who waits already comes before whoever comes now."""
        at = self._moment()
        refused: list[tuple[Allowance, LimitDecision]] = []
        overlooked: dict[Allowance, list[LimitDecision]] = {}
        for allowance, need in needs.each.items():
            refusals = allowance.refusals(need, at, self._queue.ahead(allowance, waiter))
            if allowance.enforces:
                refused += [(allowance, decision) for decision in refusals]
            elif refusals:
                overlooked[allowance] = refusals
        if refused:
            return Refusals(by=refused, estimate=self._live.estimate)
        reservation = Reservation(
            request,
            needs.common,
            self._take(request, needs, overlooked, at),
            admitted_at=at.now,
            moment=self._moment,
            on_end=self._ended,
            on_recorded=self._first_reads.recorded,
            overlooked=[decision for each in overlooked.values() for decision in each],
            cut_at_budget=request.principal.tenant.cut_at_budget,
        )
        self._live.add(reservation)
        self.output_estimates.began(request)
        self._unsaved.update(needs.each)
        return reservation

    def _take(self, request: AdmissionRequest, needs: Needs, overlooked: Collection[Allowance], at: Moment) -> list[Hold]:
        """Return what the request now holds of every allowance that it counts against. A bug in one leaves nothing taken."""
        holds: list[Hold] = []
        try:
            for allowance, need in needs.each.items():
                holds.append(allowance.overlook(at) if allowance in overlooked else allowance.take(need, at))
            for beside in self._beside(request, needs.each):
                beside.enter(at)
                holds.append(beside.join(needs.common, at.day))
        except Exception:
            for hold in holds:
                hold.void(at.monotonic_s)
            raise
        return holds

    def _ended(self, reservation: Reservation, output_tokens: int) -> None:
        self._live.discard(reservation)
        self._first_reads.ended(reservation)
        allowances = [hold.allowance for hold in reservation.holds]
        self._unsaved.update(allowances)
        self.output_estimates.ended(reservation.request, output_tokens)
        self._queue.wake(allowances)

    def _moment(self) -> Moment:
        """Return both readings of the clock. The calendar is asked once a day."""
        now, today = self._clock.now(), self._today
        if today is None or not today.now <= now < today.next_day_start:
            today = self._today = Moment(
                self._calendar.day_start(now), 0.0, self._calendar.day_of(now), self._calendar.next_day_start(now)
            )
        return Moment(now, self._clock.monotonic_s(), today.day, today.next_day_start)
