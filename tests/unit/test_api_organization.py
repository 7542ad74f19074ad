"""OpenAI's organization API, as far as the official client is not needed: buckets, currencies, shapes, roles."""

from __future__ import annotations

import ast
import importlib.util
import json
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.api.organization.audit_log_shapes import TYPE_OF, audit_log_shape
from appliance.api.organization.usage import UsageQuery
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.usage import UsageFilter
from appliance.tenancy.audit_chain import AuditEntry
from tests.support.api_app import ApiApp
from tests.support.case_ids import case_id
from tests.support.cast import OWNER, Person, make_person
from tests.support.clock import START, FakeClock
from tests.support.factories import pending, posted
from tests.support.ledgers import running_ledger

DAY_S = 86400
MIDNIGHT = START.replace(hour=0)


@pytest.fixture
def api(api: ApiApp) -> ApiApp:
    """The application, at noon of START whatever the day of the test."""
    api.services.clock = FakeClock()
    return api


async def read(api: ApiApp, path: str, status: int = 200, **query: Any) -> Any:
    answer = await api.client.get(f"/v1/organization{path}", params=query)
    assert answer.status_code == status, answer.text
    return answer.json()


async def record_usage(api: ApiApp, person: Person, *moments: datetime, currency: str = "EUR", model: str = "demo") -> None:
    """Record a request of `person` at each of `moments`: 10 prompt tokens, 4 of them cached, and 5 output tokens."""
    services = api.services
    page = await services.prices.list(100)
    if not [price for price in page.data if (price.model, price.currency) == (model, currency)]:
        await services.prices.add(
            model=model,
            currency=currency,
            prompt=10**6,
            cached_prompt=10**5,
            completion=3 * 10**6,
            effective_from=START - timedelta(days=90),
        )
    price = await services.prices.current(model, START, currency=currency)
    epoch_id = await begin_epoch(services.db, services.clock, "test")
    async with running_ledger(services.db, services.clock, epoch_id) as ledger:
        for moment in moments:
            entry = pending(person, admitted_at=moment, price=price, model=model)
            await ledger.open(entry)
            await ledger.settle(posted(entry.request_id, prompt=10, cached=4, completion=5))


def usage_query(start: datetime, end: datetime, bucket: str = "day") -> UsageQuery:
    return UsageQuery(start=start, end=end, bucket=bucket, buckets_max=10, groups=(), filters=UsageFilter())


