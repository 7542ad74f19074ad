"""How a command finds the running appliance and handles its responses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from appliance.cli.connection import AdminClient, Control, read_control
from appliance.cli.failure import CommandFailed


def write_control(folder: Path, **changes: object) -> None:
    content = {"url": "http://127.0.0.1:8000", "pid": os.getpid(), "token": "secret", **changes}
    (folder / "control.json").write_text(json.dumps(content))


def client(answer: httpx.Response | httpx.HTTPError, asked: list[httpx.Request] | None = None) -> AdminClient:
    def respond(request: httpx.Request) -> httpx.Response:
        if asked is not None:
            asked.append(request)
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer

    return AdminClient(httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://appliance"))


def test_a_running_appliance_is_found(tmp_path: Path) -> None:
    write_control(tmp_path)
    assert read_control(tmp_path) == Control("http://127.0.0.1:8000", os.getpid(), "secret")


def test_no_file_is_no_appliance(tmp_path: Path) -> None:
    assert read_control(tmp_path / "nowhere") is None


def test_a_file_that_a_killed_appliance_left_is_no_appliance(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    write_control(tmp_path, pid=int(ended.stdout))
    assert read_control(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"url": "x"}', '{"url": "x", "pid": "me", "token": "t"}'])
def test_a_file_that_is_not_one_is_no_appliance(tmp_path: Path, content: str) -> None:
    (tmp_path / "control.json").write_text(content)
    assert read_control(tmp_path) is None


async def test_every_page_of_a_list_is_read() -> None:
    pages = {None: ([1, 2], "c1"), "c1": ([3], None)}

    def respond(request: httpx.Request) -> httpx.Response:
        rows, cursor = pages[request.url.params.get("cursor")]
        body = {"data": [{"n": n} for n in rows], "has_more": cursor is not None, "next_cursor": cursor}
        return httpx.Response(200, json=body)

    admin = AdminClient(httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://appliance"))
    assert [row["n"] for row in await admin.list_all("/tenants")] == [1, 2, 3]
    assert [row["n"] for row in await admin.list_all("/tenants", at_most=1)] == [1]


async def test_a_refusal_keeps_the_servers_words() -> None:
    answer = httpx.Response(409, json={"error": {"message": "taken", "type": "conflict", "param": None, "code": "name_taken"}})
    with pytest.raises(CommandFailed) as failed:
        await client(answer).call("POST", "/tenants", body={})
    assert (failed.value.message, failed.value.code, failed.value.status) == ("taken", "name_taken", 1)


async def test_an_answer_that_is_no_json_is_told_by_its_status() -> None:
    with pytest.raises(CommandFailed, match="502"):
        await client(httpx.Response(502, text="bad gateway")).call("GET", "/system")


async def test_an_appliance_that_does_not_answer_is_told() -> None:
    with pytest.raises(CommandFailed) as failed:
        await client(httpx.ConnectError("refused")).call("GET", "/system")
    assert failed.value.code == "unreachable"


async def test_parameters_that_were_not_given_are_not_sent() -> None:
    asked: list[httpx.Request] = []
    await client(httpx.Response(200, json={}), asked).call("GET", "/usage", query={"start": "now", "end": None})
    assert dict(asked[0].url.params) == {"start": "now"}
