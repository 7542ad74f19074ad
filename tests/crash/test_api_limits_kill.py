"""Token buckets over a kill: the restart refills no bucket beyond the elapsed time and keeps negative levels."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from tests.support.polling import block_until
from tests.support.served_model import make_hollow_model
from tests.support.server import Server, running_server, start_server

MODEL = "tiny"
STEP_S = 0.001
CAPACITY = 600


def chat(server: Server, secret: str, max_tokens: int) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "the lazy dog"}], "max_tokens": max_tokens}
    return server.chat(body, key=secret)


def limit_check(server: Server, tenant_id: str) -> dict[str, Any]:
    """Return the limit check of the tenant for a request of one token."""
    asked = {"tenant_id": tenant_id, "model": MODEL, "prompt_tokens": 0, "max_tokens": 1}
    decision: dict[str, Any] = server.admin("POST", "/limits/check", json=asked)["decisions"][0]
    return decision


def saved_levels(data_dir: Path) -> int:
    """Return the number of bucket levels in the database."""
    with closing(sqlite3.connect(data_dir / "gatehouse.db")) as connection:
        return int(connection.execute("SELECT count(*) FROM limit_levels WHERE kind = 'tokens'").fetchone()[0])


def test_a_kill_neither_refills_a_bucket_nor_forgets_a_negative_level(tmp_path: Path) -> None:
    model, data = make_hollow_model(tmp_path / MODEL), tmp_path / "data"
    server = start_server(model, data, fake_engine_step_s=STEP_S)
    try:
        server.wait_until_ready()
        tenant_id, secret = server.new_key(tenant={"name": "debtor", "limits": {"tokens_per_minute": CAPACITY}})
        begun_s = time.monotonic()
        assert chat(server, secret, 900).status_code == 200  # 256 are held, 900 used: the rest is a debt
        before = limit_check(server, tenant_id)
        assert before["level"] < 0
        block_until(lambda: saved_levels(data) > 0, server.log)
    finally:
        server.kill()
    with running_server(model, data, fake_engine_step_s=STEP_S) as again:
        after = limit_check(again, tenant_id)
        passed_s = time.monotonic() - begun_s

        assert after["level"] <= before["level"] + passed_s * CAPACITY / 60 + 1
        if after["level"] < -CAPACITY // 2:
            assert chat(again, secret, 1).status_code == 429
