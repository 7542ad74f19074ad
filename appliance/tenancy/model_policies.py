"""Limits of a model for all tenants together. A model without a row has none."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import RowMapping, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.clock import Clock
from appliance.base.db import Database, upsert_for
from appliance.base.errors import InvalidValue, NotFound
from appliance.base.tables import model_policies
from appliance.tenancy import audit
from appliance.tenancy.cached_table import CachedTable
from appliance.tenancy.fields import LIMIT_MODES, check_choice, check_name
from appliance.tenancy.principals import Limits
from appliance.tenancy.rows import limits_from_row, limits_to_row

MODELS_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPolicy:
    """The limits of a model for all tenants together. `limit_mode` as for a tenant."""

    model: str
    limits: Limits
    limit_mode: str
    updated_at: datetime


class ModelPolicies:
    """The store of model policies, cached in memory. A change by this process applies from the next request on."""

    def __init__(self, db: Database, clock: Clock) -> None:
        self._db = db
        self._clock = clock
        self._by_model = CachedTable(db, model_policies, self._read)

    async def list(self) -> list[ModelPolicy]:
        """Return the policies, sorted by model."""
        return list((await self._by_model.get()).values())

    async def find(self, model: str) -> ModelPolicy | None:
        """Return the policy of a model, or None. Reads the database only after a change."""
        return (await self._by_model.get()).get(model)

    async def put(self, model: str, limits: Limits, limit_mode: str = "enforce") -> ModelPolicy:
        """Create or replace the policy of a model and return it. Raises InvalidValue."""
        after = ModelPolicy(
            model=check_name(model, "model"),
            limits=limits,
            limit_mode=check_choice(limit_mode, "limit_mode", LIMIT_MODES),
            updated_at=self._clock.now(),
        )
        async with self._db.changing_principals(model_policies.name) as connection:
            before = await _get(connection, after.model)
            await _write(connection, after, exists=before is not None)
            await self._record(connection, "model_policy.put", before, after)
        return after

    async def remove(self, model: str) -> ModelPolicy:
        """Remove the model's policy and return it. Raises NotFound."""
        async with self._db.changing_principals(model_policies.name) as connection:
            before = await _get(connection, model)
            if before is None:
                raise NotFound("this model has no limits", param="model")
            await connection.execute(delete(model_policies).where(model_policies.c.model == model))
            await self._record(connection, "model_policy.remove", before, None)
        return before

    async def _record(
        self, connection: AsyncConnection, action: str, before: ModelPolicy | None, after: ModelPolicy | None
    ) -> None:
        policy = after or before
        assert policy is not None
        was, now = (audit.recorded_fields(state, "model", "updated_at") for state in (before, after))
        await audit.record(connection, self._clock, action, "model_policy", policy.model, before=was, after=now)

    async def _read(self) -> dict[str, ModelPolicy]:
        async with self._db.reading() as connection:
            rows = (await connection.execute(select(model_policies).order_by(model_policies.c.model))).mappings().all()
        return {row["model"]: _from_row(row) for row in rows}


def _from_row(row: RowMapping) -> ModelPolicy:
    return ModelPolicy(
        model=row["model"], limits=limits_from_row(row), limit_mode=row["limit_mode"], updated_at=row["updated_at"]
    )


async def _get(connection: AsyncConnection, model: str) -> ModelPolicy | None:
    row = (await connection.execute(select(model_policies).where(model_policies.c.model == model))).mappings().first()
    return None if row is None else _from_row(row)


async def _write(connection: AsyncConnection, policy: ModelPolicy, *, exists: bool) -> None:
    values = {"limit_mode": policy.limit_mode, "updated_at": policy.updated_at, **limits_to_row(policy.limits)}
    if not exists and (await connection.execute(select(func.count()).select_from(model_policies))).scalar_one() >= MODELS_MAX:
        raise InvalidValue(f"at most {MODELS_MAX} models have limits of their own", param="model")
    statement = upsert_for(connection.dialect.name, model_policies, ["model"], list(values))
    await connection.execute(statement.values(model=policy.model, **values))
