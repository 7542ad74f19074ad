"""Ends running requests whose key was revoked or has expired, or whose tenant was suspended or archived. Applies changed limits
to the other running requests and to those that wait for admission. Knows no engine.

Checks whenever a change of keys or tenants is committed. A known expiry time is a timer of the generation instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.base.consecutive_failures import ConsecutiveFailures
from appliance.base.db import Database
from appliance.metering.limits.admission import Admission
from appliance.serving.generation import Generation
from appliance.tenancy.key_status import end_cause, read_principals
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import Principal

RETRY_S = 0.5

log = structlog.get_logger()


class AccessWatch:
    """`live` returns the running generations; further requests wait in `admission`."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        live: Callable[[], Collection[Generation]],
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

    def add(self, generation: Generation, principal: Principal) -> None:
        """Watch a generation that has just started. Schedules a check if keys or tenants changed since `principal` was read."""
        generation.set_expiry(principal.key.expires_at)
        if principal.change_count != self._db.principal_changes.value:
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
        running, waiting = list(self._live()), self._admission.waiting
        keys = {generation.live.key_id for generation in running} | {waiter.request.key_id for waiter in waiting}
        principals = await read_principals(self._db, keys)
        if keys:
            self._admission.reconfigure(principals, {policy.model: policy for policy in await self._policies.list()})
        now = self._clock.now()
        for generation in running:
            principal = principals.get(generation.live.key_id)
            reason = end_cause(principal, now)
            if reason is not None:
                generation.end_early(reason)
            elif principal is not None:
                generation.set_expiry(principal.key.expires_at)
