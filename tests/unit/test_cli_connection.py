"""How a command finds the running appliance, reads pages of lists, and reports failed responses."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from appliance.base import migrations
from appliance.cli.connection import AdminClient, Control, read_control
from appliance.cli.failure import CommandFailed
from tests.support.typed_commands import Run


def write_control(folder: Path, **changes: object) -> None:
    content = {"url": "http://127.0.0.1:8000", "pid": os.getpid(), "token": "secret", **changes}
    (folder / "control.json").write_text(json.dumps(content))


def client_answering(answer: httpx.Response | httpx.HTTPError, requests: list[httpx.Request] | None = None) -> AdminClient:
    def respond(request: httpx.Request) -> httpx.Response:
        if requests is not None:
            requests.append(request)
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer

    return AdminClient(httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://appliance"))


def client_with_pages() -> AdminClient:
    """Return a client of a list of three rows on two pages."""
    pages = {None: ([1, 2], "c1"), "c1": ([3], None)}

    def respond(request: httpx.Request) -> httpx.Response:
        rows, cursor = pages[request.url.params.get("cursor")]
        body = {"data": [{"n": n} for n in rows], "has_more": cursor is not None, "next_cursor": cursor}
        return httpx.Response(200, json=body)

    return AdminClient(httpx.AsyncClient(transport=httpx.MockTransport(respond), base_url="http://appliance"))


def test_the_control_file_of_a_running_appliance_is_read(tmp_path: Path) -> None:
    write_control(tmp_path)
    assert read_control(tmp_path) == Control("http://127.0.0.1:8000", os.getpid(), "secret")


def test_without_a_control_file_there_is_no_appliance(tmp_path: Path) -> None:
    assert read_control(tmp_path / "nowhere") is None


def test_the_control_file_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    write_control(tmp_path, pid=int(ended.stdout))
    assert read_control(tmp_path) is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"url": "x"}', '{"url": "x", "pid": "me", "token": "t"}'])
def test_an_invalid_control_file_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "control.json").write_text(content)
    assert read_control(tmp_path) is None


async def test_every_page_of_a_list_is_read() -> None:
    assert [row["n"] for row in await client_with_pages().list_all("/tenants")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("limit", "rows", "has_more"), [(1, [1], True), (2, [1, 2], True), (3, [1, 2, 3], False), (9, [1, 2, 3], False)]
)
async def test_the_first_rows_of_a_list_come_with_whether_there_are_more(limit: int, rows: list[int], has_more: bool) -> None:
    assert await client_with_pages().list_first("/tenants", limit, query={}) == ([{"n": n} for n in rows], has_more)


async def test_an_api_error_keeps_its_message_and_code() -> None:
    answer = httpx.Response(409, json={"error": {"message": "taken", "type": "conflict", "param": None, "code": "name_taken"}})
    with pytest.raises(CommandFailed) as failed:
        await client_answering(answer).call("POST", "/tenants", body={})
    assert (failed.value.message, failed.value.code, failed.value.status) == ("taken", "name_taken", 1)


async def test_a_response_that_is_not_json_is_reported_by_its_status() -> None:
    with pytest.raises(CommandFailed, match="502"):
        await client_answering(httpx.Response(502, text="bad gateway")).call("GET", "/system")


async def test_an_unreachable_appliance_is_reported() -> None:
    with pytest.raises(CommandFailed) as failed:
        await client_answering(httpx.ConnectError("refused")).call("GET", "/system")
    assert failed.value.code == "unreachable"


async def test_query_parameters_of_none_are_not_sent() -> None:
    requests: list[httpx.Request] = []
    await client_answering(httpx.Response(200, json={}), requests).call("GET", "/usage", query={"start": "now", "end": None})
    assert dict(requests[0].url.params) == {"start": "now"}


@pytest.fixture
def set_revision(data_dir: Path, gatehouse: Run) -> Callable[[str], None]:
    """Return a function that migrates the database to an older revision, or marks it as migrated by a newer version."""

    def set_to(revision: str) -> None:
        url = f"sqlite:///{data_dir}/gatehouse.db"
        if revision < migrations.head_revision():
            migrations.downgrade(url, revision)
        else:
            with closing(sqlite3.connect(data_dir / "gatehouse.db")) as connection, connection:
                connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))

    return set_to


@pytest.mark.parametrize("command", ["db rebuild-rollups", "db check", "admin token --list", "audit verify"])
@pytest.mark.parametrize(
    ("revision", "remedy"),
    [("0008", "run gatehouse db upgrade, or start the appliance"), ("9999", "start the newer version, or restore a backup")],
)
def test_a_schema_of_another_version_is_reported_with_its_remedy(
    command: str, revision: str, remedy: str, gatehouse: Run, set_revision: Callable[[str], None]
) -> None:
    set_revision(revision)
    answer = gatehouse(*command.split())
    assert f"at revision {revision}" in answer.out + answer.err
    assert remedy in answer.out + answer.err
    assert "unavailable" not in answer.out + answer.err


@pytest.mark.usefixtures("skip_tensor_check")
def test_doctor_does_not_promise_an_upgrade_of_a_newer_schema(gatehouse: Run, set_revision: Callable[[str], None]) -> None:
    set_revision("9999")
    (row,) = [row for row in gatehouse("doctor", "--json", "--port", "0").json()["data"] if row["check"] == "database"]
    assert (row["state"], row["found"]) == ("wrong", "sqlite, at revision 9999, which this version does not know")
    assert row["advice"].startswith("start the newer version")


def test_sums_are_not_rebuilt_where_there_is_no_appliance(gatehouse: Run, tmp_path: Path) -> None:
    answer = gatehouse("db", "rebuild-rollups", "--json", "--data-dir", str(tmp_path / "typo"))
    assert answer.json()["error"]["code"] == "no_appliance"
    assert not (tmp_path / "typo").exists()


def test_a_missing_table_is_not_taken_for_an_unreachable_database(gatehouse: Run, data_dir: Path) -> None:
    with closing(sqlite3.connect(data_dir / "gatehouse.db")) as connection, connection:
        connection.execute("DROP TABLE counters")
    answer = gatehouse("db", "rebuild-rollups", "--json").json()
    assert answer["error"] == {"code": "database", "message": "the database reports an error: no such table: counters"}
