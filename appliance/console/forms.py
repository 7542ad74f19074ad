"""Parses the fields of an HTML form and collects one error message per invalid field. Knows no tenant and no template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING

from appliance.base.errors import BadRequest, Conflict, GatehouseError
from appliance.base.money import MICROS_PER_UNIT
from appliance.tenancy.fields import NAME_CHARS_MAX, UNSET, Unset

if TYPE_CHECKING:
    from appliance.metering.calendar import BillingCalendar

COUNT_MAX = 2**53  # exact in every client that reads our JSON
_AMOUNT = re.compile(r"(\d{1,9})(?:[.,](\d{1,6}))?")
_THOUSANDS = re.compile(r"[1-9]\d{0,2},\d{3}")  # ambiguous: a thousands separator, as on our pages, or a decimal comma
FORM_ERROR = "form"
GRACE_CHOICES = (("0", "Immediately"), ("3600", "After 1 hour"), ("86400", "After 24 hours"), ("604800", "After 7 days"))
"""Choices for the grace period of a replaced secret: (seconds, label)."""
EMPTY_LIST = "none"
"""The text of a list field that allows nothing. An empty field allows everything."""


def sentence(message: str) -> str:
    """Return an error message as a sentence: `limit is 5` becomes `Limit is 5.`"""
    return message[:1].upper() + message[1:] + ("" if message.endswith((".", "?")) else ".")


def names_text(names: Sequence[str] | None) -> str:
    """Return the text of a list field, the inverse of `Form.names`: empty for no restriction, `none` for an empty list."""
    return "" if names is None else ", ".join(names) or EMPTY_LIST


class Form:
    """The fields as typed, methods that parse them, and the errors. A parsing method returns None for an invalid field.

    `errors` maps a field, or `form` for the whole form, to the message shown next to it. `values` holds the text as typed, so
    that a form with errors is shown again unchanged.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = dict(values)
        self.errors: dict[str, str] = {}

    def raw(self, field: str) -> str:
        """Return the text as typed, stripped."""
        return self.values.get(field, "").strip()

    def fail(self, field: str, message: str) -> None:
        """Add an error to `field`, unless it has one."""
        self.errors.setdefault(field, message)

    def fail_with(self, error: GatehouseError, fields: Sequence[str]) -> None:
        """Add the error of a service to the field that it names, or to the whole form if that is not one of `fields`.

        Next to a field, whose label already names it, `email must be …` becomes `Must be …`.
        """
        field = (error.param or "").rsplit(".", 1)[-1]
        is_field = field in fields
        message = error.message.removeprefix(f"{error.param} ") if is_field else error.message
        self.fail(field if is_field else FORM_ERROR, sentence(message if message.startswith("must ") else error.message))

    def refusals(self, fields: Sequence[str]) -> _Refusals:
        """Return a context in which a service that refuses the input ends the block and adds its error, as `fail_with` does."""
        return _Refusals(self, fields)

    def touches(self, fields: Iterable[str]) -> bool:
        """Return whether one of `fields` has text or an error, so that its section must be unfolded."""
        return any(self.raw(field) or field in self.errors for field in fields)

    def text(self, field: str, *, chars_max: int = NAME_CHARS_MAX) -> str:
        """Return a non-empty text."""
        value = self.raw(field)
        if not value:
            self.fail(field, "Fill this in.")
        elif len(value) > chars_max:
            self.fail(field, f"Enter at most {chars_max} characters, not {len(value)}.")
        return value

    def choice(self, field: str, allowed: Sequence[str]) -> str:
        """Return one of `allowed`."""
        value = self.raw(field)
        if value not in allowed:
            self.fail(field, f"Choose one of {', '.join(allowed)}.")
        return value

    def whole_number(self, field: str, *, least: int = 0, most: int = COUNT_MAX, required: bool = False) -> int | None:
        """Return an integer from `least` to `most`, or None for an empty field, which is an error if it is `required`.

        Spaces, commas and underscores between digits are ignored.
        """
        typed = re.sub(r"[\s,_]", "", self.raw(field))
        if not typed:
            if required:
                self.fail(field, "Fill this in.")
            return None
        if not typed.isascii() or not typed.isdigit():
            self.fail(field, f"Enter a whole number{'' if required else ', or leave this empty'}.")
            return None
        value = int(typed) if len(typed) <= 20 else most + 1
        if not least <= value <= most:
            self.fail(field, f"Enter a number between {least:,} and {most:,}.")
            return None
        return value

    def amount_micros(self, field: str, *, required: bool = False) -> int | None:
        """Return an amount of money in micro-units, or None for an empty field, which is an error if it is `required`.

        A comma followed by three digits is refused, because it may separate thousands or decimals. No floating point is used.
        """
        typed = self.raw(field)
        if not typed:
            if required:
                self.fail(field, "Fill this in.")
            return None
        match = _AMOUNT.fullmatch(typed)
        if match is None:
            self.fail(
                field,
                f"Enter an amount like 250 or 12.50, with at most six decimals{'' if required else ', or leave this empty'}.",
            )
            return None
        whole, decimals = match.group(1), match.group(2) or ""
        if _THOUSANDS.fullmatch(typed):
            self.fail(field, f"Write {whole}{decimals} or {whole}.{decimals}, without the ambiguous comma.")
            return None
        return int(whole) * MICROS_PER_UNIT + int(decimals.ljust(6, "0"))

    def last_day(self, field: str, now: datetime, calendar: BillingCalendar) -> datetime | None:
        """Return the last second of a day, today or later in the billing time zone, or None for an empty field."""
        typed = self.raw(field)
        if not typed:
            return None
        try:
            moment = calendar.next_day_start(date.fromisoformat(typed)) - timedelta(seconds=1)
        except (ValueError, OverflowError):
            self.fail(field, "Enter a day like 2027-03-31, or leave this empty.")
            return None
        if moment <= now:
            self.fail(field, "Enter today or a later day.")
            return None
        return moment

    def first_day(self, field: str, calendar: BillingCalendar) -> datetime | None:
        """Return the start of a day in the billing time zone, or None for an empty field."""
        typed = self.raw(field)
        if not typed:
            return None
        try:
            return calendar.day_start(date.fromisoformat(typed))
        except (ValueError, OverflowError):
            self.fail(field, "Enter a day like 2027-03-31, or leave this empty.")
            return None

    def names(self, field: str) -> tuple[str, ...] | None:
        """Return the names in a list separated by commas or line breaks, an empty tuple for `none`, and None (no restriction)
        for an empty field."""
        if self.raw(field).casefold() == EMPTY_LIST:
            return ()
        found = tuple(dict.fromkeys(name.strip() for name in re.split(r"[,\n]", self.raw(field)) if name.strip()))
        return found or None

    def changed_names(self, field: str, stored: Sequence[str] | None) -> tuple[str, ...] | Unset | None:
        """Like `names`, but UNSET if the field is missing or still shows `stored`."""
        untouched = field not in self.values or self.raw(field) == names_text(stored)
        return UNSET if untouched else self.names(field)


class _Refusals:
    def __init__(self, form: Form, fields: Sequence[str]) -> None:
        self._form, self._fields = form, fields

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, BadRequest | Conflict):
            self._form.fail_with(error, self._fields)
            return True
        return False
