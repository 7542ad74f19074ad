"""Reads the fields of an HTML form into values, collecting one sentence per wrong field. Knows no tenant and no template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING

from appliance.base.errors import GatehouseError
from appliance.base.money import MICROS_PER_UNIT
from appliance.tenancy.fields import UNSET, Unset

if TYPE_CHECKING:
    from appliance.metering.calendar import BillingCalendar

NAME_CHARS_MAX = 200
COUNT_MAX = 2**53  # exact in every client that reads our JSON
_AMOUNT = re.compile(r"(\d{1,9})(?:[.,](\d{1,6}))?")
_THOUSANDS = re.compile(r"[1-9]\d{0,2},\d{3}")  # ambiguous: thousands, as our pages show them, or a decimal comma
FORM_ERROR = "form"
GRACES = (("0", "Immediately"), ("3600", "After 1 hour"), ("86400", "After 24 hours"), ("604800", "After 7 days"))
"""When a replaced secret ends, in seconds and in words."""
NO_NAME = "none"
"""The text of a list field that allows nothing; an empty field allows everything."""


def sentence(message: str) -> str:
    """Return an error message as a sentence: `limit is 5` reads `Limit is 5.`"""
    return message[:1].upper() + message[1:] + ("" if message.endswith((".", "?")) else ".")


def names_text(names: Sequence[str] | None) -> str:
    """Return a list as the text of its field, as `Form.names` reads it: empty is no restriction, `none` allows nothing."""
    return "" if names is None else ", ".join(names) or NO_NAME


class Form:
    """The fields as typed, their meaning, and what is wrong with them. Each reader returns None for a wrong field.

    `errors` maps a field, or `form` for the whole form, to the sentence shown next to it. `values` gives back what was typed,
    so that a form with an error loses nothing.
    """

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = dict(values)
        self.errors: dict[str, str] = {}

    def raw(self, field: str) -> str:
        """Return what was typed, without surrounding space."""
        return self.values.get(field, "").strip()

    def fail(self, field: str, sentence: str) -> None:
        """Show `sentence` next to `field`; the first one stays."""
        self.errors.setdefault(field, sentence)

    def fail_with(self, error: GatehouseError, fields: Sequence[str]) -> None:
        """Show the error of a service next to the field that it names, or above the form if that is not one of `fields`.

        Next to a field, whose label already names it, `email must be …` becomes `Must be …`.
        """
        field = (error.param or "").rsplit(".", 1)[-1]
        beside = field in fields
        said = error.message.removeprefix(f"{error.param} ") if beside else error.message
        self.fail(field if beside else FORM_ERROR, sentence(said if said.startswith("must ") else error.message))

    def touches(self, fields: Iterable[str]) -> bool:
        """Return whether one of `fields` is filled in or wrong, and so must not be hidden again."""
        return any(self.raw(field) or field in self.errors for field in fields)

    def text(self, field: str, *, chars_max: int = NAME_CHARS_MAX) -> str:
        """Return a text that must not be empty."""
        value = self.raw(field)
        if not value:
            self.fail(field, "Fill this in.")
        elif len(value) > chars_max:
            self.fail(field, f"At most {chars_max} characters, not {len(value)}.")
        return value

    def choice(self, field: str, allowed: Sequence[str]) -> str:
        """Return one of `allowed`."""
        value = self.raw(field)
        if value not in allowed:
            self.fail(field, f"Choose one of {', '.join(allowed)}.")
        return value

    def whole_number(self, field: str, *, least: int = 0, most: int = COUNT_MAX, required: bool = False) -> int | None:
        """Return a whole number within the limits, or None for an empty field, which is an error if it is `required`.

        Spaces and commas between digits are fine.
        """
        typed = re.sub(r"[\s,_]", "", self.raw(field))
        if not typed:
            if required:
                self.fail(field, "Fill this in.")
            return None
        if not typed.isascii() or not typed.isdigit():
            self.fail(field, f"A whole number{'' if required else ', or empty'}.")
            return None
        value = int(typed) if len(typed) <= 20 else most + 1
        if not least <= value <= most:
            self.fail(field, f"Between {least:,} and {most:,}.")
            return None
        return value

    def amount_micros(self, field: str, *, required: bool = False) -> int | None:
        """Return an amount of money in micro-units, or None for an empty field, which is an error if it is `required`.

        Uses no floating point. A comma before three digits is refused: it may separate thousands or decimals.
        """
        typed = self.raw(field)
        if not typed:
            if required:
                self.fail(field, "Fill this in.")
            return None
        match = _AMOUNT.fullmatch(typed)
        if match is None:
            self.fail(field, f"An amount like 250 or 12.50, with at most six decimals{'' if required else ', or empty'}.")
            return None
        whole, decimals = match.group(1), match.group(2) or ""
        if _THOUSANDS.fullmatch(typed):
            self.fail(field, f"Either {whole}{decimals} or {whole}.{decimals}: write it without a comma.")
            return None
        return int(whole) * MICROS_PER_UNIT + int(decimals.ljust(6, "0"))

    def last_day(self, field: str, now: datetime, calendar: BillingCalendar) -> datetime | None:
        """Return the last second of a day that is not yet over in the billing time zone, or None for an empty field."""
        typed = self.raw(field)
        if not typed:
            return None
        try:
            moment = calendar.next_day_start(date.fromisoformat(typed)) - timedelta(seconds=1)
        except (ValueError, OverflowError):
            self.fail(field, "A day like 2027-03-31, or empty.")
            return None
        if moment <= now:
            self.fail(field, "A day that is not over yet.")
            return None
        return moment

    def first_day(self, field: str, calendar: BillingCalendar) -> datetime | None:
        """Return when a day begins in the billing time zone, or None for an empty field."""
        typed = self.raw(field)
        if not typed:
            return None
        try:
            return calendar.day_start(date.fromisoformat(typed))
        except (ValueError, OverflowError):
            self.fail(field, "A day like 2027-03-31, or empty.")
            return None

    def names(self, field: str) -> tuple[str, ...] | None:
        """Return the names of a list typed with commas or line breaks, an empty tuple for `none`, and None for an empty field
        (no restriction)."""
        if self.raw(field).casefold() == NO_NAME:
            return ()
        found = tuple(dict.fromkeys(name.strip() for name in re.split(r"[,\n]", self.raw(field)) if name.strip()))
        return found or None

    def changed_names(self, field: str, stored: Sequence[str] | None) -> tuple[str, ...] | Unset | None:
        """Like `names`, but UNSET for a field that still shows `stored` or is not in the form."""
        untouched = field not in self.values or self.raw(field) == names_text(stored)
        return UNSET if untouched else self.names(field)
