"""The limits in the API description are enforced: values at each limit are accepted, and values just beyond it refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.api.bodies import decode_body
from appliance.api.sampling import field_names, sampling_params
from appliance.api.schemas import ChatCompletionRequest, check_messages, check_supported, service_tier_of
from appliance.base.errors import BadRequest
from appliance.serving.endings import with_client_field_name
from engine.grammar.spec import GrammarError, grammar_spec
from tests.support.api_app import ApiApp
from tests.support.case_ids import case_id
from tests.support.cast import OWNER

FieldPath = tuple[str | int, ...]
Schema = dict[str, Any]
EXAMPLES = {
    "date-time": ("2099-01-31T12:00:00Z", "tomorrow"),
    "email": ("alice@example.com", "alice"),
    "^[1-9][0-9]{3}-(0[1-9]|1[0-2])$": ("2024-01", "0000-01"),
    "^[A-Z]{3}$": ("EUR", "EURO"),
    "^[A-Z]{2}$": ("DE", "de"),
    "^[a-zA-Z0-9_-]{1,64}$": ("a" * 64, "a" * 65),
    "^[0-9]{1,10}$": ("1", "one"),
    "^(tenant|key|model)(,(tenant|key|model))*$": ("tenant,model", "tenant,nobody"),
    "^rl-": ("rl-*", "*"),
}
"""By format or pattern: a value that it accepts, and one that it does not."""
TEXTS: dict[str, Callable[[int], str]] = {
    "target": lambda length: "https://example.com/".ljust(length, "a")[:length],
    "billing.address": lambda length: ("a" * 99 + "\n") * (length // 100) + "b" * (length % 100),
    **dict.fromkeys(("email", "billing.email"), lambda length: "@example.com".rjust(length, "a")[:length]),
}
"""Texts of a given length for fields that do not accept arbitrary letters."""
RESTRICTED_TEXTS = ("target", "cursor")
"""Fields whose shortest text has the right length but is not accepted."""
EXAMPLES_OF_ITEMS: dict[str, Any] = {"allowed_networks": "10.0.0.0/8", "messages": {"role": "user", "content": "hello"}}
"""Items of lists whose items have more rules than the document can express."""
OPAQUE = ("cursor",)
"""Parameters that accept only values that the API has issued."""
NEVER_ACCEPTED = ("user_ids",)
REQUIRED_WITH = {"top_logprobs": {"logprobs": True}}
"""Fields that require another one."""

WITHOUT_LIMITS = {
    "ChatCompletionRequest": {
        "model", "tools", "functions", "prompt_logprobs", "metadata", "user", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "verbosity",
    },
    "Message": {"content", "name", "refusal", "annotations", "reasoning_content", "tool_calls", "tool_call_id"},
    "JsonSchema": {"description"},
    "StructuredOutputs": {"whitespace_pattern"},
    "ProjectBody": {"external_key_id", "geography", "residency"},
    "NewAdminKeyBody": {"expires_in_seconds"},
    "RateLimitBody": {
        "max_requests_per_1_day", "max_images_per_1_minute", "max_audio_megabytes_per_1_minute", "batch_1_day_max_input_tokens",
    },
    "NewKeyBody": {"allowed_networks"},
    "KeyPatch": {"allowed_networks"},
    "NewWebhookBody": {"tenant_id"},
}  # fmt: skip
"""Fields that only the length of the body limits, that are ignored, or that are refused unless null."""
LIMITS = {
    "integer": {"minimum", "exclusiveMinimum"},
    "number": {"minimum", "exclusiveMinimum"},
    "string": {"maxLength", "enum", "pattern", "format"},
    "array": {"maxItems"},
}
"""By type: keywords of which at least one must limit a value."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A value at a limit or beyond it, and the field that has the limit."""

    path: FieldPath
    value: Any
    accepted: bool


