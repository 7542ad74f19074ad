"""Alert rules: which budgets alert, and at which usage. Reads all rules from the tables of tenants, keys and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, Table, bindparam, or_, select

from appliance.base.money import PICOS_PER_MICRO
from appliance.base.tables import api_keys, model_policies, tenants
from appliance.metering.limits.owners import ALL_TENANTS, LimitScope, Owner

PERCENTS_DEFAULT = (80, 100)

Kind = Literal["budget", "tokens_per_day"]
_OWNER_FIELDS: dict[LimitScope, tuple[str, ...]] = {
    "tenant": ("tenant_id", "tenant_name"),
    "key": ("tenant_id", "tenant_name", "key_id", "key_name"),
    "model": (),
}


class Period(NamedTuple):
    """A budget period beginning on `start`: a month for `budget`, a day for `tokens_per_day`."""

    kind: Kind
    start: date


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """An owner's limits (picos a month, tokens a day) and the percentages of them that alert, ascending.

    `owner_fields` are the owner's ids and names to include in alerts.
    """

    owner: Owner
    owner_fields: Mapping[str, str]
    currency: str
    limits: Mapping[Kind, int]
    percents: tuple[int, ...]

    def counted_usage(self, kind: Kind, tokens: int, cost_picos: int, currency: str) -> int:
        """Return how much of a usage counts against the limit of this kind. Costs in another currency do not count."""
        if kind == "tokens_per_day":
            return tokens
        return cost_picos if currency == self.currency else 0

    def reached_percents(self, kind: Kind, used: int) -> list[int]:
        """Return the percentages that `used` has reached."""
        return [percent for percent in self.percents if used * 100 >= percent * self.limits[kind]]

    def next_threshold(self, kind: Kind, used: int) -> int | None:
        """Return the usage at which the next threshold is reached, None if all are reached."""
        ahead = [percent for percent in self.percents if used * 100 < percent * self.limits[kind]]
        return -(-ahead[0] * self.limits[kind] // 100) if ahead else None


def _tenant_columns() -> list[ColumnElement[Any]]:
    columns = tenants.c
    return [columns.id.label("tenant_id"), columns.name.label("tenant_name"), columns.currency, columns.alert_percents]


def _limits(table: Table) -> list[ColumnElement[Any]]:
    return [table.c.monthly_budget_micros.label("monthly_budget"), table.c.tokens_per_day]


def _limited(table: Table) -> ColumnElement[bool]:
    return or_(table.c.monthly_budget_micros > 0, table.c.tokens_per_day > 0)


_TENANTS = (
    select(*_tenant_columns(), *_limits(tenants), tenants.c.model_limits)
    .where(tenants.c.archived_at.is_(None))
    .where(or_(_limited(tenants), tenants.c.model_limits.is_not(None)))
)
_KEYS = (
    select(
        *_tenant_columns(),
        api_keys.c.id.label("key_id"),
        api_keys.c.name.label("key_name"),
        *_limits(api_keys),
        api_keys.c.model_limits,
    )
    .join_from(api_keys, tenants, tenants.c.id == api_keys.c.tenant_id)
    .where(tenants.c.archived_at.is_(None), api_keys.c.revoked_at.is_(None))
    .where(or_(api_keys.c.expires_at.is_(None), api_keys.c.expires_at > bindparam("now")))
    .where(or_(_limited(api_keys), api_keys.c.model_limits.is_not(None)))
)
_MODELS = select(model_policies.c.model, *_limits(model_policies)).where(_limited(model_policies))
_READ: tuple[tuple[LimitScope, Select[Any]], ...] = (("tenant", _TENANTS), ("key", _KEYS), ("model", _MODELS))


def read_alert_rules(connection: Connection, now: datetime, currency: str) -> dict[Owner, AlertRule]:
    """Return the rules of all tenants that are not archived, of active keys, and of models over all tenants.

    Budgets of models, and of tenants without a currency of their own, are in `currency`, as in admission.
    """
    return {
        rule.owner: rule
        for scope, query in _READ
        for row in connection.execute(query, {"now": now}).mappings()
        for rule in _row_rules(scope, row, currency)
    }


def _row_rules(scope: LimitScope, row: RowMapping, currency: str) -> Iterator[AlertRule]:
    """Yield the rules of one row: over all models, and for each model with limits of its own."""
    owner_fields = {name: row[name] for name in _OWNER_FIELDS[scope]}
    if scope == "model":
        yield from _rule(Owner(scope, ALL_TENANTS, row["model"]), owner_fields, row, currency, None)
        return
    by_model: dict[str | None, Any] = {None: row, **(row["model_limits"] or {})}
    for model, limits in by_model.items():
        owner = Owner(scope, row[f"{scope}_id"], model)
        yield from _rule(owner, owner_fields, limits, row["currency"] or currency, row["alert_percents"])


def _rule(
    owner: Owner, owner_fields: Mapping[str, str], limits: Mapping[Any, Any], currency: str, percents: Sequence[int] | None
) -> Iterator[AlertRule]:
    """Yield the rule, unless there is nothing to alert about.

    A limit of 0 raises no alert: all of its thresholds are reached before anything is used.
    """
    alerting: dict[Kind, int] = {}
    if limits.get("monthly_budget"):
        alerting["budget"] = limits["monthly_budget"] * PICOS_PER_MICRO
    if limits.get("tokens_per_day"):
        alerting["tokens_per_day"] = limits["tokens_per_day"]
    percentages = PERCENTS_DEFAULT if percents is None else tuple(sorted(percents))
    if alerting and percentages:
        yield AlertRule(owner=owner, owner_fields=owner_fields, currency=currency, limits=alerting, percents=percentages)
