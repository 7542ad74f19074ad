"""The promise of a day's tokens and a month's budget, whatever the order of events: of all requests that such a limit admitted,
only the last one can exceed it, and only with output beyond what was expected of it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from datetime import date

import pytest

from appliance.base.errors import Refused
from appliance.base.money import PICOS_PER_MICRO
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.owners import Owner, owners_of
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.rules import Rule, rules_for
from appliance.metering.limits.sums import PeriodSums
from appliance.metering.limits.windows import Moment
from appliance.tenancy.model_policies import ModelPolicy
from appliance.tenancy.principals import Limits, Principal
from tests.support.clock import START, FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.factories import adjustment, price, principal
from tests.support.fake_timer import FakeTimer
from tests.support.ledgers import EUR, utc_admission

STEPS = 400
LONGEST = 900
PRICES = (
    price(prompt=1_000_000, cached=100_000, completion=3_000_000),
    price(prompt=0, cached=2_000_000, completion=1_000_000),
    dataclasses.replace(price(), currency="CHF"),
    None,
)
Tally = tuple[Owner, str, date]  # an owner's "tokens" of a day, or its cost of a month in a currency, in pico-units


@dataclasses.dataclass(eq=False, kw_only=True)
class Served:
    """A request that was admitted on `day`, with each limit that admitted it and what it needed of that; `used` has the tokens
    and the cost by currency that it was billed. A correction is an entry of its own, which no limit admits."""

    request: AdmissionRequest
    day: date
    limits: Mapping[Tally, tuple[int, int]]
    used: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def tallies(self) -> list[Tally]:
        """Return what it counts towards."""
        owners, month = owners_of(self.request.tenant_id, self.request.key_id, "demo"), self.day.replace(day=1)
        return [tally for owner in owners for tally in ((owner, "tokens", self.day), (owner, EUR, month))]


class Books:
    """The plain twin: what was ever used, in the order of admission."""

    def __init__(self) -> None:
        self.admitted: defaultdict[Tally, list[Served]] = defaultdict(list)
        self.billed: Counter[Tally] = Counter()

    def admit(self, served: Served) -> None:
        """Note an admission, or a correction."""
        for tally in served.tallies:
            self.admitted[tally].append(served)

    def bill(self, served: Served, used: Mapping[str, int]) -> None:
        """Note what a request used."""
        served.used.update(used)
        for tally in served.tallies:
            self.billed[tally] += used.get(tally[1], 0)

    def check(self) -> None:
        """Check that each request fitted at its admission beside everything before it, with what that used in the end."""
        for tally, admitted in self.admitted.items():
            total = 0
            for served in admitted:
                limit, need = served.limits.get(tally, (0, 0))
                assert need == 0 or total + need <= limit, f"{tally}: {total} before, need {need}, limit {limit}"
                total += served.used[tally[1]]


class Harness(EmptySums):
    """Admission that gets random requests and changes of limits, and is killed now and then; `read` is its ledger."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.clock = FakeClock()
        self.timer = FakeTimer(self.clock)
        self.books = Books()
        self.billed: list[Served] = []
        self.running: list[tuple[Served, Reservation]] = []
        self.tasks: list[asyncio.Task[None]] = []
        made = principal()
        self.people = [dataclasses.replace(made, key=dataclasses.replace(made.key, id=f"key {n}")) for n in range(2)]
        self.policy: ModelPolicy | None = None
        self.start()
        self.change_limits()

    async def read(
        self, currencies: Mapping[Owner, str], at: Moment, ended: Callable[[], Collection[str]]
    ) -> dict[Owner, PeriodSums]:
        await asyncio.sleep(0)
        billed = self.books.billed
        return {
            owner: PeriodSums(tokens_today=billed[owner, "tokens", at.day], cost_month_picos=billed[owner, EUR, at.month])
            for owner in currencies
        }

    def start(self) -> None:
        """Start a process that knows only the ledger."""
        self.admission = utc_admission(self.clock, self, call_later=self.timer.call_later)

    def change_limits(self) -> None:
        """Set other limits of the tenant, its keys and the model, enforced or in shadow mode."""
        tenant = dataclasses.replace(
            self.people[0].tenant,
            limits=self._limits(),
            limit_mode=self._mode(),
            model_limits={"demo": self._limits()} if self.chance.random() < 0.3 else {},
        )
        self.people = [
            Principal(tenant=tenant, key=dataclasses.replace(each.key, limits=self._limits(), limit_mode=self._mode()))
            for each in self.people
        ]
        policy = ModelPolicy(model="demo", limits=self._limits(), limit_mode=self._mode(), updated_at=START)
        self.policy = policy if self.chance.random() < 0.5 else None
        self.admission.reconfigure(
            {each.key.id: each for each in self.people}, {} if self.policy is None else {"demo": self.policy}
        )

    def _limits(self) -> Limits:
        return Limits(
            tokens_per_day=self.chance.choice([None, None, None, 0, 2000, 5000, 5000]),
            monthly_budget=self.chance.choice([None, None, None, 4000, 10_000]),
        )

    def _mode(self) -> str:
        return self.chance.choice(["enforce", "enforce", "enforce", "shadow"])

    def ask(self) -> None:
        """Send a request, which may wait for room."""
        asked = AdmissionRequest(
            principal=self.chance.choice(self.people),
            model="demo",
            prompt_tokens=self.chance.randrange(1, 200),
            max_output_tokens=self.chance.choice([None, None, 1, 300]),
            output_room=LONGEST,
            price=self.chance.choice(PRICES),
            num_answers=self.chance.choice([1, 1, 1, 3]),
            policy=self.policy,
        )
        self.tasks.append(asyncio.create_task(self._serve(asked, self.chance.choice([0.0, 0.0, 20.0]))))

    async def _serve(self, asked: AdmissionRequest, wait_s: float) -> None:
        try:
            reservation = await self.admission.admit(asked, wait_s)
        except Refused:
            return
        served = Served(request=asked, day=self.clock.now().date(), limits=self._limits_of(reservation))
        self.books.admit(served)
        self.running.append((served, reservation))

    def _limits_of(self, reservation: Reservation) -> dict[Tally, tuple[int, int]]:
        """Return the limits that have just admitted a request: without those first set while it waited."""
        request = reservation.request
        who = next(each for each in self.people if each.key.id == request.key_id)
        day = self.clock.now().date()
        limits: dict[Tally, tuple[int, int]] = {}
        modes = {rule.owner: rule.mode for rule in rules_for(request.principal, "demo", request.policy, EUR)}
        for rule in rules_for(who, "demo", self.policy, EUR):
            if rule.mode == "enforce" and rule.owner in modes:
                limits |= _needs_of(rule, reservation, day, expects_output=modes[rule.owner] == "enforce")
        return limits

    def end_one(self) -> None:
        """End a running request after any output, or before it was served."""
        served, reservation = self.running.pop(self.chance.randrange(len(self.running)))
        if self.chance.random() < 0.1:
            reservation.void()
        else:
            cached = self._bill(served)
            reservation.settle(served.used["tokens"], cached_tokens=cached)

    def _bill(self, served: Served) -> int:
        """Bill a request and return how much of its prompt was cached."""
        request = served.request
        longest = LONGEST if request.max_output_tokens is None else request.max_output_tokens
        each = longest if self.chance.random() < 0.8 else min(self.chance.randrange(6), longest)
        cached, output = self.chance.choice([0, request.prompt_tokens]), request.num_answers * each
        cost = {} if request.currency is None else {request.currency: request.cost(cached, output)}
        self.books.bill(served, {"tokens": request.prompt_tokens + output, **cost})
        self.billed.append(served)
        return cached

    def correct(self) -> None:
        """Return something of what a request was billed."""
        if self.billed:
            served = self.billed.pop(self.chance.randrange(len(self.billed)))
            tokens, picos = (-self.chance.randrange(served.used[kind] + 1) for kind in ("tokens", EUR))
            who, day = served.request.principal, served.day
            correction = Served(request=served.request, day=day, limits={})
            self.books.admit(correction)
            self.books.bill(correction, {"tokens": tokens, EUR: picos})
            self.admission.correct(adjustment(who, prompt_tokens=tokens, cost_picos=picos, billing_day=day))

    async def kill(self) -> None:
        """Kill the process: what ran is billed after any output, who waited gets nothing."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for served, _reservation in self.running:
            self._bill(served)
        self.running.clear()
        self.start()


def _needs_of(rule: Rule, reservation: Reservation, day: date, *, expects_output: bool) -> dict[Tally, tuple[int, int]]:
    """Return a rule's limits of the day and the month, each with the need of a request: at least that of its prompt."""
    request, expected, limits = reservation.request, reservation.need.expected, rule.limits
    needs: dict[Tally, tuple[int, int]] = {}
    if limits.tokens_per_day is not None:
        needs[rule.owner, "tokens", day] = limits.tokens_per_day, expected.tokens if expects_output else request.prompt_tokens
    if limits.monthly_budget is not None and request.currency == EUR:
        picos = expected.cost_picos if expects_output else request.cost(0, 0)
        needs[rule.owner, EUR, day.replace(day=1)] = limits.monthly_budget * PICOS_PER_MICRO, picos
    return needs


@pytest.mark.parametrize("seed", range(30))
async def test_only_the_last_request_that_a_limit_admitted_can_exceed_it_in_any_order_of_events(seed: int) -> None:
    harness = Harness(seed)
    for _ in range(STEPS):
        dice = harness.chance.random()
        if dice < 0.5:
            harness.ask()
        elif dice < 0.9:
            if harness.running:
                harness.end_one()
        elif dice < 0.93:
            harness.change_limits()
        elif dice < 0.99:
            harness.correct()
        else:
            await harness.kill()
        await harness.timer.settle()
        await harness.timer.advance(86_400.0 if harness.chance.random() < 0.05 else harness.chance.choice([0, 1.0, 30.0]))
    while harness.running:
        harness.end_one()
        await harness.timer.settle()
    await harness.timer.advance(20.0)
    harness.books.check()
