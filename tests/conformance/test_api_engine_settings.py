"""Settings of models take effect: host memory blocks, speculation, queue deadline, default of max_tokens; bad draft models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.conftest import MODEL
from tests.support.polling import block_until
from tests.support.server import Server, running_server, start_server

PROMPT: list[Any] = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog " * 4}]
DEFAULT_MAX_TOKENS = 7
LONG: dict[str, Any] = {"model": MODEL, "messages": PROMPT, "max_tokens": 600, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tuned_server(served_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An appliance whose engine_reading runs one request at a time and has every optional feature configured."""
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "prefix.txt").write_text("You are helpful.")
    options = {
        "swap_space_gib": 0.01,
        "speculative": '{"method": "ngram", "num_speculative_tokens": 3}',
        "batch_invariant": True,
        "scheduling_policy": "fcfs",
        "inter_token_target_ms": 40,
        "shared_prefixes": [str(folder / "prefix.txt")],
        "max_num_seqs": 1,
        "queue_deadline_s": 0.2,
        "default_max_tokens": DEFAULT_MAX_TOKENS,
    }
    with running_server(served_folder, folder / "data", **options) as running:
        yield running


def post(server: Server, **fields: Any) -> httpx.Response:
    return server.chat({**LONG, **fields})


def post_until_admitted(server: Server, **fields: Any) -> httpx.Response:
    """Post until the answer begins within the queue deadline, which a slow machine may miss at first."""
    answers: list[httpx.Response] = []

    def is_admitted() -> bool:
        answers.append(post(server, **fields))
        return answers[-1].status_code != 503

    block_until(is_admitted, server.log)
    return answers[-1]


def test_host_memory_blocks_and_draft_tokens_are_reported(tuned_server: Server) -> None:
    assert post_until_admitted(tuned_server).status_code == 200
    block_until(lambda: engine_reading(tuned_server)["draft_tokens_total"] > 0, tuned_server.log)

    assert engine_reading(tuned_server)["host_kv_blocks"]["total"] > 0
    assert (
        engine_reading(tuned_server)["draft_tokens_total"] >= engine_reading(tuned_server)["accepted_draft_tokens_total"] >= 0
    )


def test_rejected_draft_tokens_are_billed_to_their_request(tuned_server: Server) -> None:
    block_until(lambda: engine_reading(tuned_server)["requests_running"] == 0, tuned_server.log)
    before = engine_reading(tuned_server)
    answer = post_until_admitted(tuned_server, max_tokens=60)
    (event,) = tuned_server.admin("GET", "/ledger", params={"request_id": answer.headers["x-request-id"]})["data"]

    def num_rejected() -> int:
        now = engine_reading(tuned_server)
        names = ("draft_tokens_total", "accepted_draft_tokens_total")
        drafted, accepted = (now[name] - before[name] for name in names)
        return int(drafted - accepted)

    block_until(lambda: num_rejected() == event["rejected_tokens"], tuned_server.log)


def test_the_ledger_records_every_token_of_the_engine(tuned_server: Server) -> None:
    post_until_admitted(tuned_server, n=2, max_tokens=20, stop=["e"])
    block_until(lambda: engine_reading(tuned_server)["requests_running"] == 0, tuned_server.log)
    text = httpx.get(f"{tuned_server.url}/metrics").text
    assert "gatehouse_unrecorded_usage_tokens_total 0.0" in text
    assert "gatehouse_ledger_up 1.0" in text


def test_a_model_that_health_checks_call_ready_is_exported_as_ready(tuned_server: Server) -> None:
    tuned_server.wait_until_ready()
    line = f'gatehouse_model_ready{{model="{MODEL}"}} 1.0'
    block_until(lambda: line in httpx.get(f"{tuned_server.url}/metrics").text, tuned_server.log)


def engine_reading(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.admin("GET", "/system")["engine"][0]
    return found


def test_without_max_tokens_every_choice_ends_at_the_default(tuned_server: Server) -> None:
    answer = post_until_admitted(tuned_server, max_tokens=None, n=2)
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length"] * 2
    assert answer.json()["usage"]["completion_tokens"] == 2 * DEFAULT_MAX_TOKENS


def test_without_max_tokens_a_stream_ends_at_the_default(tuned_server: Server) -> None:
    answer = post_until_admitted(tuned_server, max_tokens=None, stream=True, stream_options={"include_usage": True})
    frames = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert [choice["finish_reason"] for frame in frames for choice in frame["choices"]][-1] == "length"
    assert frames[-1]["usage"]["completion_tokens"] == DEFAULT_MAX_TOKENS


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_a_request_may_ask_for_more_than_the_default(tuned_server: Server, field: str) -> None:
    answer = post_until_admitted(tuned_server, **{"max_tokens": None, field: DEFAULT_MAX_TOKENS + 1})
    assert answer.json()["usage"]["completion_tokens"] == DEFAULT_MAX_TOKENS + 1


def test_the_default_of_max_tokens_is_shown_to_clients_and_operators(tuned_server: Server) -> None:
    headers = {"authorization": f"Bearer {tuned_server.api_key}"}
    (listed,) = httpx.get(f"{tuned_server.url}/v1/models", headers=headers).json()["data"]
    assert listed["default_max_tokens"] == engine_reading(tuned_server)["default_max_tokens"] == DEFAULT_MAX_TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_past_the_queue_deadline_gets_503_and_is_not_billed(tuned_server: Server, stream: bool) -> None:
    with tuned_server.stream_chat({**LONG, "n": 8}) as holder:
        lines = holder.iter_lines()
        next(lines)
        answer = post(tuned_server, stream=stream, max_tokens=1)
        next(lines)
    (event,) = tuned_server.admin("GET", "/ledger", params={"request_id": answer.headers["x-request-id"]})["data"]

    assert "overloaded" in answer.text
    if not stream:
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
    assert (event["finish_reason"], event["status"], event["cost_picos"]) == ("deadline", "voided", 0)


def test_answers_of_one_request_that_run_one_after_another_miss_no_deadline(tuned_server: Server) -> None:
    answer = post_until_admitted(tuned_server, n=3)

    assert answer.status_code == 200
    assert [choice["finish_reason"] for choice in answer.json()["choices"]] == ["length"] * 3


def test_a_draft_model_that_cannot_be_loaded_ends_the_start_and_is_named(served_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    options: dict[str, Any] = {"speculative": {"method": "draft_model", "model": str(tmp_path / "hollow")}}
    server = start_server(served_folder, tmp_path / "data", **options)
    try:
        block_until(lambda: not server.process.is_alive(), server.log)

        assert server.wait_for_exit() == 1
        assert "hollow" in server.log()
    finally:
        server.kill()
