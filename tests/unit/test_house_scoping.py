"""Tenant isolation by signature: a method that returns a row of a tenant has a required parameter `access`.

Signatures are inspected, so that a new method is checked before any handler calls it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import appliance.metering
import appliance.serving.generations
import appliance.tenancy
from appliance.base.acting import SYSTEM
from appliance.base.errors import NotFound, RoleNotAllowed
from appliance.tenancy.access import Access
from appliance.tenancy.principals import ApiKey
from appliance.tenancy.roles import Action, Role, TenantRole
from tests.support.cast import Cast

# What belongs to one tenant, as types of what stores return.
ROWS = (
    "Tenant", "ApiKey", "Membership", "Webhook", "Endpoint", "Delivery", "Invoice", "InvoiceHead", "FreeAllowance",
    "UsageEvent", "UsageRow", "PastRequest", "AuditEntry", "LiveRequest", "Generation",
)  # fmt: skip

# Methods without `access`, and why they need none.
EXEMPT = {
    "Outbox.claim": "called by the deliverer, which sends messages of all tenants",
    "Webhooks.read_endpoint": "called by the deliverer; returns secrets, which no handler may read",
    "Corrections.add": "corrections are an action of the appliance alone: no role in a tenant has it",
    "Generations.start": "the key of the request has just been authenticated",
}


def modules() -> Iterator[ModuleType]:
    yield appliance.serving.generations
    for package in (appliance.tenancy, appliance.metering):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def stores() -> Iterator[type]:
    """Yield the classes that have a database or live requests."""
    for module in modules():
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and {"_db", "_requests"} & assigned_names(kind):
                yield kind


def assigned_names(kind: type) -> set[str]:
    start = vars(kind).get("__init__")
    return set(start.__code__.co_names) if inspect.isfunction(start) else set()


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield f"{kind.__name__}.{name}", function


def returns_a_row(function: Any) -> bool:
    return bool(set(re.findall(r"\w+", str(function.__annotations__.get("return", "")))) & set(ROWS))


def requires_access(function: Any) -> bool:
    access = inspect.signature(function).parameters.get("access")
    return access is not None and access.default is inspect.Parameter.empty and access.annotation == "Access"


def readers() -> dict[str, Any]:
    return {name: function for kind in stores() for name, function in methods(kind) if returns_a_row(function)}


def test_every_method_that_returns_a_tenant_s_row_requires_access() -> None:
    found = readers()
    silent = [name for name, function in found.items() if not requires_access(function) and name not in EXEMPT]

    assert not silent, f"give these a required `access: Access`: {silent}"
    assert {name.split(".")[0] for name in found} >= {
        "Tenants", "Keys", "Memberships", "Webhooks", "Outbox", "Invoices", "FreeAllowances", "UsageReports", "AuditLog",
        "Generations",
    }  # fmt: skip


def test_every_exemption_is_needed() -> None:
    found = readers()
    assert all(name in found and not requires_access(found[name]) for name in EXEMPT)


def test_a_method_without_required_access_is_detected() -> None:
    class Forgetful:
        async def get(self, key_id: str) -> ApiKey:
            raise NotFound("nothing")

        async def list(self, *, access: Access | None = None) -> list[ApiKey]:
            raise NotFound("nothing")

        def count(self) -> int:
            raise NotFound("nothing")

    caught = [name for name, function in methods(Forgetful) if returns_a_row(function) and not requires_access(function)]
    assert caught == ["Forgetful.get", "Forgetful.list"]


def test_a_row_of_another_tenant_is_reported_as_not_found(cast: Cast) -> None:
    key = cast.bob.key
    viewer = Access(role=Role.MEMBER, actor=SYSTEM, tenants={key.tenant_id: TenantRole.VIEWER})
    stranger = Access(role=Role.MEMBER, actor=SYSTEM, tenants={cast.charlie.tenant.id: TenantRole.MANAGER})

    assert viewer.row(key, Action.READ, what="key", param="key_id") is key
    with pytest.raises(RoleNotAllowed):
        viewer.row(key, Action.KEYS, what="key", param="key_id")
    errors_seen = []
    for found in (key, None):
        with pytest.raises(NotFound) as refused:
            stranger.row(found, Action.READ, what="key", param="key_id")
        errors_seen.append((refused.value.message, refused.value.param))
    assert errors_seen[0] == errors_seen[1], "a hidden row and a missing row give the same error"
