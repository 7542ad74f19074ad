"""Chat completions of a model whose engine changes its state while a request is prepared."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.base.errors import EngineUnavailable
from tests.support.api_app import ApiApp, open_api_app


@pytest.fixture
async def api(migrated_sqlite_file: Path, tmp_path: Path) -> AsyncIterator[ApiApp]:
    async with open_api_app(migrated_sqlite_file, tmp_path) as api:
        yield api


class Engine:
    """An engine that is ready until it `ends`. Its successor, which is being loaded, has reported nothing yet."""

    def __init__(self) -> None:
        self.info: Any = SimpleNamespace(max_model_len=64, vocab_size=9)

    def check_ready(self) -> None:
        if self.info is None:
            raise EngineUnavailable("the engine is restarting")

    async def ends(self, *_messages: object, **_options: object) -> list[int]:
        self.info = None
        return [1]


async def test_a_request_whose_engine_ends_while_its_prompt_is_tokenised_gets_503(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    model = SimpleNamespace(
        name="tiny",
        engine=engine,
        tokenizer=SimpleNamespace(chat_prompt=engine.ends),
        sampling_defaults={},
        default_max_tokens=None,
    )
    monkeypatch.setitem(api.services.models._models, "tiny", cast(Any, model))
    monkeypatch.setattr(api.services.generations, "check_can_accept", lambda model, _tenant_id: model.engine.check_ready())
    tenant = await api.call("POST", "/tenants", status=201, json={"name": "bob"})
    key = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "key"})

    answer = await api.client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
        headers={"authorization": f"Bearer {key['key']}"},
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
