"""The organization API with the official client: usage, costs, projects, keys, rate limits, audit log and admin keys."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.conformance.conftest import MODEL
from tests.support.server import ADMIN_TOKEN, Server

NO_LIMIT = 10**15
HELLO: list[Any] = [{"role": "user", "content": "the quick brown fox"}]


@pytest.fixture
async def admin(server: Server) -> AsyncIterator[Any]:
    """The organization methods of the official client, with an administrator token."""
    async with AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", admin_api_key=ADMIN_TOKEN, max_retries=0, timeout=60
    ) as opened:
        yield opened.admin.organization


async def use_new_project(server: Server, admin: Any, *, name: str, requests: int = 2) -> tuple[str, str, list[Any]]:
    """Create a project and send requests with a new key of it; return both ids and the usage of each answer."""
    project = await admin.projects.create(name=name)
    made = server.admin("POST", f"/tenants/{project.id}/keys", json={"name": "first"})
    usages = []
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=made["key"], max_retries=0, timeout=60) as client:
        for number in range(requests):
            answer = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_tokens=4 + number, extra_body={"ignore_eos": True}
            )
            usages.append(answer.usage)
    return project.id, made["id"], usages


def today(server: Server) -> int:
    started = server.admin("GET", "/system")["processes"][0]["started_at"]
    return int(datetime.fromisoformat(started).timestamp()) // 86400 * 86400


async def test_usage_of_completions_sums_up_the_answers(server: Server, admin: Any) -> None:
    project_id, key_id, usages = await use_new_project(server, admin, name="usage")
    page = await admin.usage.completions(
        start_time=today(server), project_ids=[project_id], group_by=["project_id", "api_key_id", "model"]
    )
    (result,) = [result for bucket in page.data for result in bucket.results]
    assert result.object == "organization.usage.completions.result"
    assert result.input_tokens == sum(usage.prompt_tokens for usage in usages)
    assert result.output_tokens == sum(usage.completion_tokens for usage in usages)
    assert result.input_cached_tokens == sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert result.input_cached_tokens + result.input_uncached_tokens == result.input_tokens
    assert (result.num_model_requests, result.project_id, result.api_key_id, result.model) == (2, project_id, key_id, MODEL)


@pytest.mark.parametrize("width", ["1m", "1h", "1d"])
async def test_pages_of_buckets_are_contiguous(server: Server, admin: Any, width: str) -> None:
    project_id, _, usages = await use_new_project(server, admin, name=f"buckets of {width}")
    options = {"start_time": today(server) - 86400, "bucket_width": width, "project_ids": [project_id]}
    buckets, page_token = [], None
    while True:
        page = await admin.usage.completions(**options, **({"page": page_token} if page_token else {}))
        buckets += page.data
        assert len(page.data) <= {"1m": 60, "1h": 24, "1d": 7}[width]
        assert page.has_more is (page.next_page is not None)
        if not page.has_more:
            break
        page_token = page.next_page
    assert buckets[0].start_time == options["start_time"]
    assert all(one.end_time == other.start_time for one, other in itertools.pairwise(buckets))
    total = sum(result.output_tokens for bucket in buckets for result in bucket.results)
    assert total == sum(usage.completion_tokens for usage in usages)


async def test_usage_of_embeddings_has_empty_buckets(server: Server, admin: Any) -> None:
    page = await admin.usage.embeddings(start_time=today(server))
    assert page.object == "page"
    assert [bucket.results for bucket in page.data] == [[]] * len(page.data)


async def test_costs_equal_those_of_the_administrators_api_in_currency_units(server: Server, admin: Any) -> None:
    server.admin("POST", "/prices", json={"model": MODEL, "prompt": 1_000_000, "completion": 3_000_000})
    project_id, _, usages = await use_new_project(server, admin, name="costs")
    page = await admin.usage.costs(start_time=today(server), project_ids=[project_id], group_by=["project_id", "line_item"])
    (result,) = [result for bucket in page.data for result in bucket.results]
    (row,) = server.admin("GET", "/costs", params={"tenant_id": project_id, "group_by": "tenant"})["data"]
    assert row["cost_picos"] > 0
    assert (result.amount.value, result.amount.currency) == (row["cost_picos"] / 10**12, row["currency"].lower())
    assert (result.project_id, result.line_item, result.quantity_unit) == (project_id, MODEL, "tokens")
    assert result.quantity == sum(usage.total_tokens for usage in usages)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"group_by": ["user_id"]}, "group_by"),
        ({"group_by": ["service_tier"]}, "group_by"),
        ({"user_ids": ["u"]}, "user_ids"),
        ({"batch": True}, "batch"),
        ({"bucket_width": "1w"}, "bucket_width"),
        ({"limit": 32}, "limit"),
        ({"limit": 0}, "limit"),
        ({"page": "nonsense"}, "page"),
        ({"end_time": 1}, "end_time"),
        ({"start_time": -1}, "start_time"),
        ({"extra_query": {"verbose": "yes"}}, "verbose"),
    ],
)
async def test_unsupported_or_invalid_parameters_are_refused_by_name(
    server: Server, admin: Any, options: Any, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await admin.usage.completions(**{"start_time": today(server), **options})
    assert refused.value.param == param


async def test_a_project_can_be_created_renamed_listed_and_archived(admin: Any) -> None:
    made = await admin.projects.create(name="a project")
    assert (made.object, made.name, made.status, made.archived_at) == ("organization.project", "a project", "active", None)
    assert (await admin.projects.retrieve(made.id)) == made
    renamed = await admin.projects.update(made.id, name="renamed")
    assert (renamed.id, renamed.name) == (made.id, "renamed")
    assert made.id in [project.id async for project in admin.projects.list(limit=1)]
    archived = await admin.projects.archive(made.id)
    assert (archived.status, archived.archived_at >= made.created_at) == ("archived", True)
    assert made.id not in [project.id async for project in admin.projects.list()]
    assert made.id in [project.id async for project in admin.projects.list(include_archived=True, limit=2)]


async def test_an_invalid_project_is_refused(admin: Any) -> None:
    await admin.projects.create(name="taken")
    with pytest.raises(openai.ConflictError):
        await admin.projects.create(name="taken")
    with pytest.raises(openai.BadRequestError, match="geography"):
        await admin.projects.create(name="abroad", geography="US")
    with pytest.raises(openai.NotFoundError):
        await admin.projects.retrieve("proj_nobody")


async def test_keys_of_a_project_can_be_listed_changed_and_deleted(server: Server, admin: Any) -> None:
    project = await admin.projects.create(name="keys")
    made = [server.admin("POST", f"/tenants/{project.id}/keys", json={"name": f"key {number}"}) for number in range(3)]
    listed = [key async for key in admin.projects.api_keys.list(project.id, limit=2)]
    assert [key.id for key in listed] == [key["id"] for key in made]
    assert listed[0].redacted_value.startswith(made[0]["prefix"])
    assert (listed[0].owner.type, listed[0].owner.service_account.name) == ("service_account", "keys")
    changed = await admin.projects.api_keys.update(
        made[1]["id"], project_id=project.id, expires_in_seconds=600, scopes=["usage"]
    )
    assert changed.expires_at > changed.created_at
    assert server.admin("GET", f"/tenants/{project.id}/keys")["data"][1]["scopes"] == ["usage"]
    gone = await admin.projects.api_keys.delete(made[0]["id"], project_id=project.id)
    assert (gone.id, gone.deleted, gone.object) == (made[0]["id"], True, "organization.project.api_key.deleted")
    assert [key.id async for key in admin.projects.api_keys.list(project.id)] == [key["id"] for key in made[1:]]
    with pytest.raises(openai.NotFoundError):
        await admin.projects.api_keys.retrieve(made[0]["id"], project_id=project.id)


async def test_a_key_of_another_project_is_not_found(server: Server, admin: Any) -> None:
    alices, charlies = [await admin.projects.create(name=f"{name}'s project") for name in ("alice", "charlie")]
    key = server.admin("POST", f"/tenants/{charlies.id}/keys", json={"name": "charlie's"})
    for call in (admin.projects.api_keys.retrieve, admin.projects.api_keys.delete):
        with pytest.raises(openai.NotFoundError):
            await call(key["id"], project_id=alices.id)
    assert (await admin.projects.api_keys.retrieve(key["id"], project_id=charlies.id)).id == key["id"]


async def test_rate_limits_of_a_project_are_the_limits_of_its_tenant(server: Server, admin: Any) -> None:
    project = await admin.projects.create(name="limits")
    server.admin("PATCH", f"/tenants/{project.id}", json={"limits": {"requests_per_minute": 7}})
    listed = {limit.model: limit async for limit in admin.projects.rate_limits.list_rate_limits(project.id)}
    assert set(listed) == {"*", MODEL}
    assert (listed["*"].max_requests_per_1_minute, listed["*"].max_tokens_per_1_minute) == (7, NO_LIMIT)
    update = admin.projects.rate_limits.update_rate_limit
    changed = await update(listed[MODEL].id, project_id=project.id, max_tokens_per_1_minute=500)
    assert (changed.model, changed.max_tokens_per_1_minute, changed.max_requests_per_1_minute) == (MODEL, 500, NO_LIMIT)
    await update(listed["*"].id, project_id=project.id, max_requests_per_1_minute=NO_LIMIT, max_tokens_per_1_minute=9000)
    tenant = server.admin("GET", f"/tenants/{project.id}")
    assert (tenant["limits"]["requests_per_minute"], tenant["limits"]["tokens_per_minute"]) == (None, 9000)
    assert tenant["model_limits"][MODEL]["tokens_per_minute"] == 500
    with pytest.raises(openai.BadRequestError, match="max_images_per_1_minute"):
        await update(listed["*"].id, project_id=project.id, max_images_per_1_minute=1)
    with pytest.raises(openai.NotFoundError):
        await update("rl-nothing", project_id=project.id, max_tokens_per_1_minute=1)


async def test_a_model_whose_name_is_a_path_can_have_a_rate_limit(server: Server, admin: Any) -> None:
    project = await admin.projects.create(name="limits of odd names")
    server.admin("PATCH", f"/tenants/{project.id}", json={"model_limits": {"org/mödel 50%": {"tokens_per_minute": 1}}})
    listed = {limit.model: limit async for limit in admin.projects.rate_limits.list_rate_limits(project.id, limit=1)}
    odd = listed["org/mödel 50%"]
    changed = await admin.projects.rate_limits.update_rate_limit(odd.id, project_id=project.id, max_requests_per_1_minute=3)
    assert (changed.model, changed.max_tokens_per_1_minute, changed.max_requests_per_1_minute) == ("org/mödel 50%", 1, 3)


async def test_the_audit_log_uses_the_event_types_of_the_openai_api(server: Server, admin: Any) -> None:
    project = await admin.projects.create(name="audited")
    key = server.admin("POST", f"/tenants/{project.id}/keys", json={"name": "audited"})
    await admin.projects.update(project.id, name="audited more")
    await admin.projects.api_keys.delete(key["id"], project_id=project.id)
    await admin.projects.archive(project.id)
    entries = [entry async for entry in admin.audit_logs.list(project_ids=[project.id], limit=2)]
    assert [entry.type for entry in entries] == [
        *("project.archived", "api_key.deleted", "project.updated", "api_key.created", "project.created"),
    ]
    assert {entry.actor.type for entry in entries} == {"api_key"}
    assert entries[-1].project_created.data.name == "audited"
    assert entries[2].project_updated.changes_requested.title == "audited more"
    assert entries[3].api_key_created.id == key["id"]
    assert entries[3].api_key_created.data.scopes == ["inference"]
    assert all(entry.project.id == project.id for entry in entries)
    only = [entry async for entry in admin.audit_logs.list(event_types=["api_key.created"], resource_ids=[key["id"]])]
    assert [entry.id for entry in only] == [entries[3].id]
    bounds = {"gte": entries[-1].effective_at, "lte": entries[0].effective_at}
    within = [entry.id async for entry in admin.audit_logs.list(project_ids=[project.id], effective_at=bounds)]
    assert within == [entry.id for entry in entries]
    assert [entry async for entry in admin.audit_logs.list(effective_at={"lt": 1000})] == []


async def test_the_audit_log_can_be_paged_backwards_and_between_two_entries(server: Server, admin: Any) -> None:
    project = await admin.projects.create(name="walked")
    for number in range(5):
        await admin.projects.update(project.id, name=f"walked {number}")
    listed = [entry.id async for entry in admin.audit_logs.list(project_ids=[project.id])]
    oldest = listed[-1]

    page = await admin.audit_logs.list(project_ids=[project.id], limit=3, before=oldest)
    assert [entry.id for entry in page.data] == listed[-4:-1]
    assert not page.has_next_page()  # only the entry given as `before` follows
    page = await admin.audit_logs.list(project_ids=[project.id], limit=3, before=page.data[0].id)
    assert [entry.id for entry in page.data] == listed[:-4]

    between = admin.audit_logs.list(project_ids=[project.id], limit=3, after=listed[0], before=oldest)
    assert [entry.id async for entry in between] == listed[1:-1]


async def test_an_admin_key_can_be_created_used_and_deleted(server: Server, admin: Any) -> None:
    made = await admin.admin_api_keys.create(name="second")
    assert made.value.startswith("gha_")
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", admin_api_key=made.value, max_retries=0) as second:
        assert (await second.admin.organization.admin_api_keys.retrieve(made.id)).name == "second"
        assert made.id in [key.id async for key in second.admin.organization.admin_api_keys.list(limit=1, order="desc")]
        assert (await admin.admin_api_keys.delete(made.id)).deleted
        with pytest.raises(openai.AuthenticationError):
            await second.admin.organization.admin_api_keys.list()
    with pytest.raises(openai.NotFoundError):
        await admin.admin_api_keys.retrieve(made.id)


async def test_a_tenant_s_key_can_read_only_its_own_usage(server: Server, admin: Any) -> None:
    project_id, _, usages = await use_new_project(server, admin, name="own usage")
    await use_new_project(server, admin, name="somebody else's usage")
    key = server.admin("POST", f"/tenants/{project_id}/keys", json={"name": "reader", "scopes": ["usage"]})["key"]
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", admin_api_key=key, max_retries=0) as reader:
        page: Any = await reader.admin.organization.usage.completions(start_time=today(server), group_by=["project_id"])
        found = [result for bucket in page.data for result in bucket.results]
        assert [(result.project_id, result.num_model_requests) for result in found] == [(project_id, len(usages))]
        for call in (reader.admin.organization.projects.list, reader.admin.organization.audit_logs.list):
            with pytest.raises(openai.AuthenticationError):
                await call()


async def test_paths_without_v1_work(server: Server) -> None:
    async with AsyncOpenAI(base_url=server.url, api_key="unused", admin_api_key=ADMIN_TOKEN, max_retries=0) as client:
        assert (await client.admin.organization.projects.list()).data
