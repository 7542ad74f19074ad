"""The cost of parsing a body is bounded before it is parsed, and long bodies are parsed one at a time, tenants in turn."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise
from typing import Any

import pytest

from appliance.api import json_structure
from appliance.api.admin import tenants
from appliance.api.bodies import SHORT_BODY_BYTES_MAX, decode_body, read_in_turn
from appliance.api.json_structure import STRUCTURE_MAX, StructureCount, check_structure
from appliance.api.schemas import MESSAGES_MAX, PARTS_MAX, ChatCompletionRequest, check_messages
from appliance.base.errors import RequestTooLarge
from appliance.serving.fair_semaphore import FairSemaphore
from engine.sampling_params import GUIDED_CHARS_MAX
from tests.support.api_app import ApiApp
from tests.support.loop_iterations import count_iterations


def _count(text: bytes) -> int:
    """The plain twin: count byte by byte."""
    structural, in_string, escaped = 0, False, False
    for byte in text.decode():
        if escaped:
            escaped = False
        elif in_string and byte == "\\":
            escaped = True
        elif byte == '"':
            in_string = not in_string
        elif not in_string and byte in "{}[]:,":
            structural += 1
    return structural


def _value(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if depth == 0 or kind < 0.5:
        return "".join(draw.choice('a\\",:[]{}\nä') for _ in range(draw.randrange(8)))
    if kind < 0.75:
        return [_value(draw, depth - 1) for _ in range(draw.randrange(5))]
    return {_value(draw, 0): _value(draw, depth - 1) for _ in range(draw.randrange(5))}


@pytest.mark.parametrize("slice_bytes", [1, 2, 3, 5, 64])
def test_the_count_equals_the_bytewise_count_for_any_slice_size(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_structure, "_SLICE_BYTES", slice_bytes)
    draw = random.Random(slice_bytes)
    for _ in range(200):
        text = json.dumps(_value(draw, 5), ensure_ascii=draw.random() < 0.5).encode()
        count = StructureCount()
        while count.end < len(text):
            count.take_slice(text)
        assert count.structural == _count(text), text


@pytest.mark.parametrize("unit", ["1", "[]", "{}", '""', '{"a":1}', '[["a"]]'])
async def test_bodies_with_too_many_small_values_are_refused_before_decoding(unit: str) -> None:
    body = '{"model": "m", "messages": [], "tools": [' + ",".join([unit] * STRUCTURE_MAX) + "]}"
    with pytest.raises(RequestTooLarge, match=f"more than {STRUCTURE_MAX} structural characters"):
        await check_structure(body.encode())


async def test_exactly_the_limit_of_structural_characters_is_accepted() -> None:
    within = b"[" + b"1," * (STRUCTURE_MAX - 2) + b"1" + b" " * STRUCTURE_MAX + b"]"
    await check_structure(within)
    with pytest.raises(RequestTooLarge):
        await check_structure(within + b",")


async def test_a_refused_body_is_not_decoded(api: ApiApp, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_given: object) -> None:
        raise AssertionError("the body was decoded")

    monkeypatch.setattr(tenants, "decode_body", decode)
    refused = await api.call("POST", "/tenants", status=413, content=b"[" * (STRUCTURE_MAX + 1))
    assert refused["error"]["code"] == "request_too_large"


async def test_the_largest_valid_chat_is_within_the_limit() -> None:
    part = {"type": "text", "text": 'a document, [with] {"commas": 1, "and": "brackets"}, \\" and \\\\ escapes' * 5}
    messages = [{"role": "user", "content": [part] * (PARTS_MAX // MESSAGES_MAX)} for _ in range(MESSAGES_MAX)]
    num_properties = (GUIDED_CHARS_MAX - 100) // len('"p00000": {"type": "string"}, ')
    schema = {"type": "object", "properties": {f"p{number:05}": {"type": "string"} for number in range(num_properties)}}
    assert GUIDED_CHARS_MAX - 200 < len(json.dumps(schema)) <= GUIDED_CHARS_MAX
    chat = {
        "model": "m",
        "messages": messages,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
        "logit_bias": {str(token_id): 1 for token_id in range(1024)},
        "stop_token_ids": list(range(256)),
    }
    body = json.dumps(chat).encode()
    await check_structure(body)
    assert len(check_messages(decode_body(body, ChatCompletionRequest).messages)) == MESSAGES_MAX


async def test_other_tasks_run_while_a_long_text_is_counted() -> None:
    async with count_iterations() as turns:
        await check_structure(b'"' + rb"\"" * 4_000_000 + b'"')
    assert turns.count > 5


def _slices_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the length of the text of each slice that is counted from now on."""
    taken: list[int] = []
    take = StructureCount.take_slice

    def note(count: StructureCount, text: bytes) -> None:
        taken.append(len(text))
        take(count, text)

    monkeypatch.setattr(StructureCount, "take_slice", note)
    return taken


