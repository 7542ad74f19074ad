"""The process that checks grammars: its answers, and what bounds it when nobody kills it."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from engine.grammar import matcher, worker
from engine.grammar.lark import to_lark
from engine.grammar.matcher import Built
from engine.grammar.spec import GrammarSpec
from engine.grammar.worker import job_line, serve, vocabulary_line
from tests.support.grammars import BYTES

GOOD = GrammarSpec("choice", '["a"]')


def nested_one_of(depth: int) -> dict[str, object]:
    """A schema that takes minutes to compile from depth 4 on."""
    return {"oneOf": [{"properties": {f"p{i}{depth}": nested_one_of(depth - 1)}} for i in range(8)]} if depth else {}


SLOW = GrammarSpec("json", json.dumps(nested_one_of(4)))


def answers_to(*specs: GrammarSpec, deadline_s: float = 60.0) -> list[dict[str, Any]]:
    answers = io.BytesIO()
    jobs = b"".join(job_line(spec, deadline_s) for spec in specs)
    serve(io.BytesIO(vocabulary_line(BYTES) + jobs), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


@pytest.fixture(autouse=True)
def alarms(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seconds of every alarm that was set; 0 is its end."""
    seconds: list[int] = []
    monkeypatch.setattr(signal, "alarm", seconds.append)
    return seconds


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A worker process that has read its vocabulary and compiled a grammar."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", "engine.grammar.worker"], bufsize=0, stdin=pipe, stdout=pipe) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(vocabulary_line(BYTES) + job_line(GOOD, 60.0))
        started.stdout.readline()
        yield started
        started.kill()


def test_each_grammar_is_answered_in_order_with_its_text_or_an_error() -> None:
    first, refused, last = answers_to(GOOD, GrammarSpec("regex", "("), GrammarSpec("choice", '["b"]'))
    assert list(first) == list(last) == ["lark", "built"]
    assert first != last
    assert refused["error"].startswith("guided_regex cannot be enforced: an unclosed (")


@pytest.mark.parametrize("failure", [RecursionError, MemoryError])
def test_a_grammar_that_exhausts_the_interpreter_is_refused_and_the_next_one_compiled(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    def failing_to_lark(spec: GrammarSpec) -> str:
        if spec == SLOW:
            raise failure
        return to_lark(spec)

    monkeypatch.setattr(worker, "to_lark", failing_to_lark)
    refused, compiled = answers_to(SLOW, GOOD)
    assert refused == {"error": "guided_json is too deeply nested or too large to compile"}
    assert list(compiled) == ["lark", "built"]


def test_a_grammar_has_at_most_so_many_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    (answer,) = answers_to(GOOD)
    monkeypatch.setattr(worker, "GRAMMAR_CHARACTERS_MAX", len(answer["lark"]))
    assert answers_to(GOOD)[0]["lark"] == answer["lark"]
    monkeypatch.setattr(worker, "GRAMMAR_CHARACTERS_MAX", len(answer["lark"]) - 1)
    (refused,) = answers_to(GOOD)
    assert refused == {"error": f"guided_choice makes a grammar of more than {len(answer['lark']) - 1} characters"}


def test_the_memory_of_a_grammar_is_measured() -> None:
    names = [f"name {index}" for index in range(300)]
    many_names = GrammarSpec(
        "json", json.dumps({"properties": {name: {"type": "string"} for name in names}, "required": names})
    )
    small_answer, large_answer = answers_to(GOOD, many_names)
    small, large = (Built(*answer["built"]).num_bytes for answer in (small_answer, large_answer))
    assert 1_000 < small < 500_000 < large < 20_000_000


@pytest.mark.parametrize(
    ("limit", "value", "states_max"),
    [
        ("SMALL_TABLE_STATES", 4_000, 4_000),
        ("SMALL_TABLE_STATES", 20, matcher.LEXER_STATES_MAX),
        ("REPLACEMENT_S_MAX", -1.0, matcher.LEXER_STATES_MAX),
    ],
    ids=["any", "its trial needs it", "it takes long to construct"],
)
def test_a_grammar_begins_with_a_large_table_if_that_could_not_be_had_later(
    monkeypatch: pytest.MonkeyPatch, limit: str, value: float, states_max: int
) -> None:
    monkeypatch.setattr(worker, "REPLACEMENT_S_MAX", 60.0)
    monkeypatch.setattr(worker, limit, value)
    (answer,) = answers_to(GrammarSpec("regex", "(a|b){9}-[a-z]{9}-[A-Z]{9}"))
    assert Built(*answer["built"]).states_max == states_max


def test_a_grammar_without_any_text_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = mock.Mock(side_effect=matcher.try_out)
    monkeypatch.setattr(worker, "try_out", tried)
    (refused,) = answers_to(GrammarSpec("grammar", "start: /[^\\x00-\\x{10FFFF}]/"))
    assert "cannot be satisfied" in refused["error"]
    assert tried.call_count == 1


def test_an_alarm_is_set_for_each_grammar_and_ends_with_it(alarms: list[int]) -> None:
    answers_to(GOOD, GrammarSpec("regex", "("), deadline_s=4.5)
    assert alarms == [7, 0, 7, 0]


def test_a_worker_whose_parent_does_not_kill_it_ends_itself_after_the_deadline(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(job_line(SLOW, 0.5 - worker.ALARM_MARGIN_S))
    assert process.wait(timeout=60) == -signal.SIGALRM


def test_a_worker_yields_the_processor_and_has_a_limit_of_memory(process: subprocess.Popen[bytes]) -> None:
    limits = resource.prlimit(process.pid, resource.RLIMIT_DATA)
    niceness = os.getpriority(os.PRIO_PROCESS, process.pid) - os.getpriority(os.PRIO_PROCESS, 0)
    assert (limits, niceness) == ((worker.HEAP_BYTES_MAX, worker.HEAP_BYTES_MAX), worker.NICENESS)


def test_a_worker_ends_when_its_input_is_closed(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 0
