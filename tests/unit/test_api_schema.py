"""Health, metrics and the API description: complete and consistent, and no page loads scripts from elsewhere."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar
from litestar.routes import HTTPRoute

from appliance.api import descriptions, openapi
from appliance.api.descriptions import administration, billing, inference, machine, organization, parameters
from engine.protocol import KernelChoice
from tests.support.api_app import ApiApp
from tests.support.engine_messages import engine_info

METHODS = {"GET", "POST", "PUT", "PATCH", "DELETE"}


async def test_every_path_of_the_api_is_described(api: ApiApp, api_document: Any) -> None:
    paths = api_document["paths"]
    ours = [route for route in api.app.routes if isinstance(route, HTTPRoute) and _is_api(route)]

    assert len(ours) > 20
    for route in ours:
        for method in METHODS & set(route.methods):
            assert method.lower() in paths[route.path_format], f"{method} {route.path_format}"


async def test_the_document_is_built_once_outside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def build(app: Litestar) -> bytes:
        threads.append(threading.current_thread())
        return b"{}"

    monkeypatch.setattr(openapi, "_build", build)
    app = Litestar(openapi_config=openapi.openapi_config("1"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=cast(Any, app)), base_url="http://appliance.test") as client:
        answers = await asyncio.gather(*(client.get("/schema/openapi.json") for _ in range(3)))

    assert [answer.json() for answer in answers] == [{}, {}, {}]
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_bodies_decoded_without_the_framework_are_described(api_document: Any) -> None:
    chat = api_document["paths"]["/v1/chat/completions"]["post"]
    name = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]

    assert {"model", "messages", "stream"} <= set(api_document["components"]["schemas"][name]["properties"])
    assert "/admin/v1/tenants" in api_document["paths"]


def test_parameters_that_take_several_values_are_described_as_lists(api_document: Any) -> None:
    paths = api_document["paths"]
    described = {parameter["name"]: parameter["schema"]["type"] for parameter in paths["/admin/v1/usage"]["get"]["parameters"]}

    assert (described["key_id"], described["tenant_id"], described["limit"]) == ("array", "string", "integer")


async def test_parameters_that_must_be_sent_are_described_as_required(api: ApiApp, api_document: Any) -> None:
    paths = api_document["paths"]
    for path in ("/v1/organization/usage/completions", "/v1/organization/usage/embeddings", "/v1/organization/costs"):
        required = {parameter["name"] for parameter in paths[path]["get"]["parameters"] if parameter["required"]}
        refused = await api.client.get(path, headers=await api.as_role("viewer"))

        assert required == {"start_time"}
        assert refused.json()["error"]["param"] == "start_time"


def test_operation_ids_are_unique_and_usable_as_method_names(api_document: Any) -> None:
    paths = api_document["paths"]
    names = [operation["operationId"] for operations in paths.values() for operation in operations.values()]

    assert paths["/v1/chat/completions"]["post"]["operationId"] == "createChatCompletion"
    assert paths["/chat/completions"]["post"]["operationId"] == "createChatCompletionShortPath"
    assert paths["/health/live"]["get"]["operationId"] == "checkLive"
    assert len(set(names)) == len(names)
    assert [name for name in names if not re.fullmatch("[a-z][A-Za-z]*", name)] == []


def test_schema_names_are_usable_as_class_names(api_document: Any) -> None:
    schemas = api_document["components"]["schemas"]

    assert {"Key", "KeyPage", "ProjectList", "CompletionsResultBucket", "ChatCompletionRequest"} <= set(schemas)
    assert [name for name in schemas if not re.fullmatch("[A-Z][A-Za-z]*", name) or "Shape" in name] == []
    assert [name for name, schema in schemas.items() if schema["title"] != name] == []


def test_paths_are_ordered_by_part_and_name(api_document: Any) -> None:
    paths, schemas = list(api_document["paths"]), list(api_document["components"]["schemas"])
    parts = [[path for path in paths if path.startswith(prefix)] for prefix in ("/v1/", "/admin/", "/health", "/metrics")]
    others = [path for path in paths if not path.startswith(("/v1/", "/admin/", "/health", "/metrics"))]

    assert paths == [path for part in (*parts, others) for path in sorted(part)]
    assert schemas == sorted(schemas)


def test_a_parameter_with_two_spellings_is_described_once(api_document: Any) -> None:
    paths = api_document["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            names = [parameter["name"] for parameter in operation.get("parameters", ())]
            assert len(set(names)) == len(names), path
            assert [name for name in names if name.endswith("[]")] == [], path
    parameters = paths["/v1/organization/usage/completions"]["get"]["parameters"]
    (projects,) = [parameter for parameter in parameters if parameter["name"] == "project_ids"]

    assert projects["schema"] == {"type": "array", "items": {"type": "string"}, "maxItems": 1000}
    assert projects["description"].endswith("`project_ids[]` means the same.")


def test_numeric_and_boolean_parameters_are_described_as_such(api_document: Any) -> None:
    paths = api_document["paths"]
    described = {
        parameter["name"]: parameter["schema"].get("type")
        for path in ("/v1/organization/usage/completions", "/v1/organization/audit_logs")
        for parameter in paths[path]["get"]["parameters"]
    }

    assert {described[name] for name in ("start_time", "end_time", "limit", "effective_at[gt]", "effective_at[lte]")} == {
        "integer"
    }
    assert {described[name] for name in ("batch", "tenant_only")} == {"boolean"}
    assert described["bucket_width"] == "string"


def test_operations_have_their_parameters_and_credentials(api_document: Any) -> None:
    paths = api_document["paths"]
    parameters = {parameter["name"] for parameter in paths["/admin/v1/ledger"]["get"]["parameters"]}

    assert {"limit", "cursor", "tenant_id", "status"} <= parameters
    assert paths["/v1/models"]["get"]["security"][0] == {"api_key": []}
    assert paths["/admin/v1/tenants"]["post"]["security"] == [{"administrator": []}]


def test_every_operation_struct_field_and_parameter_has_a_description(api_document: Any) -> None:
    undescribed = [
        name for name, described in api_document["components"]["schemas"].items() if not described.get("description")
    ]
    for name, described in api_document["components"]["schemas"].items():
        undescribed += [
            f"{name}.{field}" for field, each in described.get("properties", {}).items() if not each.get("description")
        ]
    for path, operations in api_document["paths"].items():
        for method, operation in operations.items():
            undescribed += [f"{method} {path}"] * (not (operation.get("summary") and operation.get("description")))
            undescribed += [f"{path} {each['name']}" for each in operation.get("parameters", ()) if not each.get("description")]
    assert undescribed == []


def test_every_description_is_used(api_document: Any) -> None:
    used, used_of_paths = set(), set()
    for name, described in api_document["components"]["schemas"].items():
        for field in described.get("properties", {}):
            used.add(next((key for key in descriptions.lookup_keys(name, field) if key in descriptions.FIELDS), ""))
    for path, operations in api_document["paths"].items():
        for each in (each for operation in operations.values() for each in operation.get("parameters", ())):
            keys = parameters.lookup_keys(path, each["name"])
            used_of_paths.add(next((key for key in keys if key in parameters.PARAMETERS), ""))
    assert set(descriptions.FIELDS) - used == set()
    assert set(parameters.PARAMETERS) - used_of_paths == set()


def test_no_description_overrides_another() -> None:
    parts = (administration, billing, inference, machine, organization)
    assert sum(len(part.FIELDS) for part in parts) == len(descriptions.FIELDS)


def test_summaries_of_operations_begin_with_a_verb(api_document: Any) -> None:
    paths = api_document["paths"]
    first = {operation["summary"].split()[0] for operations in paths.values() for operation in operations.values()}

    assert first == {
        "Abort", "Add", "Archive", "Change", "Check", "Close", "Correct", "Create", "Discard", "Draft", "End", "List", "Read",
        "Remove", "Rename", "Reset", "Retrieve", "Retry", "Revoke", "Rotate", "Send", "Set", "Stream", "Unlink", "Withdraw",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "statuses"),
    [
        ("post", "/v1/chat/completions", {"200", "400", "401", "403", "404", "413", "429", "503"}),
        ("get", "/v1/models", {"200", "401", "403"}),
        ("get", "/admin/v1/tenants", {"200", "400", "401", "403"}),
        ("post", "/admin/v1/tenants", {"201", "400", "401", "403", "409", "413"}),
        ("patch", "/admin/v1/keys/{key_id}", {"200", "400", "401", "403", "404", "409", "413"}),
        ("get", "/admin/v1/requests/{request_id}", {"200", "400", "401", "403", "404"}),
        ("get", "/admin/v1/events", {"200", "400", "401", "403", "503"}),
        ("get", "/health/ready", {"200", "503"}),
        ("get", "/metrics", {"200", "401", "403"}),
    ],
)
def test_operations_list_their_statuses(api_document: Any, method: str, path: str, statuses: set[str]) -> None:
    responses = api_document["paths"][path][method]["responses"]

    assert set(responses) == {*statuses, "default"}
    for status in statuses - {"200", "201"}:
        name = responses[status]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        assert name == ("Health" if path.startswith("/health") else "ErrorAnswer")
        assert responses[status]["description"]


def test_every_error_is_described_with_the_common_shape(api_document: Any) -> None:
    paths = api_document["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            for status, response in operation["responses"].items():
                if status == "default" or status >= "400":
                    assert set(response["content"]) == {"application/json"}, (path, status)
                    assert "$ref" in response["content"]["application/json"]["schema"], (path, status)
            assert "default" in operation["responses"], path


def test_streams_and_text_have_their_own_media_types(api_document: Any) -> None:
    paths = api_document["paths"]

    def media_types(method: str, path: str) -> set[str]:
        return set(paths[path][method]["responses"]["200"]["content"])

    assert media_types("post", "/v1/chat/completions") == {"application/json", "text/event-stream"}
    assert media_types("get", "/admin/v1/events") == {"text/event-stream"}
    assert media_types("get", "/metrics") == {"text/plain"}


def test_every_reference_in_the_schema_has_a_target(api_document: Any) -> None:
    text = json.dumps(api_document)
    targets = api_document["components"]["schemas"]
    named = {part.split('"', 1)[0] for part in text.split('"#/components/schemas/')[1:]}

    assert named
    assert named <= set(targets)


def test_every_array_in_the_schema_has_items(api_document: Any) -> None:
    schemas = api_document["components"]["schemas"]

    assert {"type": "array", "items": {}} in schemas["Message"]["properties"]["tool_calls"]["anyOf"]
    assert [array for array in _arrays(schemas) if "items" not in array] == []


async def test_the_allow_header_lists_every_method_of_a_path(api: ApiApp) -> None:
    for route in (route for route in api.app.routes if isinstance(route, HTTPRoute) and _is_api(route)):
        path = re.sub(r"{[^}]*}", "nothing", route.path)
        answered = {*route.methods, *({"HEAD"} if "GET" in route.methods else ())}
        for method, status in (("OPTIONS", 204), ("TRACE", 405)):
            answer = await api.client.request(method, path)
            assert (answer.status_code, set(answer.headers["allow"].split(", "))) == (status, answered), f"{method} {path}"

    nothing = await api.client.request("OPTIONS", "/v1/nothing")
    assert (nothing.status_code, "allow" in nothing.headers) == (404, False)


@pytest.mark.parametrize("path", ["/schema", "/schema/swagger", "/schema/redoc", "/schema/elements"])
async def test_no_page_of_the_schema_loads_scripts(api: ApiApp, path: str) -> None:
    answer = await api.client.get(path)

    assert "<script" not in answer.text


async def test_a_live_process_reports_ok(api: ApiApp) -> None:
    assert (await api.client.get("/health/live")).json()["status"] == "ok"


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
async def test_readiness_lists_the_part_that_is_not_ready(api: ApiApp, path: str) -> None:
    answer = await api.client.get(path)

    assert answer.status_code == 503  # the appliance of these tests runs no ledger
    parts = answer.json()["parts"]
    assert parts["database"] == "ok"
    assert parts["ledger"] == "cannot be written"


async def test_readiness_notes_what_slows_an_engine_down_without_the_reason(
    api: ApiApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await api.client.get("/health")).json()["notes"] == {}
    refused = KernelChoice(name="products", serves="tiles", us={"tiles": 1.0}, refused={"GEMV": "wrong results"})
    infos = {
        "fast": None,
        "slow": engine_info(device_note="the NVIDIA GPU is not used: its driver"),
        "old": engine_info(kernel_choices=[refused]),
    }
    models = [SimpleNamespace(name=name, engine=SimpleNamespace(info=info)) for name, info in infos.items()]
    monkeypatch.setattr(api.services.models, "list", lambda: models)
    monkeypatch.setattr(api.services.readiness, "problem", lambda _model: None)
    notes = (await api.client.get("/health")).json()["notes"]
    assert notes == {
        "engine slow": "serves on the CPU, because the GPU cannot be used",
        "engine old": "serves by older kernels, because newer ones were refused",
    }


async def test_metrics_have_their_documented_names(api: ApiApp) -> None:
    text = (await api.client.get("/metrics")).text

    for name in (
        "requests_running", "requests_waiting", "kv_cache_usage_ratio", "prefix_cache_hit_tokens_total", "prompt_tokens_total",
        "generation_tokens_total", "time_to_first_token_seconds", "inter_token_latency_seconds", "request_seconds",
        "queue_seconds", "preemptions_total", "engine_step_seconds", "requests_rejected_total", "gpu_memory_used_bytes",
        "unrecorded_usage_tokens_total",
    ):  # fmt: skip
        assert f"# TYPE gatehouse_{name} " in text, name
    assert "# TYPE gatehouse_unrecorded_usage_tokens_total gauge\ngatehouse_unrecorded_usage_tokens_total 0.0\n" in text


async def test_metrics_have_the_content_type_of_prometheus(api: ApiApp) -> None:
    answer = await api.client.get("/metrics")

    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_counters_exist_at_zero_from_the_start(api: ApiApp) -> None:
    api.services.metrics.add_model("tiny")
    text = (await api.client.get("/metrics")).text

    for code in ("invalid_api_key", "rate_limit_exceeded", "budget_exceeded", "overloaded"):
        assert f'gatehouse_requests_rejected_total{{reason="{code}"}} 0.0' in text
    for name in ("preemptions", "discarded_tokens", "engine_restarts"):
        assert f'gatehouse_{name}_total{{model="tiny"}} 0.0' in text


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
async def test_local_clients_read_metrics_without_a_token(api: ApiApp, address: str) -> None:
    assert await metrics_status(api, address) == 200


@pytest.mark.parametrize("address", ["192.0.2.1", "10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", ""])
async def test_remote_clients_need_an_administrator_token_for_metrics(api: ApiApp, address: str) -> None:
    assert await metrics_status(api, address) == 401
    assert await metrics_status(api, address, {"authorization": "Bearer gha_wrong"}) == 401
    assert await metrics_status(api, address, await api.as_role("viewer")) == 200


@pytest.mark.parametrize("header", ["x-forwarded-for", "x-forwarded-host", "forwarded", "x-real-ip", "via"])
async def test_a_client_behind_a_proxy_is_not_local(api: ApiApp, header: str) -> None:
    assert await metrics_status(api, "127.0.0.1", {header: "192.0.2.1"}) == 401


@pytest.mark.parametrize(
    "path", ["/health", "/health/live", "/v1/models", "/admin/v1/tenants", "/schema/openapi.json", "/login", "/nothing"]
)
async def test_head_answers_like_get_without_the_body(api: ApiApp, path: str) -> None:
    head, whole = await api.client.head(path), await api.client.get(path)

    assert (head.status_code, head.content) == (whole.status_code, b"")
    assert head.headers["content-length"] == str(len(whole.content))
    assert head.headers["content-type"] == whole.headers["content-type"]


async def test_head_of_a_live_stream_ends(api: ApiApp) -> None:
    await api.services.sampler.sample()
    async with asyncio.timeout(60):
        answer = await api.client.head("/admin/v1/events")

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_head_of_a_path_without_get_is_refused(api: ApiApp) -> None:
    assert (await api.client.head("/v1/chat/completions")).status_code == 405


async def test_a_body_that_is_too_large_is_refused_with_the_limit(api: ApiApp) -> None:
    limit = api.services.settings.max_body_bytes
    answer = await api.client.post("/admin/v1/tenants", content=b"x" * (limit + 1))

    assert answer.status_code == 413
    assert str(limit) in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/admin/v1/nothing", "/schema/nothing", "/schema/nothing.json"])
async def test_unknown_paths_have_the_common_error_shape_and_a_request_id(api: ApiApp, path: str) -> None:
    answer = await api.client.get(path)

    assert answer.status_code == 404
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"].startswith("req_")


async def test_a_bug_is_a_500_without_internal_details(api: ApiApp, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_arguments: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(api.services.prices, "list", broken)
    answer = await api.client.get("/admin/v1/prices")

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"].startswith("req_")


def _arrays(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and value.get("type") == "array":
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _arrays(each)


async def metrics_status(api: ApiApp, address: str, headers: dict[str, str] | None = None) -> int:
    transport = httpx.ASGITransport(app=cast(Any, api.app), client=(address, 50000))
    async with httpx.AsyncClient(transport=transport, base_url="http://appliance.test") as client:
        return (await client.get("/metrics", headers=headers)).status_code


def _is_api(route: HTTPRoute) -> bool:
    return route.path.startswith(("/v1", "/admin/v1", "/health", "/metrics", "/chat", "/models"))