async def test_counting_stops_once_the_limit_is_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = _slices_taken(monkeypatch)
    await check_structure(b"[" + b'"' * 8_000_000)
    assert len(slices) <= 2 * STRUCTURE_MAX // json_structure._SLICE_BYTES + 2


async def test_long_bodies_are_counted_one_at_a_time_and_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    semaphore, ended = FairSemaphore(1, 100, refusal="too many", retry_after_s=1.0), []
    floods = [b'"' + rb"\"" * 500_000 + b"a" * number + b'"' for number in range(20)]
    monkeypatch.setattr(json_structure, "_TURN_S", 0.0)
    counted = _slices_taken(monkeypatch)

    async def read(tenant_id: str, body: bytes) -> None:
        await read_in_turn(body, lambda _body: ended.append(tenant_id), semaphore=semaphore, tenant_id=tenant_id)

    await asyncio.gather(*[read("flood", body) for body in floods], read("neighbour", b'"' + b"a" * STRUCTURE_MAX + b'"'))
    assert ended.index("neighbour") <= 2, "the neighbour's body waits behind the whole flood"
    changes = sum(before != after for before, after in pairwise(counted))
    assert changes == len(floods), "the slices of several bodies were interleaved"


async def test_chat_completions_are_counted_too(api: ApiApp) -> None:
    tenant = await api.call("POST", "/tenants", status=201, json={"name": "alice"})
    key = await api.call("POST", f"/tenants/{tenant['id']}/keys", status=201, json={"name": "key"})
    headers = {"authorization": f"Bearer {key['key']}"}
    refused = await api.client.post("/v1/chat/completions", content=b"[" * (STRUCTURE_MAX + 1), headers=headers)
    assert refused.status_code == 413
    assert refused.json()["error"]["code"] == "request_too_large"


async def test_long_bodies_are_decoded_one_per_loop_iteration_and_tenants_take_turns() -> None:
    semaphore, decoded = FairSemaphore(1, 100, refusal="too many", retry_after_s=1.0), []
    long, short = b"x" * (SHORT_BODY_BYTES_MAX + 1), b"x"

    async def read(tenant_id: str, body: bytes) -> None:
        await read_in_turn(body, lambda _body: decoded.append((tenant_id, now.count)), semaphore=semaphore, tenant_id=tenant_id)

    async with count_iterations() as now:
        await asyncio.gather(*[read("flood", long) for _ in range(20)], read("neighbour", long), read("neighbour", short))

    moments = [moment for _tenant, moment in decoded]
    order = [tenant for tenant, _moment in decoded]
    assert len(set(moments[2:])) == len(moments[2:]), "two long bodies were decoded in one iteration"
    assert order.index("neighbour") <= 1, "a short body does not wait"
    assert order[:5].count("neighbour") == 2, "the neighbour waits behind the whole flood"


async def test_an_undecodable_body_releases_its_turn() -> None:
    semaphore = FairSemaphore(1, 100, refusal="too many", retry_after_s=1.0)
    long = b"x" * (SHORT_BODY_BYTES_MAX + 1)

    def fail(_body: bytes) -> None:
        raise ValueError("no JSON")

    for _ in range(2):
        with pytest.raises(ValueError, match="no JSON"):
            await asyncio.wait_for(read_in_turn(long, fail, semaphore=semaphore, tenant_id="a"), 5)
