"""Each store checks its caller's access itself, so that a route without a check could not show or change anything."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from appliance.base.db import Database
from appliance.base.errors import NotFound, RoleNotAllowed
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invoicing.free_allowances import FreeAllowances
from appliance.tenancy.access import Access
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.keys import Keys
from appliance.tenancy.members import Members
from appliance.tenancy.memberships import Memberships
from appliance.tenancy.principals import KeyChanges, TenantChanges
from appliance.tenancy.roles import TenantRole
from appliance.tenancy.tenants import Tenants
from tests.support.cast import OWNER, PEPPER, Cast, member_of
from tests.support.clock import FakeClock
from tests.support.ledgers import euro_invoices

Call = Callable[[Access], Awaitable[Any]]
VIEWER, DEVELOPER, MANAGER = TenantRole.VIEWER, TenantRole.DEVELOPER, TenantRole.MANAGER


async def calls(database: Database, clock: FakeClock, cast: Cast) -> dict[str, tuple[TenantRole, Call]]:
    """Return what can be asked about Bob's tenant, each with the greatest role in it that does not suffice."""
    keys, tenants, people = (
        Keys(database, clock, PEPPER),
        Tenants(database, clock),
        Members(database, clock),
    )
    belongings, allowances = Memberships(database, clock), FreeAllowances(database, clock)
    invoices = euro_invoices(database, clock, BillingCalendar())
    bob, key, alice = cast.bob.tenant.id, cast.bob.key.id, cast.alice.id
    draft = (await invoices.draft(bob, "2026-10", access=OWNER)).head.id
    await belongings.add(bob, alice, "viewer", access=OWNER)
    return {
        "keys.create": (VIEWER, lambda access: keys.create(bob, name="x", access=access)),
        "keys.update": (VIEWER, lambda access: keys.update(key, KeyChanges(name="x"), access=access)),
        "keys.rotate": (VIEWER, lambda access: keys.rotate(key, access=access)),
        "keys.revoke": (VIEWER, lambda access: keys.revoke(key, access=access)),
        "tenants.update": (MANAGER, lambda access: tenants.update(bob, TenantChanges(weight=9), access=access)),
        "tenants.limit_model": (MANAGER, lambda access: tenants.limit_model(bob, "m", {"tokens_per_day": 1}, access=access)),
        "tenants.archive": (MANAGER, lambda access: tenants.archive(bob, access=access)),
        "memberships.add": (DEVELOPER, lambda access: belongings.add(bob, alice, "manager", access=access)),
        "memberships.invite": (DEVELOPER, lambda access: belongings.invite(people, bob, "x@y.org", "viewer", access=access)),
        "memberships.change": (DEVELOPER, lambda access: belongings.change(bob, alice, "manager", access=access)),
        "memberships.remove": (DEVELOPER, lambda access: belongings.remove(bob, alice, access=access)),
        "invoices.draft": (MANAGER, lambda access: invoices.draft(bob, "2026-11", access=access)),
        "invoices.close": (MANAGER, lambda access: invoices.close(draft, access=access)),
        "invoices.discard": (MANAGER, lambda access: invoices.discard(draft, access=access)),
        "invoices.head": (DEVELOPER, lambda access: invoices.head(draft, access=access)),
        "invoices.get": (DEVELOPER, lambda access: invoices.get(draft, access=access)),
        "invoices.events": (DEVELOPER, lambda access: invoices.events(draft, access=access)),
        "invoices.list_for_tenant": (DEVELOPER, lambda access: invoices.list_for_tenant(bob, access=access)),
        "allowances.set": (MANAGER, lambda access: allowances.set(bob, "2026-12", 5, access=access)),
        "allowances.list": (DEVELOPER, lambda access: allowances.list(bob, access=access)),
    }


async def test_stores_refuse_lesser_roles_and_find_nothing_for_strangers(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    store_calls = await calls(database, clock, cast)
    before = await AuditLog(database, clock).page(1, access=OWNER)
    stranger = member_of(cast.charlie.tenant.id, MANAGER)
    for name, (role, call) in store_calls.items():
        for access, refusal in ((member_of(cast.bob.tenant.id, role), RoleNotAllowed), (stranger, NotFound)):
            try:
                await call(access)
            except refusal:
                continue
            pytest.fail(f"{name} does not answer {access.tenants} with {refusal.__name__}")
    with pytest.raises(RoleNotAllowed):
        await Tenants(database, clock).create(name="new", access=stranger)
    assert await AuditLog(database, clock).page(1, access=OWNER) == before


async def test_stores_allow_the_required_role_what_they_refuse_to_lesser_ones(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    store_calls = await calls(database, clock, cast)
    next_role = {VIEWER: member_of(cast.bob.tenant.id, DEVELOPER), DEVELOPER: member_of(cast.bob.tenant.id, MANAGER)}
    for name in (
        "keys.create",
        "keys.update",
        "memberships.change",
        "memberships.remove",
        "invoices.list_for_tenant",
        "allowances.list",
    ):
        role, call = store_calls[name]
        await call(next_role[role])
