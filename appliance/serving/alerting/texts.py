"""The text of alerts for people: a subject, a sentence and the facts, as plain text and as simple HTML. Sends nothing."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from appliance.base.money import PICOS_PER_MICRO, format_picos, minor_unit_decimals, payable_micros
from appliance.metering.alerts.send_limits import TEST_EVENT

SUBJECT_CHARS_MAX = 300
_LABELS = {"due_micros": "amount due", "total_micros": "total with tax", "down_s": "seconds down"}
Data = Mapping[str, Any]
Headline = tuple[str, str]  # what happened, and the figures (may be empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The text of one alert. `facts` are pairs of name and value."""

    headline: str
    sentence: str
    facts: tuple[tuple[str, str], ...]

    @property
    def subject(self) -> str:
        """Return the subject of an e-mail."""
        return f"[Gatehouse] {self.headline}"[:SUBJECT_CHARS_MAX]

    def plain(self, address: str | None) -> str:
        """Return the plain text; `address` of the appliance appears in the footer."""
        width = max((len(name) for name, _ in self.facts), default=0)
        lines = [f"{name + ':':<{width + 2}}{value}" for name, value in self.facts]
        return "\n".join([self.sentence, "", *lines, "", "-- ", _sender(address), ""])

    def html(self, address: str | None) -> str:
        """Return the same content as HTML."""
        rows = "".join(
            f"<tr><th align='left'>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in self.facts
        )
        sender = html.escape(_sender(address))
        return (
            f"<!doctype html><html><body><p>{html.escape(self.sentence)}</p><table>{rows}</table><p>{sender}</p></body></html>"
        )


def text_of(event: str, data: Data) -> Text:
    """Return the text of the alert `event`."""
    headline, details = _HEADLINES[event](data)
    facts = tuple((_label(name), _fact(name, value, data)) for name, value in data.items() if value is not None)
    sentence = f"{headline}: {details}." if details else f"{headline}."
    line = " ".join(headline.split())  # names may contain line breaks, which must not end a mail header
    return Text(headline=line, sentence=sentence, facts=facts)


def _sender(address: str | None) -> str:
    return "Sent by Gatehouse" + (f", {address}" if address else "")


def _budget(data: Data) -> Headline:
    decimals = _decimals(data["monthly_budget"], data["currency"])
    limit = format_picos(data["monthly_budget"] * PICOS_PER_MICRO, data["currency"], decimals)
    spent = format_picos(data["spent_picos"], data["currency"], decimals)
    return _reached(data, f"the budget of {data['month']}"), f"{spent} of {limit}"


def _tokens(data: Data) -> Headline:
    return _reached(data, f"the token limit of {data['day']}"), f"{data['tokens']} of {data['tokens_per_day']}"


def _reached(data: Data, limit: str) -> str:
    """Return who has reached which share of `limit`. Messages without a scope are older than scopes and concern a tenant."""
    scope = data.get("scope", "tenant")
    if scope == "model":
        who = "All tenants together have"
    elif scope == "key":
        who = f"The key {data['key_name']} of {data['tenant_name']} has"
    else:
        who = f"{data['tenant_name']} has"
    model = f" for the model {data['model']}" if "model" in data else ""
    return f"{who} reached {data['percent']} % of {limit}{model}"


def _invoice(data: Data) -> Headline:
    return (
        f"Invoice {data['number']} of {data['tenant_name']} for {data['month']} is closed",
        _due(data) if "due_micros" in data else "",
    )


def _due(data: Data) -> str:
    """Return the amount due; a negative one is a credit note in favour of the customer."""
    if data["due_micros"] < 0:
        return f"{_payment(-data['due_micros'], data)} in favour of the customer"
    return f"{_payment(data['due_micros'], data)} due"


def _payment(micros: int, data: Data) -> str:
    return format_picos(micros * PICOS_PER_MICRO, data["currency"], minor_unit_decimals(data["currency"]))


def _key(data: Data) -> Headline:
    return f"A key of {data['tenant_name']} expires soon", f"{data['key_name']}, {data['prefix']}, on {data['expires_at']}"


def _engine(data: Data) -> Headline:
    return f"The model {data['model']} is not served", f"it has been {data['state']} for {data['down_s']} seconds"


def _gpu_unused(data: Data) -> Headline:
    return f"The model {data['model']} is served on the CPU", "an NVIDIA driver is installed, but its GPU is not used"


def _kernels_refused(data: Data) -> Headline:
    return f"The model {data['model']} is served by older kernels", "newer ones were refused"


def _test(_data: Data) -> Headline:
    return "This is a test", "nothing has happened"


_HEADLINES: dict[str, Callable[[Data], Headline]] = {
    "budget.threshold": _budget,
    "tokens_per_day.threshold": _tokens,
    "invoice.closed": _invoice,
    "key.expiring": _key,
    "engine.down": _engine,
    "engine.gpu_unused": _gpu_unused,
    "engine.kernels_refused": _kernels_refused,
    TEST_EVENT: _test,
}


def _decimals(micros: int, currency: str) -> int:
    """Return the number of decimals to show: those of `currency`, or 6 if the amount is not a whole number of its coins."""
    return 6 if micros != payable_micros(micros, currency) else minor_unit_decimals(currency)


def _label(name: str) -> str:
    """Return the label of a fact, without the unit suffix, because the value is shown with its unit."""
    return _LABELS.get(name, name.removesuffix("_micros").removesuffix("_picos").replace("_", " "))


def _fact(name: str, value: object, data: Data) -> str:
    """Return a value as text. Amounts of money are recognised by the ending of their name."""
    currency = str(data.get("currency", ""))
    if isinstance(value, int) and name.endswith("_picos"):
        return format_picos(value, currency)
    if isinstance(value, int) and name == "monthly_budget":
        return format_picos(value * PICOS_PER_MICRO, currency, _decimals(value, currency))
    if isinstance(value, int) and name.endswith("_micros"):
        return _payment(value, data)
    return "; ".join(value) if isinstance(value, list) else str(value)
