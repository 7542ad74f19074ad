"""Output of commands: tables on a terminal, tab-separated lines in a pipe, JSON with --json."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer

Row = Mapping[str, Any]

TABLE_CHARS_MAX = 10_000  # wider than any row
_TIME = re.compile(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?Z$")


def data(value: object) -> None:
    """Print `value` as JSON."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def table(rows: Sequence[Row], columns: Sequence[str], *, empty: str) -> None:
    """Print `columns` of `rows`, or the message `empty`. In a pipe a header line is always printed, for programs, and `empty`
    goes to standard error."""
    if not sys.stdout.isatty():
        sys.stdout.write("\t".join(columns) + "\n")
        for row in rows:
            sys.stdout.write("\t".join(_cell(row.get(column)) for column in columns) + "\n")
        if not rows and empty:
            sys.stderr.write(empty + "\n")
        return
    if not rows:
        say(empty)
        return
    _draw(rows, columns)


def rows(
    found: Sequence[Row],
    columns: Sequence[str],
    *,
    empty: str,
    as_json: bool,
    line: Callable[[Row], Row] | None = None,
    has_more: bool | None = None,
) -> None:
    """Print a list as JSON, or as a table of `columns` in which `line` has converted each row to readable values.

    `has_more`: whether --limit left rows out; None for lists that are printed whole.
    """
    if as_json:
        data({"data": list(found)} | ({} if has_more is None else {"has_more": has_more}))
        return
    table(found if line is None else [line(row) for row in found], columns, empty=empty)
    if has_more:
        sys.stderr.write(f"There are more than these {len(found)}: give a larger --limit.\n")


def row(value: Row, columns: Sequence[str], *, as_json: bool, line: Callable[[Row], Row] | None = None) -> None:
    """Print one item as JSON, or as a one-row table in which `line` has converted it to readable values."""
    if as_json:
        data(value)
    else:
        table([value if line is None else line(value)], columns, empty="")


def facts(values: Row) -> None:
    """Print one item with one field per line."""
    width = max((len(name) for name in values), default=0) if sys.stdout.isatty() else 0
    for name, value in values.items():
        separator = "  " if width else "\t"
        sys.stdout.write(f"{name.replace('_', ' ') if width else name:<{width}}{separator}{_cell(value)}\n")


def item(values: Row, *, as_json: bool, note: str = "") -> None:
    """Print one item as JSON, or with one field per line followed by `note` on standard error."""
    if as_json:
        data(values)
        return
    facts(values)
    if note:
        sys.stderr.write(note + "\n")


def say(text: str) -> None:
    """Print one line of text."""
    sys.stdout.write(text + "\n")


@contextmanager
def progress(title: str, *, quiet: bool) -> Iterator[Callable[[float], None]]:
    """Yield a function that takes the completed fraction: it updates a progress bar on a terminal only."""
    if quiet or not sys.stdout.isatty():
        yield lambda _fraction: None
        return
    from rich.progress import Progress

    with Progress(transient=True, redirect_stderr=sys.stderr.isatty()) as bar:  # not if standard error is a file
        task = bar.add_task(title, total=1.0)
        yield lambda fraction: bar.update(task, completed=fraction)


def failed(message: str, code: str, *, as_json: bool, done: Row | None = None) -> None:
    """Report a failure as JSON on standard output, after the fields of what was `done` all the same, or on standard error, each
    failure on a line of its own. A line that is indented goes on with the failure before it."""
    if as_json:
        data({**(done or {}), "error": {"message": message, "code": code}})
    else:
        lines = message.splitlines()
        sys.stderr.write("".join(f"{line}\n" if line.startswith(" ") else f"gatehouse: {line}\n" for line in lines))


def usage_error(error: typer.TyperException, *, as_json: bool) -> int:
    """Report wrong usage and return the exit status."""
    status = int(getattr(error, "exit_code", 2))
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if as_json or not hasattr(error, "show"):
        failed(message, "usage", as_json=as_json)
    else:
        error.show()
    return status


def _draw(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Print a table on a terminal, or one field per line if the terminal is too narrow. Nothing is truncated, because the next
    command may need an id from here."""
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    console = Console()
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        drawn.add_column(
            column.replace("_", " "), justify="right" if _numeric(rows, column) else "left", no_wrap=_is_id(column)
        )
    for row in rows:
        drawn.add_row(*(Text(_terminal_cell(row.get(column)), overflow="fold") for column in columns))
    if Measurement.get(console, console.options.update(width=TABLE_CHARS_MAX), drawn).minimum <= console.width:
        console.print(drawn)
        return
    for number, row in enumerate(rows):
        if number:
            say("")
        facts({column: row.get(column) for column in columns})


def _is_id(column: str) -> bool:
    """Return whether `column` contains ids, which are never wrapped, so that they can be copied."""
    return column in ("id", "prefix") or column.endswith("_id")


def _terminal_cell(value: Any) -> str:
    """Return a cell for a terminal: times are cut to seconds, with a space where the line can wrap."""
    return _TIME.sub(r"\1 \2Z", _cell(value))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(_cell(item) for item in value) or "-"
    if isinstance(value, Mapping):
        return " ".join(f"{key}={_cell(item)}" for key, item in value.items() if item is not None) or "-"
    return str(value).replace("\t", " ").replace("\n", " ")


def _numeric(rows: Sequence[Row], column: str) -> bool:
    return all(isinstance(row.get(column), int | float | None) and not isinstance(row.get(column), bool) for row in rows)