def resolved(schema: Schema, schemas: dict[str, Schema]) -> Schema:
    return schemas[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema


def trials(schema: Schema, schemas: dict[str, Schema], path: FieldPath = ()) -> Iterator[Trial]:
    """Yield trials of the limits of `schema` and of all fields and items in it."""
    schema = resolved(schema, schemas)
    for option in schema.get("anyOf", ()):
        yield from trials(option, schemas, path)
    for name, field in schema.get("properties", {}).items():
        yield from trials(field, schemas, (*path, name))
    if schema.get("type") == "array":
        yield from trials(schema["items"], schemas, (*path, 0))
    others = schema.get("additionalProperties")
    if isinstance(others, dict):
        (key,) = names(schema, 1)
        yield from trials(others, schemas, (*path, key))
    yield from (Trial(path, value, accepted) for value, accepted in own_trials(schema, schemas, path))


def dotted(path: FieldPath) -> str:
    return ".".join(part for part in path if isinstance(part, str))


def names(schema: Schema, number: int) -> list[str]:
    of_names = schema.get("propertyNames", {})
    if "enum" in of_names:
        return list(of_names["enum"])[:number]
    return [str(index) for index in range(1, number + 1)]


def own_trials(schema: Schema, schemas: dict[str, Schema], path: FieldPath) -> Iterator[tuple[Any, bool]]:
    """Yield values at and beyond the limits of `schema` itself, and whether it accepts them; the least accepted one first."""
    field = next((part for part in reversed(path) if isinstance(part, str)), "")
    text = TEXTS.get(dotted(path), "a".__mul__)
    step = 1 if schema.get("type") == "integer" else 0.01
    if "minimum" in schema:
        yield from ((schema["minimum"], True), (schema["minimum"] - step, False))
    if "exclusiveMinimum" in schema:
        yield from ((schema["exclusiveMinimum"] + step, True), (schema["exclusiveMinimum"], False))
    if "maximum" in schema:
        yield from ((schema["maximum"], True), (schema["maximum"] + step, False))
    if "maxLength" in schema:
        least, most = schema.get("minLength", 0), schema["maxLength"]
        if field not in RESTRICTED_TEXTS and "format" not in schema:
            yield text(least), True
        yield from ((text(most), True), (text(most + 1), False))
        if least:
            yield text(least - 1), False
    if "enum" in schema:
        yield from (*((choice, True) for choice in schema["enum"]), ("nobody", False))
    for kind in (schema.get("format"), schema.get("pattern")):
        if kind is not None:
            yield from zip(EXAMPLES[kind], (True, False), strict=True)
    if "maxItems" in schema:
        item = example(schema["items"], schemas, field)
        yield from (([item] * schema["maxItems"], True), ([item] * (schema["maxItems"] + 1), False))
        least = schema.get("minItems", 0)
        yield [item] * least, True
        if least:
            yield [item] * (least - 1), False
    if "maxProperties" in schema and "enum" not in schema.get("propertyNames", {}):
        item = example(schema["additionalProperties"], schemas, field)
        for number, accepted in ((schema["maxProperties"], True), (schema["maxProperties"] + 1, False)):
            yield dict.fromkeys(names(schema, number), item), accepted
    if "propertyNames" in schema:
        yield {"nobody": example(schema["additionalProperties"], schemas, field)}, False


def example(schema: Schema, schemas: dict[str, Schema], field: str) -> Any:
    """Return a value that `schema` accepts, of `field` or of an item in it."""
    if field in EXAMPLES_OF_ITEMS:
        return EXAMPLES_OF_ITEMS[field]
    schema = resolved(schema, schemas)
    if schema.get("type") == "object":
        return {name: example(schema["properties"][name], schemas, name) for name in schema.get("required", ())}
    return next((value for value, accepted in own_trials(schema, schemas, (field,)) if accepted), "x")


def with_value(body: Any, path: FieldPath, value: Any, schema: Schema, schemas: dict[str, Schema], field: str = "") -> Any:
    """Return `body` with `value` at `path`; missing containers on the way are created from `schema`."""
    if not path:
        return value
    schema = resolved(schema, schemas)
    for option in schema.get("anyOf", ()):
        inner = resolved(option, schemas)
        if inner.get("type") == ("array" if isinstance(path[0], int) else "object"):
            schema = inner
    first, rest = path[0], path[1:]
    if isinstance(first, int):
        return [with_value(example(schema["items"], schemas, field), rest, value, schema["items"], schemas)]
    inner = schema.get("properties", {}).get(first, schema.get("additionalProperties"))
    body = copy.deepcopy(body) if isinstance(body, dict) else example(schema, schemas, "")
    body[first] = with_value(body.get(first), rest, value, inner, schemas, first)
    return body


def names_field(param: str | None, path: FieldPath) -> bool:
    """Return whether the error names the field, or the field that contains the item or unnamed value."""
    return param is not None and f"{dotted(path)}.".startswith(param.split("[")[0] + ".")


NUMBERS = count(1)
BODIES: dict[str, Callable[[], Schema]] = {
    "post /admin/v1/tenants": lambda: {"name": f"tenant {next(NUMBERS)}"},
    "patch /admin/v1/tenants/{tenant_id}": dict,
    "post /admin/v1/tenants/{tenant_id}/keys": lambda: {"name": "key"},
    "patch /admin/v1/keys/{key_id}": dict,
    "post /admin/v1/keys/{key_id}/rotate": dict,
    "post /admin/v1/members": lambda: {"email": f"m{next(NUMBERS)}@example.com", "role": "viewer"},
    "patch /admin/v1/members/{member_id}": dict,
    "post /admin/v1/tenants/{tenant_id}/members": lambda: {"email": f"m{next(NUMBERS)}@example.com", "role": "viewer"},
    "patch /admin/v1/tenants/{tenant_id}/members/{member_id}": dict,
    "patch /admin/v1/tiers/{name}": dict,
    "put /admin/v1/model-limits/{model}": lambda: {"limits": {}},
    "post /admin/v1/limits/check": lambda: {"tenant_id": "", "model": "demo", "prompt_tokens": 1},
    "put /admin/v1/economics": lambda: {"cost_micros": 1, "months": 1, "kwh_price_micros": 1},
    "post /admin/v1/tenants/{tenant_id}/invoices": lambda: {"month": "2024-01"},
    "post /admin/v1/invoices/{invoice_id}/close": dict,
    "post /admin/v1/invoices/months/{month}/draft": dict,
    "post /admin/v1/invoices/months/{month}/close": dict,
    "post /admin/v1/tenants/{tenant_id}/allowances": lambda: {"first_month": "2024-01", "monthly_micros": 1},
    "put /admin/v1/seller": lambda: {"name": "seller"},
    "post /admin/v1/prices": lambda: {"model": f"model {next(NUMBERS)}", "prompt": 1, "completion": 1},
    "post /admin/v1/ledger/{event_id}/corrections": lambda: {"note": "why", "prompt_tokens": 1},
    "post /admin/v1/webhooks": lambda: {"kind": "webhook", "target": "https://example.com/"},
    "patch /admin/v1/webhooks/{webhook_id}": dict,
    "post /admin/v1/webhooks/{webhook_id}/rotate": dict,
    "post /v1/organization/projects": lambda: {"name": f"project {next(NUMBERS)}"},
    "post /v1/organization/projects/{project_id}": lambda: {"name": f"project {next(NUMBERS)}"},
    "post /v1/organization/projects/{project_id}/api_keys/{key_id}": dict,
    "post /v1/organization/projects/{project_id}/rate_limits/{rate_limit_id}": dict,
    "post /v1/organization/admin_api_keys": lambda: {"name": "admin key"},
}
"""The operations with a body, and a body that each accepts."""


async def ids_in(api: ApiApp) -> dict[str, str]:
    """Create one object of each kind and return their ids by path parameter."""
    services = api.services
    tenant = await services.tenants.create(name="bob", access=OWNER)
    key, _ = await services.keys.create(tenant.id, name="key", access=OWNER)
    member = await services.members.create("bob@example.com", "a long password", "viewer")
    await services.memberships.add(tenant.id, member.id, "viewer", access=OWNER)
    webhook, _ = await services.alerts.webhooks.create(kind="webhook", target="https://example.com/", access=OWNER)
    invoice = await services.invoices.draft(tenant.id, "2024-01", access=OWNER)
    return {
        "tenant_id": tenant.id, "project_id": tenant.id, "invoice_id": invoice.head.id, "key_id": key.id,
        "member_id": member.id, "webhook_id": webhook.id, "name": "standard", "model": "demo", "event_id": "1",
        "rate_limit_id": "rl-*", "month": "2024-01",
    }  # fmt: skip


def test_every_operation_with_a_body_is_covered_here(api_document: Any) -> None:
    paths = api_document["paths"]
    found = {f"{method} {path}" for path, each in paths.items() for method, one in each.items() if "requestBody" in one}
    doubled = {name for name in found if name.split(" ")[1].startswith(("/organization", "/chat"))}
    assert found - doubled - {"post /v1/chat/completions"} == set(BODIES)


def parts_of(schema: Schema) -> Iterator[Schema]:
    """Yield the schemas of which a field is made."""
    yield schema
    for part in (*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")):
        if isinstance(part, dict):
            yield from parts_of(part)


def bodies_in(schema: Schema, schemas: dict[str, Schema]) -> set[str]:
    """Return the names of the components that a body is made of."""
    found, ahead = set(), [schema]
    while ahead:
        for part in parts_of(ahead.pop()):
            name = part.get("$ref", "").rpartition("/")[2]
            if name and name not in found:
                found.add(name)
                ahead += schemas[name]["properties"].values()
    return found


def test_every_field_of_a_body_has_its_limits_in_the_description(api_document: Any) -> None:
    schemas, without = api_document["components"]["schemas"], {}
    for operations in api_document["paths"].values():
        for body in (operation["requestBody"] for operation in operations.values() if "requestBody" in operation):
            for name in bodies_in(body["content"]["application/json"]["schema"], schemas):
                fields = schemas[name]["properties"].items()
                kinds = {field: [part for part in parts_of(schema) if part.get("type") in LIMITS] for field, schema in fields}
                without[name] = {
                    field for field, parts in kinds.items() if any(not LIMITS[part["type"]] & set(part) for part in parts)
                }
    assert {name: fields for name, fields in without.items() if fields} == WITHOUT_LIMITS


@pytest.mark.parametrize("operation", BODIES)
async def test_bodies_are_refused_exactly_beyond_the_described_limits(api: ApiApp, api_document: Any, operation: str) -> None:
    ids = await ids_in(api)
    method, path = operation.split(" ")
    schemas = api_document["components"]["schemas"]
    schema = api_document["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    api.services.alerts.webhooks._mail = True  # else webhooks of the kind `email` are refused
    tried = list(trials(schema, schemas))
    assert tried, "no field of the body has a limit"
    for trial in tried:
        whole = BODIES[operation]()
        if "tenant_id" in whole:
            whole["tenant_id"] = ids["tenant_id"]
        body = with_value(whole, trial.path, trial.value, schema, schemas)
        if "cost_picos" in trial.path:
            body.pop("prompt_tokens")
        answer = await api.client.request(method, path.format_map(ids), json=body)
        param = answer.json()["error"]["param"] if answer.status_code == 400 else None
        assert names_field(param, trial.path) != trial.accepted, f"{trial.path}: {str(trial.value)[:80]}: {answer.text[:200]}"
        assert trial.accepted or answer.status_code == 400, f"{trial.path}: {str(trial.value)[:80]}: {answer.text[:200]}"


def test_chats_are_refused_exactly_beyond_the_described_limits(api_document: Any) -> None:
    schemas = api_document["components"]["schemas"]
    schema = schemas["ChatCompletionRequest"]
    info = cast(Any, SimpleNamespace(max_model_len=1 << 31, vocab_size=1 << 31))
    for trial in trials(schema, schemas):
        whole: Schema = {
            "model": "m",
            "messages": [{"role": "user", "content": "hello"}],
            **REQUIRED_WITH.get(str(trial.path[0]), {}),
        }
        if trial.path[0] == "response_format":
            whole["response_format"] = {"type": "json_schema", "json_schema": {"name": "n"}}
            if trial.path == ("response_format", "type") and trial.value != "json_schema":
                whole["response_format"] = {"type": "text"}
        body = with_value(whole, trial.path, trial.value, schema, schemas)
        param = None
        try:
            read = decode_body(json.dumps(body).encode(), ChatCompletionRequest)
            check_supported(read)
            service_tier_of(read)
            check_messages(read.messages)
            grammar_spec(sampling_params(read, info, {}, default_max_tokens=None, prompt_tokens=1))
        except BadRequest as error:
            param = error.param or "nothing"
        except GrammarError as error:  # raised by the engine's first check
            _, param = with_client_field_name(str(error), error.param, field_names(read))
        assert names_field(param, trial.path) != trial.accepted, f"{trial.path}: {str(trial.value)[:80]}: {param}"


async def test_query_parameters_are_refused_exactly_beyond_the_described_limits(api: ApiApp, api_document: Any) -> None:
    ids = await ids_in(api)
    tried = 0
    for path, operations in api_document["paths"].items():
        operation = operations.get("get")
        if operation is None or path == "/admin/v1/events":
            continue
        required = {each["name"]: "0" for each in operation.get("parameters", ()) if each["in"] == "query" and each["required"]}
        for parameter in operation.get("parameters", ()):
            name = parameter["name"]
            if parameter["in"] != "query" or name in NEVER_ACCEPTED:
                continue
            for trial in trials(parameter["schema"], {}, (name,)):
                if trial.accepted and name in OPAQUE:
                    continue
                value = trial.value if isinstance(trial.value, list) else str(trial.value).replace("2099", "2024")
                query = {**required, name: value}
                if name == "limit" and path.endswith(("/usage/completions", "/usage/embeddings")):
                    query["bucket_width"] = "1m"
                answer = await api.client.get(path.format_map(ids), params=query)
                refused = answer.status_code == 400 and answer.json()["error"]["param"] == name
                assert refused != trial.accepted, f"{path}?{name}={str(value)[:80]}: {answer.text[:200]}"
                tried += 1
    assert tried > 100


@pytest.mark.parametrize(
    ("operation", "name", "body"),
    [
        ("patch /admin/v1/tiers/{name}", "name", {"admission_wait_ms": 0}),
        ("post /v1/organization/projects/{project_id}/rate_limits/{rate_limit_id}", "rate_limit_id", {}),
    ],
    ids=case_id,
)
async def test_path_parameters_beyond_the_described_limits_are_not_found(
    api: ApiApp, api_document: Any, operation: str, name: str, body: Schema
) -> None:
    ids = await ids_in(api)
    method, path = operation.split(" ")
    (schema,) = [each["schema"] for each in api_document["paths"][path][method]["parameters"] if each["name"] == name]
    for value, accepted in own_trials(schema, {}, (name,)):
        answer = await api.client.request(method, path.format_map(ids | {name: value}), json=body)
        assert answer.status_code == (200 if accepted else 404), value
