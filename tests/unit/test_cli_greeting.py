"""The output of `serve`: the login immediately, an example command once a model is ready."""

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
def no_progress_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "PROGRESS_INTERVAL_S", 0)


async def wait_for_greeting(greeter: serve.Greeter) -> None:
    assert greeter._task is not None
    await asyncio.wait_for(greeter._task, 60)


async def test_the_login_is_printed_once_before_any_model_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    demo, greeter = model("demo", "loading"), serve.Greeter()
    greeter.listening(started(demo))
    printed = capsys.readouterr().out
    assert all(part in printed for part in ("http://127.0.0.1:8000/", "admin@localhost", "pass-word", "gha_x", "gh_abc_def"))
    assert "is ready" not in printed
    demo.engine.state = "ready"
    await wait_for_greeting(greeter)
    printed = capsys.readouterr().out
    assert "Gatehouse is ready.  Console:  http://127.0.0.1:8000/" in printed
    assert "Bearer gh_abc_def" in printed
    assert "pass-word" not in printed


async def test_a_later_start_prints_how_to_reset_the_password_instead_of_a_login(capsys: pytest.CaptureFixture[str]) -> None:
    greeter = serve.Greeter()
    greeter.listening(started(model("demo", "ready"), first=None))
    assert capsys.readouterr().out == ""
    await wait_for_greeting(greeter)
    assert "reset-password" in capsys.readouterr().out


async def test_a_failed_model_is_reported_and_the_example_uses_a_ready_one(capsys: pytest.CaptureFixture[str]) -> None:
    greeter = serve.Greeter()
    greeter.listening(started(model("broken", "failed", "no such architecture"), model("demo", "ready")))
    await wait_for_greeting(greeter)
    printed = capsys.readouterr()
    assert printed.err == "gatehouse: the model broken could not be loaded: no such architecture\n"
    assert '"model": "demo"' in printed.out


async def test_without_a_ready_model_no_example_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    greeter = serve.Greeter()
    greeter.listening(started(model("broken", "failed", "no such architecture"), first=None))
    await wait_for_greeting(greeter)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")
