"""`gatehouse alerts test` with a running appliance: it waits for the first delivery attempt and reports it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.alerts import receiving
from tests.support.forked_processes import REPOSITORY
from tests.support.served_model import make_hollow_model
from tests.support.server import start_server


async def test_a_test_reports_the_result_of_its_first_delivery_attempt(tmp_path: Path) -> None:
    model = make_hollow_model(tmp_path / "tiny")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GATEHOUSE_")}
    environment["GATEHOUSE_DATA_DIR"] = str(tmp_path / "data")

    def gatehouse(*arguments: str) -> tuple[int, Any]:
        answer = subprocess.run(
            [sys.executable, "-m", "appliance.cli.main", "alerts", *arguments, "--json"],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return answer.returncode, json.loads(answer.stdout)

    server = await asyncio.to_thread(
        start_server, model, tmp_path / "data", fake_engine_step_s=0.01, webhook_networks="127.0.0.0/8"
    )
    try:
        async with receiving(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\n\r\n", b"HTTP/1.1 204 No Content\r\n\r\n") as receiver:
            _, webhook = await asyncio.to_thread(gatehouse, "add", f"http://127.0.0.1:{receiver.port}/")
            failed, first = await asyncio.to_thread(gatehouse, "test", webhook["id"])
            passed, second = await asyncio.to_thread(gatehouse, "test", webhook["id"])
            assert await asyncio.to_thread(server.stop) == 0
    finally:
        server.kill()

    assert (failed, first["state"], first["last_error"]) == (1, "pending", "the receiver answered 500")
    assert (passed, second["state"], second["last_error"]) == (0, "delivered", None)
    assert [receiver.json(index)["type"] for index in (0, 1)] == ["webhook.test", "webhook.test"]
