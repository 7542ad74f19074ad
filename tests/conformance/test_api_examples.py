"""The examples in the README and the API reference do what is said of them, against a running appliance."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import MODEL
from tests.support.server import Server

REPO = Path(__file__).resolve().parents[2]
PAGES = (REPO / "README.md", REPO / "docs" / "api.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONTEXT_LEN = 1024
CLIENT_SLEEP = "openai._base_client.time.sleep"  # its wait before a retry


def examples(language: str, beginning: str) -> list[str]:
    """Return the code blocks in `language` that contain `beginning`."""
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text("utf-8"))]
    return [text for name, text in blocks if name == language and beginning in text]


README_STREAM, STREAM, RETRY = examples("python", "OpenAI(")
CURL, CURL_STREAM, CURL_RETRY = examples("", "curl ")
with_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def with_address(text: str, server: Server, key: str | None) -> str:
    """Put the address, key and model of the test into an example."""
    for written, real in (("http://127.0.0.1:8000", server.url), ("gh_…", key or ""), ("gatehouse-demo", MODEL)):
        assert written in text
        text = text.replace(written, real)
    return text


def run_python(text: str, server: Server, key: str | None) -> dict[str, Any]:
    """Run an example and return its variables."""
    names: dict[str, Any] = {}
    exec(with_address(text, server, key), names)
    names["client"].close()
    return names


def run_shell(text: str, server: Server) -> subprocess.CompletedProcess[str]:
    command = with_address(text, server, server.api_key)
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)


def test_the_example_of_the_readme_prints_an_answer(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    run_python(README_STREAM, server, server.api_key)
    assert capsys.readouterr().out.strip()


def test_the_example_of_a_stream_ends_with_reason_and_usage(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    names = run_python(STREAM, server, server.api_key)
    usage, reason = names["usage"], names["finish_reason"]

    assert reason in ("stop", "length")
    assert usage.total_tokens <= CONTEXT_LEN
    assert capsys.readouterr().out.endswith(f"\n{reason}: {usage.prompt_tokens} + {usage.completion_tokens} tokens\n")


def test_the_example_of_retries_waits_exactly_until_a_limit_has_room(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tenant_id, key = server.new_key(tenant={"limits": {"requests_per_minute": 1}})
    waits: list[float] = []

    def make_room(seconds: float) -> None:
        waits.append(seconds)
        server.admin("PATCH", f"/tenants/{tenant_id}", json={"limits": {"requests_per_minute": None}})

    monkeypatch.setattr(CLIENT_SLEEP, make_room)
    run_python(RETRY, server, key)
    assert waits == []
    run_python(RETRY, server, key)

    assert len(waits) == 1
    assert 0 < waits[0] <= 60
    assert "429" not in capsys.readouterr().out


def test_the_example_of_retries_gives_up_where_waiting_is_pointless(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(CLIENT_SLEEP, waits.append)
    _, key = server.new_key(limits={"requests_per_minute": 0})
    run_python(RETRY, server, key)

    assert waits == []
    assert re.fullmatch(r"429 request_exceeds_limit req_\w+\n", capsys.readouterr().out)


@with_curl
@pytest.mark.parametrize("text", [CURL, CURL_RETRY], ids=["first", "retry"])
def test_an_example_with_curl_gets_an_answer(server: Server, text: str) -> None:
    assert '"finish_reason":"' in run_shell(text, server).stdout


@with_curl
def test_the_events_of_a_stream_come_in_the_order_of_the_table(server: Server) -> None:
    *events, done = (line.removeprefix("data: ") for line in run_shell(CURL_STREAM, server).stdout.split("\n\n")[:-1])
    first, *texts, last, usage = (json.loads(event) for event in events)

    assert done == "[DONE]"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert all(text["choices"][0]["delta"]["content"] for text in texts)
    assert [event["choices"][0]["finish_reason"] for event in (first, *texts)] == [None] * (len(texts) + 1)
    assert last["choices"][0]["finish_reason"] in ("stop", "length")
    assert usage["choices"] == []
    assert [event["usage"] for event in (first, *texts, last)] == [None] * (len(texts) + 2)
    assert usage["usage"]["completion_tokens"] > 0
