"""Who asks is said where it is read: a method that returns a row of a tenant cannot be called without an access.

Read from the signatures, so that a method that is added is caught before any handler calls it.
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
    "UsageEvent", "UsageRow", "RequestRow", "AuditEntry", "LiveRequest", "Generation",
)  # fmt: skip

# Methods that are not told who asks, and why nobody needs to be.
NOT_TOLD = {
    "Outbox.claim": "the deliverer's: whatever is due, of everybody",
    "Webhooks.read_endpoint": "the deliverer's: secrets, which no handler may have",
    "Corrections.add": "corrections are an action of the appliance alone: no role in a tenant has it",
    "Generations.start": "the request that its own key has just made",
}


def modules() -> Iterator[ModuleType]:
    yield appliance.serving.generations
    for package in (appliance.tenancy, appliance.metering):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield importlib.import_module(found.name)


def stores() -> Iterator[type]:
    """Return the classes that hold a database, or what is live: values have rows too, but read none."""
    for module in modules():
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__ and {"_db", "_generations"} & assigned(kind):
                yield kind


def assigned(kind: type) -> set[str]:
    start = vars(kind).get("__init__")
    return set(start.__code__.co_names) if inspect.isfunction(start) else set()


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield f"{kind.__name__}.{name}", function


def returns_a_row(function: Any) -> bool:
    return bool(set(re.findall(r"\w+", str(function.__annotations__.get("return", "")))) & set(ROWS))


def asks_who(function: Any) -> bool:
    access = inspect.signature(function).parameters.get("access")
    return access is not None and access.default is inspect.Parameter.empty and access.annotation == "Access"


def readers() -> dict[str, Any]:
    return {name: function for kind in stores() for name, function in methods(kind) if returns_a_row(function)}


def test_whoever_reads_a_tenants_row_says_who_asks() -> None:
    found = readers()
    silent = [name for name, function in found.items() if not asks_who(function) and name not in NOT_TOLD]

    assert not silent, f"give these a required `access: Access`: {silent}"
    assert {name.split(".")[0] for name in found} >= {
        "Tenants", "Keys", "Memberships", "Webhooks", "Outbox", "Invoices", "FreeAllowances", "UsageReports", "AuditLog",
        "Generations",
    }  # fmt: skip


def test_no_exception_is_kept_that_nobody_needs() -> None:
    found = readers()
    assert all(name in found and not asks_who(found[name]) for name in NOT_TOLD)


def test_a_method_that_forgets_to_ask_is_caught() -> None:
    class Forgetful:
        async def get(self, key_id: str) -> ApiKey:
            raise NotFound("nothing")

        async def list(self, *, access: Access | None = None) -> list[ApiKey]:
            raise NotFound("nothing")

        def count(self) -> int:
            raise NotFound("nothing")

    caught = [name for name, function in methods(Forgetful) if returns_a_row(function) and not asks_who(function)]
    assert caught == ["Forgetful.get", "Forgetful.list"]


def test_a_row_is_there_for_those_who_may_see_it_and_for_nobody_else(cast: Cast) -> None:
    key = cast.bob.key
    viewer = Access(role=Role.MEMBER, actor=SYSTEM, tenants={key.tenant_id: TenantRole.VIEWER})
    stranger = Access(role=Role.MEMBER, actor=SYSTEM, tenants={cast.charlie.tenant.id: TenantRole.MANAGER})

    assert viewer.row(key, Action.READ, what="key", param="key_id") is key
    with pytest.raises(RoleNotAllowed):
        viewer.row(key, Action.KEYS, what="key", param="key_id")
    said = []
    for found in (key, None):
        with pytest.raises(NotFound) as refused:
            stranger.row(found, Action.READ, what="key", param="key_id")
        said.append((refused.value.message, refused.value.param))
    assert said[0] == said[1], "a row that may not be seen is told of like one that is not there"
