"""Types of request body fields with their constraints. These only appear in the OpenAPI document: decoding does not check them.

The layers below validate the values, with their own messages, because console and command line use them too. The limits here
are the same constants. A test sends each documented limit, and a value just beyond it, and compares.
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


def _constraint(**keywords: Any) -> msgspec.Meta:
    """Return an annotation that adds JSON Schema `keywords` to a type, except those that are None. It checks nothing."""
    return msgspec.Meta(extra_json_schema={name: value for name, value in keywords.items() if value is not None})


def within(minimum: float, maximum: float) -> msgspec.Meta:
    """Annotate a number from `minimum` to `maximum`."""
    return _constraint(minimum=minimum, maximum=maximum)


def at_least(minimum: int) -> msgspec.Meta:
    """Annotate a number with a lower limit only; its upper limit depends on the model."""
    return _constraint(minimum=minimum)


def sampling(param: str) -> msgspec.Meta:
    """Annotate a number with the range that the engine accepts for the sampling parameter `param`."""
    limits = RANGES[param]
    return _constraint(**{"exclusiveMinimum" if limits.above else "minimum": limits.low, "maximum": limits.high})


def chars(minimum: int, maximum: int) -> msgspec.Meta:
    """Annotate a string of `minimum` to `maximum` characters."""
    return _constraint(minLength=minimum or None, maxLength=maximum)


def items(minimum: int, maximum: int) -> msgspec.Meta:
    """Annotate a list of `minimum` to `maximum` items."""
    return _constraint(minItems=minimum or None, maxItems=maximum)


def entries(maximum: int, **keywords: Any) -> msgspec.Meta:
    """Annotate an object with at most `maximum` entries; `keywords` may constrain their names."""
    return _constraint(maxProperties=maximum, **keywords)


def one_of(choices: Sequence[str]) -> msgspec.Meta:
    """Annotate a string that is one of `choices`."""
    return _constraint(enum=list(choices))


def matching(pattern: str) -> msgspec.Meta:
    """Annotate a string that matches `pattern`, which must be anchored."""
    return _constraint(pattern=pattern)


def email_address(maximum: int) -> msgspec.Meta:
    """Annotate an e-mail address of at most `maximum` characters."""
    return _constraint(format="email", maxLength=maximum)


Name = Annotated[str, chars(1, NAME_CHARS_MAX)]
Names = Annotated[list[Name], items(0, LIST_ITEMS_MAX)]
Lines = Annotated[str, chars(1, ADDRESS_CHARS_MAX)]
Email = Annotated[str, email_address(EMAIL_CHARS_MAX)]
Timestamp = Annotated[str, _constraint(format="date-time")]
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
ApplianceRole = Annotated[str, one_of([role.value for role in Role])]
RoleInTenant = Annotated[str, one_of([role.value for role in TenantRole])]
UnitPrice = Annotated[int, within(0, PRICE_MICROS_MAX)]
Percent = Annotated[int, within(0, PERCENT_MAX)]
Amount = Annotated[int, within(0, LIMIT_MAX)]