def test_days_are_those_of_the_billing_time_zone_across_clock_changes() -> None:
    calendar, now = BillingCalendar("Europe/Zurich"), datetime(2027, 1, 1, tzinfo=UTC)
    autumn = usage_query(datetime(2026, 10, 23, 22, tzinfo=UTC), datetime(2026, 10, 26, 23, tzinfo=UTC))
    hours = [(end - start) // timedelta(hours=1) for start, end in autumn.buckets(calendar, now)]
    assert hours == [24, 25, 24]
    spring = usage_query(datetime(2026, 3, 27, 23, tzinfo=UTC), datetime(2026, 3, 30, 22, tzinfo=UTC))
    assert [(end - start) // timedelta(hours=1) for start, end in spring.buckets(calendar, now)] == [24, 23, 24]


def test_buckets_are_clipped_to_the_period_and_none_begins_in_the_future() -> None:
    start, end = START.replace(minute=20), START + timedelta(hours=9, minutes=5)
    buckets = list(usage_query(start, end, "hour").buckets(BillingCalendar(), START + timedelta(hours=2)))
    assert (buckets[0], len(buckets)) == ((start, START + timedelta(hours=1)), 3)
    assert all(one[1] == other[0] for one, other in pairwise(buckets))
    whole = list(usage_query(start, end, "hour").buckets(BillingCalendar(), end))
    assert whole[-1] == (START + timedelta(hours=9), end)


async def test_a_bucket_without_usage_is_returned_empty(api: ApiApp) -> None:
    bob = await make_person(api.services.db, api.services.clock, "bob")
    await record_usage(api, bob, START - timedelta(days=2), START)
    page = await read(api, "/usage/completions", start_time=int(MIDNIGHT.timestamp()) - 3 * DAY_S)
    assert [len(bucket["results"]) for bucket in page["data"]] == [0, 1, 0, 1]
    assert (page["has_more"], page["next_page"], page["object"]) == (False, None, "page")
    (result,) = page["data"][1]["results"]
    assert result == {
        "object": "organization.usage.completions.result",
        "input_tokens": 10, "input_cached_tokens": 4, "input_uncached_tokens": 6, "output_tokens": 5,
        "input_text_tokens": 6, "input_cached_text_tokens": 4, "output_text_tokens": 5, "input_audio_tokens": 0,
        "output_audio_tokens": 0, "num_model_requests": 1, "project_id": None, "user_id": None, "api_key_id": None,
        "model": None, "batch": None, "service_tier": None,
    }  # fmt: skip


async def test_usage_outside_the_period_is_not_counted_in_a_clipped_bucket(api: ApiApp) -> None:
    bob = await make_person(api.services.db, api.services.clock, "bob")
    await record_usage(api, bob, START - timedelta(hours=2), START - timedelta(hours=1), START)
    start = int(START.timestamp()) - 5400
    page = await read(api, "/usage/completions", start_time=start, end_time=start + 5400)
    (bucket,) = page["data"]
    assert (bucket["start_time"], bucket["end_time"]) == (start, start + 5400)
    assert bucket["results"][0]["num_model_requests"] == 1


async def test_usage_is_filtered_and_grouped(api: ApiApp) -> None:
    bob = await make_person(api.services.db, api.services.clock, "bob")
    charlie = await make_person(api.services.db, api.services.clock, "charlie")
    await record_usage(api, bob, START, START, model="one")
    await record_usage(api, bob, START, model="two")
    await record_usage(api, charlie, START, model="two")
    start = {"start_time": int(MIDNIGHT.timestamp())}

    async def requests(**query: Any) -> dict[Any, int]:
        page = await read(api, "/usage/completions", **start, **query)
        rows = [result for bucket in page["data"] for result in bucket["results"]]
        return {(row["project_id"], row["model"]): row["num_model_requests"] for row in rows}

    assert await requests() == {(None, None): 4}
    assert await requests(group_by="model") == {(None, "one"): 2, (None, "two"): 2}
    assert await requests(**{"group_by[]": ["project_id", "model"]}) == {
        (bob.tenant.id, "one"): 2, (bob.tenant.id, "two"): 1, (charlie.tenant.id, "two"): 1,
    }  # fmt: skip
    assert await requests(models="two") == {(None, None): 2}
    assert await requests(**{"project_ids[]": [bob.tenant.id], "models[]": ["two"]}) == {(None, None): 1}
    assert await requests(api_key_ids=charlie.key.id, group_by="project_id") == {(charlie.tenant.id, None): 1}
    assert await requests(project_ids="nobody") == {}


async def test_costs_in_two_currencies_are_not_added(api: ApiApp) -> None:
    bob = await make_person(api.services.db, api.services.clock, "bob")
    await record_usage(api, bob, START, START, currency="EUR")
    await record_usage(api, bob, START, currency="CHF")
    page = await read(api, "/costs", start_time=int(MIDNIGHT.timestamp()), group_by="line_item")
    (bucket,) = page["data"]
    one = 6 * 10**6 + 4 * 10**5 + 5 * 3 * 10**6
    assert {row["amount"]["currency"]: row["amount"]["value"] for row in bucket["results"]} == {
        "eur": 2 * one / 10**12,
        "chf": one / 10**12,
    }
    assert [(row["line_item"], row["quantity_unit"]) for row in bucket["results"]] == [("demo", "tokens")] * 2
    usage = await read(api, "/usage/completions", start_time=int(MIDNIGHT.timestamp()))
    assert [row["num_model_requests"] for row in usage["data"][0]["results"]] == [3]


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("/usage/completions", {}, "start_time"),
        ("/costs", {"start_time": "1", "bucket_width": "1h"}, "bucket_width"),
        ("/costs", {"start_time": "1", "limit": "181"}, "limit"),
        ("/costs", {"start_time": "1e3"}, "start_time"),
        ("/costs", {"start_time": "9" * 30}, "start_time"),
        ("/costs", {"start_time": "1", "group_by": "model"}, "group_by"),
        ("/costs", {"start_time": "1", "models": "demo"}, "models"),
        ("/usage/embeddings", {"start_time": "5", "end_time": "5"}, "end_time"),
        ("/projects", {"limit": "101"}, "limit"),
        ("/projects", {"after": "x" * 4000}, "cursor"),
        ("/audit_logs", {"after": "audit_log-x"}, "after"),
        ("/audit_logs", {"after": f"audit_log-{7:022}"}, "after"),
        ("/audit_logs", {"before": "1"}, "before"),
        ("/audit_logs", {"tenant_only": "true"}, "tenant_only"),
        ("/audit_logs", {"effective_at[gte]": "-1"}, "effective_at[gte]"),
        ("/admin_api_keys", {"order": "up"}, "order"),
    ],
    ids=case_id,
)
async def test_an_invalid_parameter_is_named(api: ApiApp, path: str, query: dict[str, str], param: str) -> None:
    assert (await read(api, path, 400, **query))["error"]["param"] == param


