"""Formats audit log entries for people: the action, its target and the changed values. Knows no page and no database."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from appliance.base.money import format_exactly
from appliance.console.formatting import unit_price
from appliance.tenancy.audit_chain import AuditEntry, decode_fields

NOT_SET, NOTHING = "not set", "none"
"""The text of no value, such as no restriction, and of an empty list, such as no allowed model."""
VALUE_CHARS_MAX = 200
CHANGES_EXPANDED_MAX = 6
# Labels of actions, in the groups of the filter. An action without a label is shown by its name.
ACTIONS: dict[str, dict[str, str]] = {
    "Tenants": {
        "tenant.create": "Tenant created",
        "tenant.update": "Tenant changed",
        "tenant.archive": "Tenant archived",
    },
    "Keys": {
        "key.create": "Key created",
        "key.update": "Key changed",
        "key.rotate": "Key rotated",
        "key.revoke": "Key revoked",
    },
    "Members and sign-in": {
        "member.create": "Member added",
        "member.change": "Member changed",
        "member.change_password": "Password changed",
        "member.reset_password": "Password replaced",
        "member.link_provider": "Provider linked",
        "member.unlink_provider": "Provider unlinked",
        "membership.add": "Added to tenant",
        "membership.change": "Role in tenant changed",
        "membership.remove": "Removed from tenant",
        "second_factor.enable": "Second factor switched on",
        "second_factor.disable": "Second factor switched off",
        "second_factor.reset": "Second factor reset",
        "second_factor.renew_codes": "Recovery codes renewed",
        "second_factor.use_recovery_code": "Recovery code used",
        "session.open": "Signed in",
        "session.refuse": "Could not sign in",
        "session.close": "Signed out",
        "token.create": "Administrator token created",
        "token.revoke": "Administrator token revoked",
    },
    "Money": {
        "price.create": "Price added",
        "price.withdraw": "Price withdrawn",
        "invoice.draft": "Invoice drafted",
        "invoice.close": "Invoice closed",
        "invoice.discard": "Draft discarded",
        "allowance.set": "Free allowance set",
        "seller.change": "Invoice issuer changed",
        "hardware.change": "Hardware costs changed",
        "ledger.correct": "Usage corrected",
        "ledger.recover": "Usage recovered after a crash",
    },
    "Limits and requests": {
        "tier.update": "Tier changed",
        "model_policy.put": "Limits of a model set",
        "model_policy.remove": "Limits of a model removed",
        "request.abort": "Request aborted",
    },
    "Alerts": {
        "webhook.create": "Alert target added",
        "webhook.update": "Alert target changed",
        "webhook.rotate": "Signing secret rotated",
        "webhook.disable": "Alert target disabled",
        "webhook.remove": "Alert target removed",
        "webhook.test": "Test alert sent",
        "webhook.retry": "Alert sent again",
    },
}
_LABELS = {action: words for group in ACTIONS.values() for action, words in group.items()}
_HIGHLIGHTED = ("session.refuse", "tenant.archive", "key.revoke", "token.revoke", "second_factor.reset", "ledger.recover")
_PAGES = {"tenant": "/tenants/", "key": "/keys/", "request": "/requests/", "invoice": "/invoices/"}
_HIDDEN_FIELDS = ("id", "tenant_id")
_MICRO_AMOUNTS = ("monthly_budget", "prompt", "cached_prompt", "completion", "rejected_draft")
"""Fields that are amounts in micro-units, shown in units as on all pages: 5000000 as 5.00."""
_AMOUNT = re.compile(r"_(micros|picos)$")
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)\.\d{6}Z$")


@dataclass(frozen=True, slots=True)
class Change:
    """One changed value; None if it is not recorded before or after."""

    field: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditLine:
    """An entry as shown on the page. `target_url` is the page of its target, if there is one."""

    id: int
    at: datetime
    actor: str
    actor_kind: str
    label: str
    tone: str
    target: str
    target_id: str
    target_url: str | None
    tenant_id: str | None
    changes: tuple[Change, ...]
    is_change: bool
    request_id: str | None
    from_address: str | None
    hash: str


def audit_line(entry: AuditEntry, names: Mapping[str, str]) -> AuditLine:
    """Format `entry`. `names` are names of targets by id."""
    before, after = decode_fields(entry.before) or {}, decode_fields(entry.after) or {}
    page = _PAGES.get(entry.target_kind)
    return AuditLine(
        id=entry.id,
        at=entry.at,
        actor=entry.actor_name,
        actor_kind=entry.actor_kind,
        label=_LABELS.get(entry.action, entry.action),
        tone="bad" if entry.action in _HIGHLIGHTED else "",
        target=_target_name(entry, before, after, names),
        target_id=entry.target_id,
        target_url=None if page is None else f"{page}{entry.target_id}",
        tenant_id=entry.tenant_id,
        changes=tuple(_changes(before, after)),
        is_change=entry.before is not None and entry.after is not None,
        request_id=entry.request_id,
        from_address=entry.address,
        hash=entry.hash,
    )


def _target_name(entry: AuditEntry, before: dict[str, Any], after: dict[str, Any], names: Mapping[str, str]) -> str:
    """Return the name of the target: as recorded in the entry, else its current name, else its id."""
    for facts in (after, before):
        for field in ("name", "email", "model", "number", "target", "month"):
            if isinstance(name := facts.get(field), str):
                return name
    return names.get(entry.target_id, entry.target_id)


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[Change]:
    """Yield every value that differs, in the order of the fields; nested values with their full path."""
    for name in dict.fromkeys((*before, *after)):
        was, now = before.get(name), after.get(name)
        if isinstance(was, Mapping) or isinstance(now, Mapping):
            yield from _changes(was or {}, now or {}, f"{prefix}{name} › ")
        elif was != now and not (name in _HIDDEN_FIELDS and not prefix):
            old, new = (_format_value(name, value, name in fields) for value, fields in ((was, before), (now, after)))
            yield Change(prefix.replace("_", " ") + _label(name), old, new)


def _label(name: str) -> str:
    return _AMOUNT.sub("", name).replace("_", " ")


def _format_value(name: str, value: Any, is_recorded: bool) -> str | None:
    if not is_recorded:
        return None
    if isinstance(value, int) and (name in _MICRO_AMOUNTS or name.endswith("_micros")):
        return unit_price(value)
    if isinstance(value, int) and name.endswith("_picos"):
        return format_exactly(value, "").strip()
    if value is None:
        return NOT_SET
    if value == []:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = ", ".join(map(_format_element, value)) if isinstance(value, list) else _TIME.sub(r"\1 \2 UTC", str(value))
    return text if len(text) <= VALUE_CHARS_MAX else text[: VALUE_CHARS_MAX - 1] + "…"


def _format_element(value: Any) -> str:
    """Format one element of a list; an object as its name with its other fields in brackets."""
    if not isinstance(value, Mapping):
        return str(value)
    details = [
        f"{_label(name)} {_format_value(name, field, True)}"
        for name, field in value.items()
        if name != "name" and field is not None
    ]
    return f"{value.get('name', '')} ({', '.join(details)})".lstrip()
