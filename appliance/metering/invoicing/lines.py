"""Computes the lines and totals of an invoice from sums of usage events, in integers, rounded once per line.

Knows no database and no clock. Does not price events: it checks that the lines add up to exactly the costs stored in the
ledger.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from appliance.base.errors import CurrenciesMixed, InvoiceInconsistent
from appliance.base.money import PICOS_PER_MICRO, format_exactly, micros_of_picos, payable_micros, payable_share

TOKEN_KINDS = ("prompt", "cached_prompt", "completion", "rejected_draft")
ADJUSTMENT = "adjustment"
FREE_ALLOWANCE = "free_allowance"
REASONS_MAX = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSums:
    """Sums of billed events with the same month, model, currency, price, discount and batch flag.

    `unit_prices` (after discount) and `kind_requests` (number of requests with tokens of that kind) are in the order of
    TOKEN_KINDS. `is_correction`: the events correct others; their counts and costs are signed. `notes`: the reasons of
    corrections as (posting, text).
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
    notes: tuple[tuple[int, str], ...] = ()

    @property
    def tokens(self) -> tuple[int, int, int, int]:
        """Return the tokens in the order of TOKEN_KINDS. `prompt` excludes the cached prompt tokens."""
        return (self.prompt_tokens - self.cached_tokens, self.cached_tokens, self.completion_tokens, self.rejected_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceLine:
    """One line. `unit_price` is in micro-units per million tokens, None if events with several prices are summed. `batch`: the
    line bills batch work; never set on adjustments.

    `requests` counts the events with tokens on this line; an event may count on several lines. `reasons` are the distinct notes
    of the corrections on an adjustment, at most REASONS_MAX, each on one line; `reasons_left_out` counts the others.
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
    reasons: tuple[str, ...] = ()
    reasons_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MonthAllowance:
    """A month's free allowance, and what earlier invoices have already billed and granted for that month."""

    monthly_micros: int
    billed_micros: int = 0
    granted_micros: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InvoiceTotals:
    """Totals of an invoice. `subtotal_micros` is the sum of the lines. `due_micros` is the amount to pay: the subtotal rounded
    to the currency's smallest coin, plus the tax on that. `total_micros` is subtotal plus tax, without that rounding."""

    subtotal_micros: int
    tax_micros: int
    due_micros: int

    @property
    def total_micros(self) -> int:
        """Return subtotal plus tax."""
        return self.subtotal_micros + self.tax_micros

    @property
    def rounding_micros(self) -> int:
        """Return the signed difference made by rounding to the smallest coin."""
        return self.due_micros - self.total_micros


def usage_lines(sums: Sequence[EventSums], month: str) -> list[InvoiceLine]:
    """Return the lines of the invoice of `month` before allowances: by model, kind and unit price, batch work after the rest
    of its model, then the adjustments.

    Corrections and events of other months become adjustments: one line per month and model, omitted if it has neither tokens
    nor cost. Events without tokens (a crash before the prompt was read) are on no line. A currency whose costs and corrections
    cancel out is left out if another currency has costs. Raises InvoiceInconsistent if costs do not match token counts.
    """
    used: dict[tuple[str, bool, int, int], list[int]] = defaultdict(lambda: [0, 0])
    adjusted: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    notes: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    cancelled = _cancelled_currencies(sums)
    for group in sums:
        is_usage = group.month == month and not group.is_correction
        if is_usage:
            _check_cost(group)
        if group.currency in cancelled:
            continue
        if not is_usage:
            _add(adjusted[group.month, group.model], sum(group.tokens), group.requests, group.cost_picos)
            notes[group.month, group.model] += group.notes
            continue
        kinds = zip(group.tokens, group.unit_prices, group.kind_requests, strict=True)
        for kind_index, (tokens, price, requests) in enumerate(kinds):
            if tokens:
                _add(used[group.model, group.batch, kind_index, price], tokens, requests)
    lines = [
        _make_line(model, TOKEN_KINDS[kind_index], month, price, tokens, requests, tokens * price, batch=batch)
        for (model, batch, kind_index, price), (tokens, requests) in sorted(used.items())
    ]
    return lines + [
        _with_reasons(_make_line(model, ADJUSTMENT, of_month, None, tokens, requests, cost), notes[of_month, model])
        for (of_month, model), (tokens, requests, cost) in sorted(adjusted.items())
        if tokens or cost
    ]


def allowance_lines(lines: Sequence[InvoiceLine], allowances: Mapping[str, MonthAllowance]) -> list[InvoiceLine]:
    """Return a line for each month of `allowances` whose allowance this invoice grants or takes back.

    Over all invoices, the grants for a month equal its cost, limited to its allowance: a month never costs less than zero, and
    correcting free usage refunds no money.
    """
    granted = []
    for month, allowance in sorted(allowances.items()):
        billed = allowance.billed_micros + sum(line.rounded_micros for line in lines if line.month == month)
        grant = min(allowance.monthly_micros, max(0, billed)) - allowance.granted_micros
        if grant:
            granted.append(_make_line(None, FREE_ALLOWANCE, month, None, 0, 0, -grant * PICOS_PER_MICRO))
    return granted


def currency_of(sums: Sequence[EventSums], month: str) -> str | None:
    """Return the currency of the costs; None if there are no costs, or if they cancel out in each of several currencies.
    Raises CurrenciesMixed if more than one currency has a non-zero sum."""
    costs = _cost_by_currency(sums)
    non_zero = sorted(currency for currency, cost_picos in costs.items() if cost_picos)
    if len(non_zero) > 1:
        currencies = " and ".join(non_zero)
        message = f"the invoice of {month} would have costs in {currencies}; amounts in different currencies cannot be added"
        raise CurrenciesMixed(message, param="month")
    return next(iter(non_zero or costs)) if non_zero or len(costs) == 1 else None


def totals_of(lines: Iterable[InvoiceLine], *, tax_basis_points: int, currency: str) -> InvoiceTotals:
    """Return the totals of the lines, with tax on the subtotal after rounding to the smallest coin."""
    subtotal = sum(line.rounded_micros for line in lines)
    net = payable_micros(subtotal, currency)
    tax = payable_share(net, tax_basis_points, currency)
    return InvoiceTotals(subtotal_micros=subtotal, tax_micros=tax, due_micros=net + tax)


def usage_picos(lines: Iterable[InvoiceLine]) -> int:
    """Return the exact cost of the billed events, before allowances."""
    return sum(line.exact_picos for line in lines if line.kind != FREE_ALLOWANCE)


def _make_line(
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


def _with_reasons(line: InvoiceLine, notes: Iterable[tuple[int, str]]) -> InvoiceLine:
    """Return the adjustment with the reasons in `notes`, in the order of their first postings."""
    reasons = list(dict.fromkeys(" ".join(note.split()) for _, note in sorted(notes)))
    left_out = max(0, len(reasons) - REASONS_MAX)
    return replace(line, reasons=tuple(reasons[:REASONS_MAX]), reasons_left_out=left_out)


def _cost_by_currency(sums: Iterable[EventSums]) -> dict[str, int]:
    """Return the total cost by currency, of those in which usage or corrections of any month and model have a cost.

    Summing by month and model first makes the result independent of how events are grouped, which depends on when the invoice
    is closed.
    """
    subtotals: dict[tuple[str, str, str, bool], int] = defaultdict(int)
    for group in sums:
        subtotals[group.currency, group.month, group.model, group.is_correction] += group.cost_picos
    costs: dict[str, int] = defaultdict(int)
    for (currency, *_), cost_picos in subtotals.items():
        if cost_picos:
            costs[currency] += cost_picos
    return dict(costs)


def _cancelled_currencies(sums: Iterable[EventSums]) -> set[str]:
    """Return the currencies whose costs and corrections cancel out, if other currencies have costs too."""
    costs = _cost_by_currency(sums)
    return {currency for currency, cost_picos in costs.items() if not cost_picos} if len(costs) > 1 else set()


def _add(sums: list[int], *values: int) -> None:
    for index, value in enumerate(values):
        sums[index] += value


def _check_cost(group: EventSums) -> None:
    cost = sum(tokens * price for tokens, price in zip(group.tokens, group.unit_prices, strict=True))
    if cost != group.cost_picos:
        raise InvoiceInconsistent(
            f"the ledger contradicts itself: events of {group.model} in {group.month} cost "
            f"{format_exactly(group.cost_picos, group.currency)}, but their tokens at their prices "
            f"{format_exactly(cost, group.currency)}. No usage is lost; gatehouse db check names the events",
            param="month",
        )
