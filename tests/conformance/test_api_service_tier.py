"""`service_tier` with the official client against a real appliance: the tier in request, answer and ledger."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError

from tests.conformance.conftest import MODEL
from tests.support.server import Server

FIELDS: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "the quick brown fox"}], "max_tokens": 4}


@pytest.mark.parametrize(("requested", "served"), [("flex", "flex"), ("default", "default"), ("auto", "default")])
async def test_an_answer_names_the_tier_that_served_it(
    server: Server, client: AsyncOpenAI, requested: Any, served: str
) -> None:
    answer = await client.chat.completions.create(**FIELDS, service_tier=requested)
    chunks = [chunk async for chunk in await client.chat.completions.create(**FIELDS, service_tier=requested, stream=True)]

    assert answer.service_tier == served
    assert {chunk.service_tier for chunk in chunks} == {served}
    for request_id in (answer.id, chunks[0].id):
        (event,) = server.admin("GET", "/ledger", params={"request_id": request_id})["data"]
        assert event["batch"] is (served == "flex")
        assert server.admin("GET", f"/requests/{request_id}")["batch"] is (served == "flex")


async def test_without_a_requested_tier_the_answer_names_none(client: AsyncOpenAI) -> None:
    for extra in ({}, {"service_tier": None}):
        raw = await client.chat.completions.with_raw_response.create(**FIELDS, extra_body=extra)
        assert "service_tier" not in raw.text


@pytest.mark.parametrize("tier", ["priority", "scale", "fast", "", "FLEX"])
async def test_an_unknown_tier_is_refused_with_the_known_ones(client: AsyncOpenAI, tier: Any) -> None:
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(**FIELDS, service_tier=tier)
    assert (refused.value.param, refused.value.code) == ("service_tier", "invalid_value")
    assert "auto, default, flex" in refused.value.message
