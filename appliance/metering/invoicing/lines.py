"""From sums of usage events to the lines and totals of an invoice: pure integers, rounded once per line.

Knows no database and no clock. Never decides what an event costs, but checks that the lines of a group of events are the exact
sum of the costs that the ledger stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from appliance.base.errors import CurrenciesMixed
from appliance.base.money import PICOS_PER_MICRO, micros_of_picos, payable_micros, payable_share

TOKEN_KINDS = ("prompt", "cached_prompt", "completion", "rejected_draft")
ADJUSTMENT = "adjustment"
FREE_ALLOWANCE = "free_allowance"


class InvoiceBroken(Exception):
    """The lines of an invoice are not the sum of its events. A bug or a damaged ledger, never input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSums:
    """The sums of settled events of one month with one model, currency, price and discount, all batch work or none of it.

    `unit_prices` (after discount) and `kind_requests` (how many requests have tokens of that kind) are in the order of
    TOKEN_KINDS. `is_correction`: events that correct others; their counts and costs are signed.
    """

    month: str
    model: str
    currency: str
    is_correction: bool
    batch: bool = False
    unit_prices: tuple[int, int, int, int]
    requests: int
    kind_requests: tuple[int, int, int, int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    rejected_tokens: int
    cost_picos: int

    @property
    def tokens(self) -> tuple[int, int, int, int]:
        """Return the tokens in the order of TOKEN_KINDS; prompt tokens found in the cache are counted separately."""
        return (self.prompt_tokens - self.cached_tokens, self.cached_tokens, self.completion_tokens, self.rejected_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceLine:
    """One line. `unit_price` is micro-units per million tokens, None where events of several prices are summed. `batch`: its
    tokens are those of batch work; not set on adjustments.

    `requests` counts the events with tokens on the line; the same event may also count on other lines.
    """

    model: str | None
    kind: str
    batch: bool = False
    month: str
    unit_price: int | None
    tokens: int
    requests: int
    exact_picos: int
    rounded_micros: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMonth:
    """What a tenant need not pay of a month, and what earlier invoices have already billed and given free for it."""

    monthly_micros: int
    billed_micros: int = 0
    granted_micros: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What is owed. The lines sum to `subtotal_micros`; `due_micros` is what is paid: the subtotal rounded to the smallest coin
    of the currency, and the tax on that. `total_micros` is subtotal and tax, without that rounding."""

    subtotal_micros: int
    tax_micros: int
    due_micros: int

    @property
    def total_micros(self) -> int:
        """Return lines and tax."""
        return self.subtotal_micros + self.tax_micros

    @property
    def rounding_micros(self) -> int:
        """Return what rounding to the smallest coin added or took away."""
        return self.due_micros - self.total_micros


def usage_lines(sums: Sequence[EventSums], month: str) -> list[InvoiceLine]:
    """Return the lines of an invoice of `month` before allowances: by model, kind and unit price, batch work after the rest
    of its model, then the adjustments.

    Corrections, and events of other months, are adjustments: one line for each of their months and models, unless it would have
    neither tokens nor cost. Events without tokens (a crash before the prompt was read) are on no line. Nor is a currency in
    which costs and corrections cancel out, if there are costs in another. Raises InvoiceBroken when costs and counts contradict
    each other.
    """
    used: dict[tuple[str, bool, int, int], list[int]] = defaultdict(lambda: [0, 0])
    adjusted: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    cancelled = _cancelled(sums)
    for group in sums:
        is_used = group.month == month and not group.is_correction
        if is_used:
            _check(group)
        if group.currency in cancelled:
            continue
        if not is_used:
            _add(adjusted[group.month, group.model], sum(group.tokens), group.requests, group.cost_picos)
            continue
        kinds = zip(group.tokens, group.unit_prices, group.kind_requests, strict=True)
        for order, (tokens, price, requests) in enumerate(kinds):
            if tokens:
                _add(used[group.model, group.batch, order, price], tokens, requests)
    lines = [
        _line(model, TOKEN_KINDS[order], month, price, tokens, requests, tokens * price, batch=batch)
        for (model, batch, order, price), (tokens, requests) in sorted(used.items())
    ]
    return lines + [
        _line(model, ADJUSTMENT, of_month, None, tokens, requests, cost)
        for (of_month, model), (tokens, requests, cost) in sorted(adjusted.items())
        if tokens or cost
    ]


def allowance_lines(lines: Sequence[InvoiceLine], free: Mapping[str, FreeMonth]) -> list[InvoiceLine]:
    """Return a line for each month of `free` whose allowance is used, or given back, on this invoice.

    Over all invoices together, a month is reduced by what it cost, at most by its allowance: it never costs less than zero, and
    a correction of free usage is free too.
    """
    made = []
    for month, terms in sorted(free.items()):
        billed = terms.billed_micros + sum(line.rounded_micros for line in lines if line.month == month)
        grant = min(terms.monthly_micros, max(0, billed)) - terms.granted_micros
        if grant:
            made.append(_line(None, FREE_ALLOWANCE, month, None, 0, 0, -grant * PICOS_PER_MICRO))
    return made


def currency_of(sums: Sequence[EventSums], month: str) -> str | None:
    """Return the currency of the costs; None when nothing costs anything, and when the costs cancel out in each of several
    currencies. Raises CurrenciesMixed when more than one currency has a sum other than zero."""
    costs = _cost_by_currency(sums)
    owed = sorted(currency for currency, cost_picos in costs.items() if cost_picos)
    if len(owed) > 1:
        message = (
            f"the invoice of {month} would have costs in {' and '.join(owed)}; amounts in different currencies cannot be added"
        )
        raise CurrenciesMixed(message, param="month")
    return next(iter(owed or costs)) if owed or len(costs) == 1 else None


def totals_of(lines: Iterable[InvoiceLine], *, tax_basis_points: int, currency: str) -> Totals:
    """Return the totals of the lines, with tax on the subtotal after rounding to the smallest coin."""
    subtotal = sum(line.rounded_micros for line in lines)
    net = payable_micros(subtotal, currency)
    tax = payable_share(net, tax_basis_points, currency)
    return Totals(subtotal_micros=subtotal, tax_micros=tax, due_micros=net + tax)


def usage_picos(lines: Iterable[InvoiceLine]) -> int:
    """Return the exact cost of the events behind the lines, before allowances."""
    return sum(line.exact_picos for line in lines if line.kind != FREE_ALLOWANCE)


def _line(
    model: str | None,
    kind: str,
    month: str,
    unit_price: int | None,
    tokens: int,
    requests: int,
    exact_picos: int,
    *,
    batch: bool = False,
) -> InvoiceLine:
    return InvoiceLine(
        model=model,
        kind=kind,
        batch=batch,
        month=month,
        unit_price=unit_price,
        tokens=tokens,
        requests=requests,
        exact_picos=exact_picos,
        rounded_micros=micros_of_picos(exact_picos),
    )


def _cost_by_currency(sums: Iterable[EventSums]) -> dict[str, int]:
    """Return the total cost of each currency in which the usage or the corrections of some month and model cost something.

    Sums by month and model do not depend on how events are split into groups, which depends on the moment of a closing.
    """
    parts: dict[tuple[str, str, str, bool], int] = defaultdict(int)
    for group in sums:
        parts[group.currency, group.month, group.model, group.is_correction] += group.cost_picos
    costs: dict[str, int] = defaultdict(int)
    for (currency, *_), cost_picos in parts.items():
        if cost_picos:
            costs[currency] += cost_picos
    return dict(costs)


def _cancelled(sums: Iterable[EventSums]) -> set[str]:
    """Return the currencies in which costs and corrections cancel out, if there are costs in other currencies too."""
    costs = _cost_by_currency(sums)
    return {currency for currency, cost_picos in costs.items() if not cost_picos} if len(costs) > 1 else set()


def _add(sums: list[int], *values: int) -> None:
    for index, value in enumerate(values):
        sums[index] += value


def _check(group: EventSums) -> None:
    cost = sum(tokens * price for tokens, price in zip(group.tokens, group.unit_prices, strict=True))
    if cost != group.cost_picos:
        raise InvoiceBroken(f"events of {group.model} in {group.month} cost {group.cost_picos}, their counts say {cost}")