@pytest.mark.parametrize("name", ["batch", "service_tier", "user_id"])
async def test_an_unsupported_grouping_is_refused_naming_the_supported_ones(api: ApiApp, name: str) -> None:
    error = (await read(api, "/usage/completions", 400, start_time=1, group_by=name))["error"]
    assert (error["param"], error["code"]) == ("group_by", "unsupported_parameter")
    assert error["message"] == f"usage cannot be grouped by {name}; group_by takes project_id, api_key_id, model"


@pytest.mark.parametrize("name", ["batch", "user_ids"])
async def test_an_unsupported_filter_is_refused_naming_the_supported_ones(api: ApiApp, name: str) -> None:
    error = (await read(api, "/usage/completions", 400, **{"start_time": 1, name: "true"}))["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert error["message"] == f"usage cannot be filtered by {name}; filter by project_ids, api_key_ids, models"


async def test_periods_in_the_far_future_or_past_are_paged(api: ApiApp) -> None:
    assert (await read(api, "/usage/completions", start_time=253_402_300_799))["data"] == []
    page = await read(api, "/usage/completions", start_time=0, limit=31)
    assert (len(page["data"]), page["has_more"]) == (31, True)


async def test_the_audit_log_is_paged_forwards_and_backwards(api: ApiApp) -> None:
    for number in range(5):
        await api.services.tenants.create(name=f"tenant {number}", access=OWNER)

    async def ids(**query: Any) -> tuple[list[str], bool]:
        chosen: dict[str, Any] = {"event_types[]": "project.created"}
        page = await read(api, "/audit_logs", limit=2, **chosen, **query)
        assert [page["first_id"], page["last_id"]] == [page["data"][0]["id"], page["data"][-1]["id"]]
        return [each["id"] for each in page["data"]], page["has_more"]

    first, _ = await ids()
    second, _ = await ids(after=first[-1])
    third, more = await ids(after=second[-1])
    assert not more

    # A page right before an entry is the previous one; clients ask for what follows it, up to that entry: nothing.
    assert await ids(before=third[0]) == (second, False)
    assert await ids(before=second[0]) == (first, False)
    assert await ids(before=second[-1], after=first[0]) == ([first[-1], second[0]], False)
    assert await ids(before=third[-1], after=first[0]) == ([first[-1], second[0]], True)
    assert await ids(before=third[-1], after=second[0]) == ([second[-1]], False)


@pytest.mark.parametrize(
    ("role", "statuses"), [("viewer", (200, 403, 403)), ("admin", (200, 200, 403)), ("owner", (200, 200, 200))]
)
async def test_roles_apply_to_this_api_too(api: ApiApp, role: str, statuses: tuple[int, ...]) -> None:
    headers = await api.as_role(role)
    calls = [("GET", "/projects", None), ("POST", "/projects", {"name": "made"}), ("POST", "/admin_api_keys", {"name": "made"})]
    answers = [
        await api.client.request(method, f"/v1/organization{path}", headers=headers, json=body) for method, path, body in calls
    ]
    assert tuple(answer.status_code for answer in answers) == statuses


async def test_an_unsupported_path_of_the_api_is_not_found(api: ApiApp) -> None:
    await read(api, "/users", 404)


def entry(action: str, **changes: Any) -> AuditEntry:
    fields = {
        "id": 7, "at": START, "actor_kind": "token", "actor_id": "adm_1", "actor_name": "ci", "action": action,
        "target_kind": "x", "target_id": "x_1", "tenant_id": None, "before": None, "after": None, "request_id": None,
        "address": "10.0.0.7", "previous_hash": "", "hash": "",
    }  # fmt: skip
    return AuditEntry(**{**fields, **changes})


def shape_of_entry(action: str, **changes: Any) -> Any:
    """Return an entry of the log in the form that clients get."""
    return json.loads(msgspec.json.encode(audit_log_shape(entry(action, **changes))))


def test_an_entry_without_an_openai_type_keeps_ours() -> None:
    assert shape_of_entry("price.create", after=json.dumps({"model": "demo"})) == {
        "object": "organization.audit_log",
        "id": "audit_log-7",
        "type": "price.create",
        "effective_at": int(START.timestamp()),
        "actor": {
            "type": "api_key",
            "api_key": {"id": "adm_1", "type": "service_account", "service_account": {"id": "adm_1"}},
        },
        "price.create": {"id": "x_1", "changes_requested": {"model": "demo"}},
    }


def test_an_entry_of_a_tenant_has_its_project_and_the_new_values() -> None:
    made = shape_of_entry("tenant.create", tenant_id="tn_1", after=json.dumps({"name": "bob", "weight": 1}))
    assert (made["type"], made["project"]) == ("project.created", {"id": "tn_1"})
    assert made["project.created"] == {"id": "x_1", "data": {"name": "bob", "weight": 1, "title": "bob"}}
    assert set(made) == {"object", "id", "type", "effective_at", "actor", "project", "project.created"}
    assert shape_of_entry("key.revoke")["api_key.deleted"] == {"id": "x_1"}


def test_the_actor_is_a_members_session_or_empty_for_a_failed_sign_in() -> None:
    member = shape_of_entry("tenant.archive", actor_kind="member", actor_id="mb_1", actor_name="alice@example.com")
    session = {"user": {"id": "mb_1", "email": "alice@example.com"}, "ip_address": "10.0.0.7"}
    assert member["actor"] == {"type": "session", "session": session}
    failed = shape_of_entry("session.refuse", actor_kind="system", after=json.dumps({"reason": "password"}))
    assert failed["actor"]["session"]["user"] is None
    assert failed["login.failed"] == {"error_code": "password", "error_message": "x_1 could not sign in"}


def test_the_schema_of_an_entry_has_a_field_for_every_openai_type(api_document: Any) -> None:
    answer = api_document["paths"]["/v1/organization/audit_logs"]["get"]["responses"]["200"]["content"]["application/json"]
    schemas = api_document["components"]["schemas"]
    assert answer["schema"] == {"$ref": "#/components/schemas/AuditLogList"}
    assert schemas["AuditLogList"]["properties"]["data"]["items"] == {"$ref": "#/components/schemas/AuditLog"}
    assert set(TYPE_OF.values()) <= set(schemas["AuditLog"]["properties"])
    assert set(schemas["AuditLog"]["required"]) == {"object", "id", "type", "effective_at", "actor"} - {"object"}


def test_every_openai_type_is_known_to_the_official_client() -> None:
    assert set(TYPE_OF.values()) <= openai_audit_log_types()


def openai_audit_log_types() -> set[str]:
    """Return the values of `AuditLogListResponse.type` in the official client, from its source: importing it takes seconds."""
    spec = importlib.util.find_spec("openai")
    assert spec is not None
    assert spec.origin is not None
    module = Path(spec.origin).parent / "types" / "admin" / "organization" / "audit_log_list_response.py"
    (response,) = [
        node
        for node in ast.parse(module.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "AuditLogListResponse"
    ]
    (field,) = [node for node in response.body if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "type"]
    return {str(node.value) for node in ast.walk(field.annotation) if isinstance(node, ast.Constant)}


async def test_a_page_has_whole_buckets_up_to_a_number_of_results(api: ApiApp, monkeypatch: pytest.MonkeyPatch) -> None:
    hours = [START - timedelta(hours=hour) for hour in range(6)]
    for name in ("bob", "charlie", "dora"):
        person = await make_person(api.services.db, api.services.clock, name)
        await record_usage(api, person, *hours[:4], model=f"of {name}")
        await record_usage(api, person, hours[2], model="for all")
    query: dict[str, Any] = {"bucket_width": "1h", "limit": 10, "start_time": int(hours[-1].timestamp())}
    query["group_by[]"] = ["project_id", "model"]
    whole = await read(api, "/usage/completions", **query)
    assert [len(bucket["results"]) for bucket in whole["data"]] == [0, 0, 3, 6, 3, 3]

    async def pages(results_max: int) -> list[list[Any]]:
        monkeypatch.setattr("appliance.api.organization.usage.RESULTS_MAX", results_max)
        found: list[list[Any]] = []
        position: dict[str, Any] = {}
        while True:
            page = await read(api, "/usage/completions", **query, **position)
            found.append(page["data"])
            assert page["has_more"] == (page["next_page"] is not None)
            if not page["has_more"]:
                return found
            position = {"page": page["next_page"]}

    for results_max, lengths in ((15, [6]), (14, [5, 1]), (6, [3, 1, 2]), (5, [3, 1, 1, 1]), (1, [2, 1, 1, 1, 1])):
        found = await pages(results_max)
        assert [bucket for data in found for bucket in data] == whole["data"]
        assert [len(data) for data in found] == lengths


async def test_a_repeated_parameter_of_one_value_is_named(api: ApiApp) -> None:
    start = str(int(START.timestamp()))
    answer = await read(api, "/costs", 400, start_time=[start, start])

    assert answer["error"]["param"] == "start_time"
