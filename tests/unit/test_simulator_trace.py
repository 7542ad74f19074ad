"""Trace files: all formats, unusual rows, and errors that name file, line and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import TraceError
from engine.simulator.trace import LINE_CHARS_MAX, TracedRequest, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
SECONDS = "arrival_s,tenant,input_tokens,output_tokens"


def write_trace(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def json_row(**changed: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8], **changed})


def test_dates_with_seven_fraction_digits_and_crlf_are_read(tmp_path: Path) -> None:
    text = f"{AZURE}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
    trace = read_trace(write_trace(tmp_path, text))
    assert [(r.input_tokens, r.output_tokens) for r in trace.requests] == [(374, 44), (396, 109)]
    assert trace.requests[0].arrival_s == 0.0
    assert trace.requests[1].arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert trace.has_times
    assert not trace.has_tenants


def test_a_date_may_have_a_time_zone(tmp_path: Path) -> None:
    text = f"{AZURE}\n2023-11-16 18:00:00.5+00:00,1,1\n2023-11-16T19:00:01.5+01:00,1,1"
    assert [r.arrival_s for r in read_trace(write_trace(tmp_path, text)).requests] == pytest.approx([0.0, 1.0], abs=1e-6)


def test_tenants_are_read_and_unknown_columns_ignored(tmp_path: Path) -> None:
    text = "arrival_s,tenant,input_tokens,output_tokens,reason_ratio\n1.5,alice,3,4,0.7\n2,,5,6,0.1\n"
    trace = read_trace(write_trace(tmp_path, text))
    assert trace.requests == [TracedRequest(0.0, "alice", 3, 4), TracedRequest(0.5, "default", 5, 6)]
    assert trace.has_tenants


def test_a_trace_of_lengths_has_no_times(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, "input_tokens,output_tokens\n3,4\n"))
    assert not trace.has_times
    assert trace.requests == [TracedRequest(0.0, "default", 3, 4)]


def test_block_hashes_are_read_from_json_lines(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, json_row() + "\n\n" + json_row(timestamp=3000, tenant="bob"), "trace.jsonl"))
    assert trace.requests[0].block_ids == (7, 8)
    assert trace.requests[1] == TracedRequest(3.0, "bob", 600, 5, (7, 8))


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    assert read_trace(write_trace(tmp_path, "\ufeffinput_tokens,output_tokens\n3,4\n")).requests


def test_unsorted_rows_are_sorted_and_flagged(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, f"{SECONDS}\n9,a,1,1\n4,b,1,1\n6,c,1,1\n"))
    assert [(r.arrival_s, r.tenant) for r in trace.requests] == [(0, "b"), (2, "c"), (5, "a")]
    assert trace.was_unsorted


def test_rows_without_tokens_are_dropped_and_counted(tmp_path: Path) -> None:
    trace = read_trace(write_trace(tmp_path, f"{SECONDS}\n1,a,0,5\n2,a,5,0\n3,a,5,5\n"))
    assert len(trace.requests) == 1
    assert trace.num_empty == 2


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("x,a,1,1", "arrival_s"),
        ("nan,a,1,1", "arrival_s"),
        ("inf,a,1,1", "arrival_s"),
        (",a,1,1", "arrival_s"),
        ("1,a,-1,1", "input_tokens"),
        ("1,a,1.5,1", "input_tokens"),
        ("1,a,,1", "input_tokens"),
        ("1,a,²,1", "input_tokens"),
        ("1,a,9999999999,1", "input_tokens"),
        (f"1,a,{'9' * 5000},1", "input_tokens"),
        ("1,a,1", "output_tokens"),
        (f"1,{'t' * 300},1,1", "tenant"),
    ],
)
def test_an_invalid_csv_field_is_named_with_its_line(tmp_path: Path, line: str, field: str) -> None:
    path = write_trace(tmp_path, f"{SECONDS}\n0,a,1,1\n{line}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert (caught.value.path, caught.value.line, caught.value.field) == (path, 3, field)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 200


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"timestamp": "soon"}, "timestamp"),
        ({"timestamp": True}, "timestamp"),
        ({"timestamp": None}, "timestamp"),
        ({"input_length": -4}, "input_length"),
        ({"input_length": True}, "input_length"),
        ({"output_length": 2.5}, "output_length"),
        ({"output_length": [1]}, "output_length"),
        ({"hash_ids": "7,8"}, "hash_ids"),
        ({"hash_ids": [7, "8"]}, "hash_ids"),
        ({"hash_ids": [7]}, "hash_ids"),
    ],
)
def test_an_invalid_json_field_is_named_with_its_line(tmp_path: Path, changed: dict[str, object], field: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write_trace(tmp_path, f"{json_row()}\n{json_row(**changed)}\n", "trace.jsonl"))
    assert (caught.value.line, caught.value.field) == (2, field)


@pytest.mark.parametrize("date", ["yesterday", "2023-13-01 00:00:00", "2023-11-16 18:15:46.1.2", ""])
def test_an_invalid_date_is_named(tmp_path: Path, date: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write_trace(tmp_path, f"{AZURE}\n{date},1,1\n"))
    assert (caught.value.line, caught.value.field) == (2, "TIMESTAMP")


@pytest.mark.parametrize(
    ("text", "name", "line"),
    [
        ("", "trace.csv", None),
        (f"{SECONDS}\n", "trace.csv", None),
        (f"{SECONDS}\n1,a,0,0\n", "trace.csv", None),
        ("when,what\n1,2\n", "trace.csv", 1),
        (f"{SECONDS}\n1,a,1,1,9\n", "trace.csv", 2),
        (f'{SECONDS}\n1,"a,1,1\n', "trace.csv", 2),
        ("input_tokens,output_tokens\n" + "1" * (LINE_CHARS_MAX + 1), "trace.csv", 2),
        ("{}\n{", "trace.jsonl", 1),
        (f"{json_row()}\n{{", "trace.jsonl", 2),
        (f"{json_row()}\n[1]", "trace.jsonl", 2),
        (f"{json_row()}\n{'[' * 100000}", "trace.jsonl", 2),
        (b"\xff\xfe\x00", "trace.csv", None),
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_with_the_line(
    tmp_path: Path, text: str | bytes, name: str, line: int | None
) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write_trace(tmp_path, text, name))
    assert caught.value.line == line


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere\.csv: cannot be read"):
        read_trace(tmp_path / "nowhere.csv")
