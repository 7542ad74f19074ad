"""Reads traces of requests: arrival times, tenants, lengths of prompts and answers. Knows no torch.

    .csv    TIMESTAMP, ContextTokens, GeneratedTokens               date and time of day (Azure's LLM inference traces)
            arrival_s, [tenant], input_tokens, output_tokens        seconds; other columns are ignored (ServeGen)
            [tenant], input_tokens, output_tokens                   lengths alone: the caller chooses a rate
    .jsonl  timestamp, input_length, output_length, [hash_ids], [tenant]   milliseconds; one id per 512-token prefix block,
                                                                           equal ids are equal prefixes (Mooncake)

Times count from the first request. Rows may come in any order. A row of zero tokens is a request that failed when the trace
was recorded: it is left out and counted. Anything else that is wrong raises `TraceError` with file, line and field.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from engine.errors import TraceError
from engine.number_checks import is_integer

ROWS_MAX = 5_000_000
TOKENS_MAX = 100_000_000
LINE_CHARS_MAX = 1_000_000
TENANT_CHARS_MAX = 200
HASH_BLOCK_TOKENS = 512
TIME_MAX_S = 1e9


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One row. `block_ids` names the prompt's blocks of 512 tokens, the last one possibly shorter; empty when unknown."""

    arrival_s: float
    tenant: str
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class Trace:
    """All rows, by time. `num_empty`: rows of zero tokens that were left out; `was_unsorted`: the file was not in order."""

    name: str
    requests: list[TracedRequest] = field(default_factory=list)
    has_times: bool = True
    has_tenants: bool = False
    num_empty: int = 0
    was_unsorted: bool = False


class _Row:
    """One row's fields, converted. Every error names the line and the field."""

    def __init__(self, path: Path, line: int, values: Mapping[str, Any]) -> None:
        self._path, self._line, self._values = path, line, values

    def error(self, name: str, message: str) -> TraceError:
        return TraceError(self._path, self._line, name, message)

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def get(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            raise self.error(name, "is missing")
        return value

    def count(self, name: str) -> int:
        value = self.get(name)
        text = str(value).strip()
        if isinstance(value, bool | float) or not (text.isascii() and text.isdigit() and len(text) <= 12):
            raise self.error(name, f"must be a whole number of tokens, not {_shown(value)}")
        if int(text) > TOKENS_MAX:
            raise self.error(name, f"must be at most {TOKENS_MAX} tokens, not {text}")
        return int(text)

    def number(self, name: str) -> float:
        value = self.get(name)
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not abs(number) <= TIME_MAX_S * 1000:
            raise self.error(name, f"must be a time as a number, not {_shown(value)}")
        return number

    def timestamp(self, name: str) -> float:
        """Seconds since 1970 of a date and time, which may have more digits than Python reads."""
        text = str(self.get(name)).strip()
        whole, _, fraction = text.partition(".")
        zone = fraction.lstrip("0123456789")
        digits = fraction.removesuffix(zone)
        try:
            parsed = datetime.fromisoformat(whole + zone) if zone[:1] != "." else None
        except ValueError:
            parsed = None
        if parsed is None:
            raise self.error(name, f"must be a date and a time like 2023-11-16 18:15:46.68, not {_shown(text)}")
        if parsed.tzinfo is None:
            parsed = parsed.replace(tzinfo=UTC)
        return parsed.timestamp() + (float(f"0.{digits}") if digits else 0.0)

    def tenant(self) -> str:
        name = str(self._values.get("tenant") or "").strip()
        if len(name) > TENANT_CHARS_MAX:
            raise self.error("tenant", f"must have at most {TENANT_CHARS_MAX} characters")
        return name or "default"

    def block_ids(self, input_tokens: int) -> tuple[int, ...]:
        ids = self._values.get("hash_ids")
        if ids is None:
            return ()
        if not isinstance(ids, list) or not all(map(is_integer, ids)):
            raise self.error("hash_ids", "must be a list of whole numbers")
        expected = -(-input_tokens // HASH_BLOCK_TOKENS)
        if len(ids) != expected:
            raise self.error("hash_ids", f"must name {expected} blocks of {HASH_BLOCK_TOKENS} tokens, not {len(ids)}")
        return tuple(ids)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _azure(row: _Row) -> TracedRequest:
    return TracedRequest(row.timestamp("TIMESTAMP"), row.tenant(), row.count("ContextTokens"), row.count("GeneratedTokens"))


def _seconds(row: _Row) -> TracedRequest:
    return TracedRequest(row.number("arrival_s"), row.tenant(), row.count("input_tokens"), row.count("output_tokens"))


def _lengths(row: _Row) -> TracedRequest:
    return TracedRequest(0.0, row.tenant(), row.count("input_tokens"), row.count("output_tokens"))


def _milliseconds(row: _Row) -> TracedRequest:
    input_tokens = row.count("input_length")
    return TracedRequest(
        row.number("timestamp") / 1000,
        row.tenant(),
        input_tokens,
        row.count("output_length"),
        row.block_ids(input_tokens),
    )


_Read = Callable[[_Row], TracedRequest]

CSV_FORMATS: tuple[tuple[frozenset[str], _Read], ...] = (
    (frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), _azure),
    (frozenset({"arrival_s", "input_tokens", "output_tokens"}), _seconds),
    (frozenset({"input_tokens", "output_tokens"}), _lengths),
)


def read_trace(path: Path) -> Trace:
    """All requests of a file, by time. Raises `TraceError`."""
    trace = Trace(path.name)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = _lines(path, file)
            rows = _jsonl_rows(path, lines) if path.suffix == ".jsonl" else _csv_rows(path, lines, trace)
            for row, read in rows:
                _add_row(trace, row, read)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise TraceError(path, None, None, f"cannot be read: {reason}") from error
    if not trace.requests:
        raise TraceError(path, None, None, "has no requests")
    _shift_to_zero(trace)
    return trace


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(LINE_CHARS_MAX + 1), ""), start=1):
        if number > ROWS_MAX:
            raise TraceError(path, number, None, f"a trace has at most {ROWS_MAX} lines")
        if len(line) > LINE_CHARS_MAX:
            raise TraceError(path, number, None, f"a line has at most {LINE_CHARS_MAX} characters")
        yield line


