"""Ends live requests whose key was revoked or has expired, or whose tenant was suspended or archived, and requests that wait
for admission also if the next request of their key would be refused. Applies changed limits to the others. Knows no engine.

Checks whenever a change of keys or tenants is committed. A known expiry time is a timer of the request instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import datetime

import structlog

from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.base.consecutive_failures import ConsecutiveFailures
from appliance.base.db import Database
from appliance.base.errors import GatehouseError
from appliance.metering.limits.admission import Admission
from appliance.serving.generation import Generation
from appliance.serving.waiting_requests import WaitingRequest
from appliance.tenancy.key_status import end_cause, read_principals
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import Principal, unknown_key

RETRY_S = 0.5

log = structlog.get_logger()


class AccessWatch:
    """`live` returns the live requests."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        live: Callable[[], Collection[WaitingRequest | Generation]],
        *,
        admission: Admission,
        policies: ModelPolicies,
    ) -> None:
        self._db = db
        self._clock = clock
        self._live = live
        self._admission = admission
        self._policies = policies
        self._check_due = asyncio.Event()
        self._watching = Background("access watch", self._run)

    def start(self) -> None:
        """Start the task."""
        self._db.principal_changes.listeners.append(self._check_due.set)
        self._watching.start()

    async def stop(self) -> None:
        """Stop the task."""
        if self._watching.started:
            self._db.principal_changes.listeners.remove(self._check_due.set)
        await self._watching.stop()

    def add(self, request: WaitingRequest | Generation, principal: Principal) -> None:
        """Watch a request that has just become live or was just admitted. Schedules a check if key or tenant has changed
        since `principal` was read."""
        _apply(request, principal)
        if not principal.is_current(self._db.principal_changes):
            self._check_due.set()

    async def _run(self) -> None:
        failures = ConsecutiveFailures()
        while True:
            await self._check_due.wait()
            self._check_due.clear()
            try:
                await self.check()
            except Exception:  # owned task: a short outage of the database must not let requests of a revoked key continue
                if number := failures.count():
                    log.exception("keys of running requests could not be checked", failures=number)
                await asyncio.sleep(RETRY_S)
                self._check_due.set()
            else:
                if number := failures.end():
                    log.warning("works again", after="keys of running requests could not be checked", failures=number)

    async def check(self) -> None:
        """Read the keys of all requests; end those that are no longer allowed and pass the others' limits to admission."""
        live = list(self._live())
        principals = await read_principals(self._db, {request.live.key_id for request in live})
        policies = {policy.model: policy for policy in await self._policies.list()} if live else {}
        now = self._clock.now()
        for request in live:
            principal = principals.get(request.live.key_id)
            if principal is not None:
                _apply(request, principal)
            if isinstance(request, WaitingRequest):
                error = _refusal(principal, request.prepared.model.name, now)
                if error is not None:
                    request.end(error)
            elif (reason := end_cause(principal, now)) is not None:
                request.end_early(reason)
        self._admission.reconfigure(principals, policies)


def _apply(request: WaitingRequest | Generation, principal: Principal) -> None:
    """Apply the current state of its tenant and key to a request: a generation keeps the terms of its admission."""
    if isinstance(request, WaitingRequest):
        request.set_principal(principal)
    else:
        request.set_expiry(principal.key.expires_at)


def _refusal(principal: Principal | None, model: str, now: datetime) -> GatehouseError | None:
    """Return the error that the next request of a key would get before it is admitted; None if it would be admitted. A missing
    key counts as revoked."""
    try:
        if principal is None:
            raise unknown_key()
        principal.check_inference(now, model)
    except GatehouseError as error:
        return error
    return None
