"""Ends live requests whose key was revoked or has expired, or whose tenant was suspended or archived, and requests that wait
for admission also if the next request of their key would be refused. Applies changed limits to the others. Knows no engine.

Checks whenever a change of keys or tenants is committed. A known expiry time is a timer of the request instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from datetime import datetime
from functools import partial

import structlog

from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.base.consecutive_failures import ConsecutiveFailures
from appliance.base.db import Database
from appliance.base.errors import GatehouseError
from appliance.base.shared_reads import SharedReads
from appliance.metering.limits.admission import Admission
from appliance.serving.generation import Generation
from appliance.serving.prepared_requests import PreparedRequest
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
        self._reads: SharedReads[tuple[str, int], dict[str, Principal]] = SharedReads()
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

    async def refresh(self, request: WaitingRequest) -> None:
        """Read the key of a waiting request until nothing has changed since: `check` may not have come to a change yet.

        Raises the error that the next request of the key would get.
        """
        changes = self._db.principal_changes
        while not request.prepared.principal.is_current(changes):
            key_id = request.prepared.principal.key.id
            principals = await self._reads.get((key_id, changes.value), partial(read_principals, self._db, {key_id}))
            request.set_principal(_checked(principals.get(key_id), request.prepared, self._clock.now()))

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
            if isinstance(request, WaitingRequest):
                try:
                    request.set_principal(_checked(principal, request.prepared, now))
                except GatehouseError as error:
                    request.end(error)
            elif (reason := end_cause(principal, now)) is not None:
                request.end_early(reason)
            else:
                assert principal is not None, "a missing key is a cause to end"
                request.set_expiry(principal.key.expires_at)  # a generation keeps the other terms of its admission
        self._admission.reconfigure(principals, policies)


def _checked(principal: Principal | None, prepared: PreparedRequest, now: datetime) -> Principal:
    """Return the principal. Raises the error that this request would get if it arrived now. A missing key counts as revoked."""
    if principal is None:
        raise unknown_key()
    principal.check_inference(now, prepared.model.name, address=prepared.address)
    return principal