def _csv_rows(path: Path, lines: Iterator[str], trace: Trace) -> Iterator[tuple[_Row, _Read]]:
    reader = csv.reader(lines, strict=True)
    header = next(reader, None)
    if header is None:
        raise TraceError(path, None, None, "is empty")
    columns = [name.strip() for name in header]
    read = next((parse for names, parse in CSV_FORMATS if names <= set(columns)), None)
    if read is None:
        known_formats = "; ".join(", ".join(sorted(names)) for names, _ in CSV_FORMATS)
        raise TraceError(path, 1, None, f"the columns are none of a known trace ({known_formats}): {_shown(','.join(columns))}")
    trace.has_times = read is not _lengths
    trace.has_tenants = "tenant" in columns
    while True:
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise TraceError(path, reader.line_num, None, f"is not CSV: {error}") from None
        if values is None:
            return
        if len(values) > len(columns):
            raise TraceError(path, reader.line_num, None, f"has {len(values)} fields for {len(columns)} columns")
        if values:
            yield _Row(path, reader.line_num, dict(zip(columns, values, strict=False))), read


def _jsonl_rows(path: Path, lines: Iterator[str]) -> Iterator[tuple[_Row, _Read]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise TraceError(path, number, None, "is not JSON") from None
        if not isinstance(values, dict):
            raise TraceError(path, number, None, "must be a JSON object")
        yield _Row(path, number, values), _milliseconds


def _add_row(trace: Trace, row: _Row, read: _Read) -> None:
    request = read(row)
    if not request.input_tokens or not request.output_tokens:
        trace.num_empty += 1
        return
    trace.has_tenants = trace.has_tenants or row.has("tenant")
    if trace.requests and request.arrival_s < trace.requests[-1].arrival_s:
        trace.was_unsorted = True
    trace.requests.append(request)


def _shift_to_zero(trace: Trace) -> None:
    if trace.was_unsorted:
        trace.requests.sort(key=lambda request: request.arrival_s)
    first_s = trace.requests[0].arrival_s
    if first_s:
        trace.requests = [replace(request, arrival_s=request.arrival_s - first_s) for request in trace.requests]
