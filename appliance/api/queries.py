"""Query parameters of the administrators' API: checked, with errors in our own words. An unknown one is an error too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from typing import Any, TypeVar

from litestar import Request
from litestar.connection import ASGIConnection

from appliance.base.digits import whole_number
from appliance.base.errors import InvalidValue, UnknownParameter
from appliance.tenancy.pages import PAGE_ROWS_DEFAULT, PAGE_ROWS_MAX, Page, decode_cursor, page_of

AdminRequest = Request[Any, Any, Any]
Connection = ASGIConnection[Any, Any, Any, Any]
PAGING = ("limit", "cursor")
ORDERS = ("asc", "desc")
VALUES_MAX = 1000  # of a parameter that may be given several times

T = TypeVar("T")


def check_query(connection: Connection) -> None:
    """Raise UnknownParameter for a query parameter that the handler does not name in its `opt["query"]`, and InvalidValue for
    one that was given several times and is not in its `opt["repeatable"]`. `auth` calls this for every handler."""
    options = connection.route_handler.opt
    known, repeatable = options.get("query", ()), options.get("repeatable", ())
    for name in connection.query_params:
        if name not in known:
            raise UnknownParameter(f"unknown parameter: {name}", param=name)
        if name not in repeatable and len(connection.query_params.getall(name)) > 1:
            raise InvalidValue(f"{name} takes one value", param=name)


def paging(request: AdminRequest, *, limit_default: int = PAGE_ROWS_DEFAULT) -> tuple[int, str | None]:
    """Return the limit and the cursor of a request for a list. Raises InvalidValue."""
    limit = whole(request, "limit", 1, PAGE_ROWS_MAX)
    return limit_default if limit is None else limit, request.query_params.get("cursor")


def whole(request: AdminRequest, name: str, low: int, high: int) -> int | None:
    """Return a whole number from `low` to `high`, None when it was not given. Raises InvalidValue."""
    text = request.query_params.get(name)
    if text is None:
        return None
    number = whole_number(text, high)
    if number is None or number < low:
        raise InvalidValue(f"{name} must be a whole number from {low} to {high}", param=name)
    return number


def short_page(request: AdminRequest, rows: Iterable[T], name: str, position_of: Callable[[T], str]) -> Page[T]:
    """Return a page of the list `name`; `rows` is the whole list. Without a `limit` it is as long as a page may be."""
    limit, cursor = paging(request, limit_default=PAGE_ROWS_MAX)
    ordered = sorted(rows, key=position_of)
    if cursor is not None:
        (last,) = decode_cursor(name, cursor, [str])
        ordered = [row for row in ordered if position_of(row) > last]
    return page_of(ordered, limit, name, lambda row: [position_of(row)])


def moment(request: AdminRequest, name: str) -> datetime | None:
    """Return an RFC 3339 time, None when it was not given."""
    text = request.query_params.get(name)
    return None if text is None else parse_moment(text, name)


def parse_moment(text: str, param: str) -> datetime:
    """Return `text`, an RFC 3339 time with a zone, as UTC. Lower-case letters are accepted, and a plus sign that a form turned
    into a space."""
    text = text.upper()
    try:
        parsed = datetime.fromisoformat(text.replace(" ", "+") if "T" in text else text)
        if parsed.tzinfo is not None:
            return parsed.astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"{param} must be an RFC 3339 time, e.g. 2026-01-31T12:00:00Z", param=param) from error
    raise InvalidValue(f"{param} must include a UTC offset, e.g. 2026-01-31T12:00:00Z", param=param)


def choice(request: AdminRequest, name: str, choices: Collection[str], default: str | None) -> str | None:
    """Return one of `choices`, or `default` when it was not given."""
    value = request.query_params.get(name)
    if value is None:
        return default
    if value not in choices:
        raise InvalidValue(f"{name} must be one of {', '.join(choices)}", param=name)
    return str(value)


def flag(request: AdminRequest, name: str) -> bool:
    """Return a true/false parameter; false when it was not given."""
    return choice(request, name, ("true", "false"), "false") == "true"


def both(*names: str) -> tuple[str, ...]:
    """Return both ways to write each repeated parameter: `name` and `name[]`."""
    return tuple(form for name in names for form in (name, f"{name}[]"))


def many(request: AdminRequest, name: str) -> frozenset[str] | None:
    """Return every value of a repeated parameter, None when it was not given. Raises InvalidValue for too many."""
    values = [value for form in both(name) for value in request.query_params.getall(form, [])]
    if len(values) > VALUES_MAX:
        raise InvalidValue(f"{name} takes at most {VALUES_MAX} values", param=name)
    return frozenset(values) if values else None
