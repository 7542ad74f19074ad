"""What the fields of request bodies accept, as types: for the OpenAPI document, and for nothing else.

The rules refuse in their own layers, which console and command line use too, in words of their own. The numbers here are the
very constants of those rules. A test sends every limit of the document, and what lies just beyond it, and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from appliance.base.money import PERCENT_MAX, PRICE_MICROS_MAX
from appliance.metering.calendar import MONTH_PATTERN
from appliance.tenancy.fields import (
    ADDRESS_CHARS_MAX,
    ALERT_PERCENT_MAX,
    ALERT_PERCENTS_MAX,
    LIMIT_MAX,
    LIMIT_MODES,
    LIST_ITEMS_MAX,
    MODELS_LIMITED_MAX,
    NAME_CHARS_MAX,
    SCOPES,
    TIERS,
    WEIGHT_MAX,
)
from appliance.tenancy.members import EMAIL_CHARS_MAX
from appliance.tenancy.roles import Role, TenantRole
from engine.protocol import RANGES


def _accepts(**keywords: Any) -> msgspec.Meta:
    """Return what adds `keywords` of JSON Schema to a type and checks nothing; None adds nothing."""
    return msgspec.Meta(extra_json_schema={name: value for name, value in keywords.items() if value is not None})


def within(least: float, most: float) -> msgspec.Meta:
    """Return the mark of a number from `least` to `most`."""
    return _accepts(minimum=least, maximum=most)


def at_least(least: int) -> msgspec.Meta:
    """Return the mark of a number that has a lower limit alone; the upper one is the model's."""
    return _accepts(minimum=least)


def sampling(param: str) -> msgspec.Meta:
    """Return the mark of the engine's number of this name."""
    limits = RANGES[param]
    return _accepts(**{"exclusiveMinimum" if limits.above else "minimum": limits.low, "maximum": limits.high})


def chars(least: int, most: int) -> msgspec.Meta:
    """Return the mark of a text of `least` to `most` characters."""
    return _accepts(minLength=least or None, maxLength=most)


def items(least: int, most: int) -> msgspec.Meta:
    """Return the mark of a list of `least` to `most` items."""
    return _accepts(minItems=least or None, maxItems=most)


def entries(most: int, **keywords: Any) -> msgspec.Meta:
    """Return the mark of an object of at most `most` names; `keywords` say which names."""
    return _accepts(maxProperties=most, **keywords)


def one_of(choices: Sequence[str]) -> msgspec.Meta:
    """Return the mark of a text that is one of `choices`."""
    return _accepts(enum=list(choices))


def matching(pattern: str) -> msgspec.Meta:
    """Return the mark of a text that matches `pattern`, which has its anchors."""
    return _accepts(pattern=pattern)


def mailbox(most: int) -> msgspec.Meta:
    """Return the mark of an e-mail address of at most `most` characters."""
    return _accepts(format="email", maxLength=most)


Name = Annotated[str, chars(1, NAME_CHARS_MAX)]
Names = Annotated[list[Name], items(0, LIST_ITEMS_MAX)]
Lines = Annotated[str, chars(1, ADDRESS_CHARS_MAX)]
Email = Annotated[str, mailbox(EMAIL_CHARS_MAX)]
Moment = Annotated[str, _accepts(format="date-time")]
Month = Annotated[str, matching(MONTH_PATTERN)]
Currency = Annotated[str, matching("^[A-Z]{3}$")]
Country = Annotated[str, matching("^[A-Z]{2}$")]
TierName = Annotated[str, one_of(TIERS)]
LimitMode = Annotated[str, one_of(LIMIT_MODES)]
Weight = Annotated[int, within(1, WEIGHT_MAX)]
Limit = Annotated[int, within(0, LIMIT_MAX)]
Scopes = Annotated[list[Annotated[str, one_of(SCOPES)]], items(1, LIST_ITEMS_MAX)]
Networks = Annotated[list[str], items(0, LIST_ITEMS_MAX)]
AlertPercents = Annotated[list[Annotated[int, within(1, ALERT_PERCENT_MAX)]], items(0, ALERT_PERCENTS_MAX)]
MODELS_LIMITED = entries(MODELS_LIMITED_MAX)
BoxRole = Annotated[str, one_of([role.value for role in Role])]
RoleInTenant = Annotated[str, one_of([role.value for role in TenantRole])]
UnitPrice = Annotated[int, within(0, PRICE_MICROS_MAX)]
Percent = Annotated[int, within(0, PERCENT_MAX)]
Amount = Annotated[int, within(0, LIMIT_MAX)]
