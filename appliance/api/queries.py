"""Reads and checks the query parameters of the administrator API, with our own error messages. Unknown ones are errors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

from litestar import Request
from litestar.connection import ASGIConnection

from appliance.base.digits import whole_number
from appliance.base.errors import InvalidValue, UnknownParameter
from appliance.base.texts import did_you_mean
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, PAGE_ROWS_MAX, Page, decode_cursor, page_of

AdminRequest = Request[Any, Any, Any]
Connection = ASGIConnection[Any, Any, Any, Any]
PAGING = ("limit", "cursor")
ORDERS = ("asc", "desc")
VALUES_MAX = 1000  # of a repeatable parameter

T = TypeVar("T")


def check_query(connection: Connection) -> None:
    """Raise UnknownParameter for a query parameter that is not in the handler's `opt["query"]`, and InvalidValue for a repeated
    one that is not in its `opt["repeatable"]`. `auth` calls this for every handler."""
    options = connection.route_handler.opt
    known, repeatable = options.get("query", ()), options.get("repeatable", ())
    for name in connection.query_params:
        if name not in known:
            raise UnknownParameter(f"unknown parameter: {name}{did_you_mean(name, known)}", param=name)
        if name not in repeatable and len(connection.query_params.getall(name)) > 1:
            raise InvalidValue(f"{name} takes one value", param=name)


def paging(request: AdminRequest, *, limit_default: int = PAGE_ROWS_DEFAULT) -> tuple[int, str | None]:
    """Return `limit` and `cursor` of a request for a list. Raises InvalidValue."""
    limit = integer(request, "limit", 1, PAGE_ROWS_MAX)
    return limit_default if limit is None else limit, request.query_params.get("cursor")


def integer(request: AdminRequest, name: str, low: int, high: int) -> int | None:
    """Return an integer from `low` to `high`, or None if the parameter is missing. Raises InvalidValue."""
    text = request.query_params.get(name)
    if text is None:
        return None
    number = whole_number(text, high)
    if number is None or number < low:
        raise InvalidValue(f"{name} must be a whole number from {low} to {high}", param=name)
    return number


def page_of_list(request: AdminRequest, rows: Iterable[T], name: str, position_of: Callable[[T], str]) -> Page[T]:
    """Return a page of `rows`, the complete list called `name`, sorted by `position_of`. The default `limit` is the maximum."""
    limit, cursor = paging(request, limit_default=PAGE_ROWS_MAX)
    ordered = sorted(rows, key=position_of)
    if cursor is not None:
        (last,) = decode_cursor(name, cursor, [str])
        ordered = [row for row in ordered if position_of(row) > last]
    return page_of(ordered, limit, name, lambda row: [position_of(row)])


def timestamp(request: AdminRequest, name: str) -> datetime | None:
    """Return an RFC 3339 time, or None if the parameter is missing. Raises InvalidValue."""
    text = request.query_params.get(name)
    return None if text is None else parse_timestamp(text, name)


def parse_timestamp(text: str, param: str) -> datetime:
    """Return the RFC 3339 time `text`, which must have a UTC offset, as UTC. Accepts lower-case letters, and a space instead of
    a plus sign, which form encoding makes of it. Raises InvalidValue."""
    text = text.upper()
    try:
        parsed = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        if parsed.tzinfo is not None:
            return parsed.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"{param} must be an RFC 3339 time, e.g. 2026-01-31T12:00:00Z", param=param) from error
    raise InvalidValue(f"{param} must include a UTC offset, e.g. 2026-01-31T12:00:00Z", param=param)


def choice(request: AdminRequest, name: str, choices: Collection[str], default: str | None) -> str | None:
    """Return one of `choices`, or `default` if the parameter is missing. Raises InvalidValue."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if value not in choices:
        raise InvalidValue(f"{name} must be one of {', '.join(choices)}", param=name)
    return str(value)


def flag(request: AdminRequest, name: str) -> bool:
    """Return a true/false parameter; false if it is missing. Raises InvalidValue."""
    return choice(request, name, ("true", "false"), "false") == "true"


def both_spellings(*names: str) -> tuple[str, ...]:
    """Return both spellings of each repeatable parameter: `name` and `name[]`."""
    return tuple(spelling for name in names for spelling in (name, f"{name}[]"))


def values(request: AdminRequest, name: str) -> frozenset[str] | None:
    """Return all values of a repeatable parameter, or None if it is missing. Raises InvalidValue for too many."""
    given = [value for spelling in both_spellings(name) for value in request.query_params.getall(spelling, [])]
    if len(given) > VALUES_MAX:
        raise InvalidValue(f"{name} takes at most {VALUES_MAX} values", param=name)
    return frozenset(given) if given else None
