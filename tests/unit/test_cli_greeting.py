"""The output of `serve`: the login at once, the example command when a model is ready."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.cli import serve
from appliance.tenancy.bootstrap import FirstStart

FIRST = FirstStart(
    email="admin@localhost",
    password="pass-word",
    admin_token="gha_x",
    tenant_id="tn_1",
    tenant_name="demo",
    api_key="gh_abc_def",
)


def model(name: str, state: str, error: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(name=name, engine=SimpleNamespace(state=state, error=error, load_fraction=None))


def started(*models: SimpleNamespace, first: FirstStart | None = FIRST) -> Any:
    services = SimpleNamespace(models=SimpleNamespace(list=lambda: list(models)), settings=SimpleNamespace(data_dir=Path("/d")))
    names = [model.name for model in models]
    return SimpleNamespace(host="127.0.0.1", port=8000, models=names, first_start=first, services=services)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PROGRESS_INTERVAL_S", 0)


async def greeted(greeter: serve.Greeter) -> None:
    assert greeter._task is not None
    await asyncio.wait_for(greeter._task, 60)


async def test_the_login_is_shown_before_any_model_is_ready_and_once(capsys: pytest.CaptureFixture[str]) -> None:
    demo, greeter = model("demo", "loading"), serve.Greeter()
    greeter.listening(started(demo))
    said = capsys.readouterr().out
    assert all(part in said for part in ("http://127.0.0.1:8000/", "admin@localhost", "pass-word", "gha_x", "gh_abc_def"))
    assert "is ready" not in said
    demo.engine.state = "ready"
    await greeted(greeter)
    said = capsys.readouterr().out
    assert "Gatehouse is ready.  Console:  http://127.0.0.1:8000/" in said
    assert "Bearer gh_abc_def" in said
    assert "pass-word" not in said


async def test_a_later_start_shows_no_login(capsys: pytest.CaptureFixture[str]) -> None:
    greeter = serve.Greeter()
    greeter.listening(started(model("demo", "ready"), first=None))
    assert capsys.readouterr().out == ""
    await greeted(greeter)
    assert "reset-password" in capsys.readouterr().out


async def test_a_model_that_failed_beside_a_ready_one_is_told_and_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    greeter = serve.Greeter()
    greeter.listening(started(model("broken", "failed", "no such architecture"), model("demo", "ready")))
    await greeted(greeter)
    said = capsys.readouterr()
    assert said.err == "gatehouse: the model broken could not be loaded: no such architecture\n"
    assert '"model": "demo"' in said.out


async def test_nothing_is_offered_when_every_model_failed(capsys: pytest.CaptureFixture[str]) -> None:
    greeter = serve.Greeter()
    greeter.listening(started(model("broken", "failed", "no such architecture"), first=None))
    await greeted(greeter)
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "")
