"""The people of every test: Alice owns the appliance, Bob belongs to a tenant, Charlie is a stranger with his own tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from argon2 import PasswordHasher

from appliance.base.acting import SYSTEM
from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.metering.ledger.epochs import begin_epoch
from appliance.tenancy.access import WHOLE_APPLIANCE, Access
from appliance.tenancy.keys import Keys
from appliance.tenancy.members import Member, Members
from appliance.tenancy.principals import ApiKey, Limits, Principal, Tenant, TenantChanges
from appliance.tenancy.roles import Role, TenantRole
from appliance.tenancy.tenants import Tenants

PEPPER = b"p" * 32
ALICE_PASSWORD = "alice's long password"
UNLIMITED = Limits()
OWNER = WHOLE_APPLIANCE
"""What an owner of the appliance may see and do."""


def quick_hasher(*, parallelism: int) -> PasswordHasher:
    """Return argon2 at its lowest cost: tests check what is hashed, not how slowly."""
    return PasswordHasher(time_cost=1, memory_cost=8, parallelism=parallelism)


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A tenant with one key."""

    tenant: Tenant
    key: ApiKey
    secret: str

    @property
    def principal(self) -> Principal:
        """Return tenant and key as authentication returns them."""
        return Principal(tenant=self.tenant, key=self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Alice's login, Bob's and Charlie's tenants, and the ledger epoch of the test."""

    alice: Member
    bob: Person
    charlie: Person
    epoch_id: str


def member_of(tenant_id: str, role: TenantRole) -> Access:
    """What a member of this tenant alone may see and do."""
    return Access(role=Role.MEMBER, actor=SYSTEM, tenants={tenant_id: role})


async def make_person(database: Database, clock: Clock, name: str, limits: Limits = UNLIMITED) -> Person:
    """Create a tenant `name` with one key."""
    tenant = await Tenants(database, clock).create(name, TenantChanges(limits=limits), access=OWNER)
    key, secret = await Keys(database, clock, PEPPER).create(tenant.id, name=f"{name}'s key", access=OWNER)
    return Person(tenant=tenant, key=key, secret=secret)


async def change_tenant(tenants: Tenants, person: Person, **changes: Any) -> Tenant:
    """Change these fields of a person's tenant, and return it."""
    return await tenants.update(person.tenant.id, TenantChanges(**changes), access=OWNER)


async def make_cast(database: Database, clock: Clock) -> Cast:
    """Create the cast in `database`."""
    members = Members(database, clock)
    return Cast(
        alice=await members.create("alice@example.com", ALICE_PASSWORD, "owner"),
        bob=await make_person(database, clock, "bob"),
        charlie=await make_person(database, clock, "charlie"),
        epoch_id=await begin_epoch(database, clock, "test"),
    )
