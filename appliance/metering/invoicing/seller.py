"""The seller named on invoices: its fields, their validation and storage. Knows nothing of invoices."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from appliance.base.errors import InvalidValue
from appliance.base.money import BASIS_POINTS
from appliance.metering.appliance_records import SELLER, ApplianceRecords
from appliance.tenancy.fields import check_line, check_whole

TERMS_DAYS_MAX = 365
TERMS_DAYS_DEFAULT = 30
LINES_MAX = 8
_TEXTS = ("email", "phone", "website", "tax_id", "registration", "tax_label", "tax_note", "payment_note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seller:
    """The seller as named on invoices. `tax_basis_points`: 1900 is 19 %. `tax_note`: why there is no tax (reverse charge,
    small business). Construction raises InvalidValue naming the field."""

    name: str
    address: tuple[str, ...] = ()
    email: str | None = None
    phone: str | None = None
    website: str | None = None
    tax_id: str | None = None
    registration: str | None = None
    bank: tuple[str, ...] = ()
    payment_terms_days: int = TERMS_DAYS_DEFAULT
    payment_note: str | None = None
    tax_basis_points: int = 0
    tax_label: str | None = None
    tax_note: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", check_line(self.name, "name"))
        for param in ("address", "bank"):
            object.__setattr__(self, param, _check_lines(getattr(self, param), param))
        for param in _TEXTS:
            value = getattr(self, param)
            object.__setattr__(self, param, None if value is None else check_line(value, param))
        check_whole(self.payment_terms_days, "payment_terms_days", 0, TERMS_DAYS_MAX)
        check_whole(self.tax_basis_points, "tax_basis_points", 0, BASIS_POINTS)

    def to_record(self) -> dict[str, Any]:
        """Return the JSON object to store."""
        record = dataclasses.asdict(self)
        return record | {"address": list(self.address), "bank": list(self.bank)}


async def read_seller(records: ApplianceRecords) -> Seller | None:
    """Return the stored seller, or None if it was never set."""
    record = await records.get(SELLER)
    if record is None:
        return None
    known = {field.name for field in dataclasses.fields(Seller)}  # a newer version may have stored more fields
    return Seller(**{name: value for name, value in record.items() if name in known})


async def store_seller(records: ApplianceRecords, seller: Seller) -> None:
    """Replace the stored seller."""
    await records.put(SELLER, seller.to_record())


def _check_lines(value: object, param: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, list | tuple) or len(value) > LINES_MAX:
        raise InvalidValue(f"{param} must be a list of at most {LINES_MAX} lines", param=param)
    return tuple(check_line(line, param) for line in value)
