"""Logs: one line each on standard error, as JSON or text, with the request id, also those of libraries."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
import structlog

from appliance.base.logging import configure_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Restore logging after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_a_line_is_json_with_its_request_id(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", json=True)
    structlog.contextvars.bind_contextvars(request_id="req_1")
    structlog.get_logger().info("admitted", tokens=5)
    structlog.get_logger().debug("not shown")
    logging.getLogger("some.library").warning("hello %s", "there")
    captured = capsys.readouterr()
    ours, theirs = (json.loads(line) for line in captured.err.splitlines())
    assert captured.out == ""
    assert (ours["event"], ours["tokens"], ours["request_id"], ours["level"]) == ("admitted", 5, "req_1", "info")
    assert (theirs["event"], theirs["logger"], theirs["request_id"]) == ("hello there", "some.library", "req_1")


def test_the_traceback_of_an_error_is_on_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", json=True)
    try:
        raise KeyError("lost")
    except KeyError:
        structlog.get_logger().exception("failed")
        logging.getLogger("some.library").exception("failed too")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert len(lines) == 2
    assert all("KeyError" in json.dumps(line) for line in lines)


def test_text_logs_are_one_readable_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", json=False)
    structlog.get_logger().info("not shown")
    structlog.get_logger().warning("disk nearly full", free_bytes=5)
    (line,) = capsys.readouterr().err.splitlines()
    assert "disk nearly full" in line
    assert "free_bytes=5" in line


def test_lines_are_written_to_the_current_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging("info", json=True)
    above_a_progress_bar = io.StringIO()
    monkeypatch.setattr(sys, "stderr", above_a_progress_bar)
    structlog.get_logger().info("ours")
    logging.getLogger("some.library").info("theirs")

    assert [json.loads(line)["event"] for line in above_a_progress_bar.getvalue().splitlines()] == ["ours", "theirs"]
