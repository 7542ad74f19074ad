"""`service_tier` against a real appliance by the official client: what it asks for, and what the answer and the ledger say."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.conformance.conftest import MODEL
from tests.support.server import Server

ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 4}


@pytest.mark.parametrize(("asked", "served"), [("flex", "flex"), ("default", "default"), ("auto", "default")])
async def test_an_answer_says_the_tier_that_served_it(server: Server, client: AsyncOpenAI, asked: Any, served: str) -> None:
    answer = await client.chat.completions.create(**ASKED, service_tier=asked)
    chunks = [chunk async for chunk in await client.chat.completions.create(**ASKED, service_tier=asked, stream=True)]

    assert answer.service_tier == served
    assert {chunk.service_tier for chunk in chunks} == {served}
    for request_id in (answer.id, chunks[0].id):
        (event,) = server.admin("GET", "/ledger", params={"request_id": request_id})["data"]
        assert event["batch"] is (served == "flex")
        assert server.admin("GET", f"/requests/{request_id}")["batch"] is (served == "flex")


async def test_an_answer_to_a_request_that_names_no_tier_names_none(client: AsyncOpenAI) -> None:
    for extra in ({}, {"service_tier": None}):
        raw = await client.chat.completions.with_raw_response.create(**ASKED, extra_body=extra)
        assert "service_tier" not in raw.text


@pytest.mark.parametrize("tier", ["priority", "scale", "fast", "", "FLEX"])
async def test_a_tier_that_there_is_not_is_refused_with_those_that_there_are(client: AsyncOpenAI, tier: Any) -> None:
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(**ASKED, service_tier=tier)
    assert (refused.value.param, refused.value.code) == ("service_tier", "invalid_value")
    assert "auto, default, flex" in refused.value.message
