"""Ends running requests whose key or tenant may no longer ask: revoked, expired, suspended or archived. Applies the limits as
they are now to the others, and to those that wait for room. Knows no engine.

It looks whenever a change of keys or tenants is committed; an expiry that is known beforehand is a timer of the generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

import structlog

from appliance.base.background import Background
from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.metering.limits.admission import Admission
from appliance.serving.generation import Generation
from appliance.tenancy.key_status import end_cause, read_principals
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import Principal

RETRY_S = 0.5

log = structlog.get_logger()


class AccessWatch:
    """One task. `live` are the running generations, by request id; others wait in `admission`."""

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
        self._look = asyncio.Event()
        self._watching = Background("access watch", self._run)

    def start(self) -> None:
        """Begin to watch."""
        self._db.principals.listeners.append(self._look.set)
        self._watching.start()

    async def stop(self) -> None:
        """End."""
        if self._watching.started:
            self._db.principals.listeners.remove(self._look.set)
        await self._watching.stop()

    def began(self, generation: Generation, principal: Principal) -> None:
        """Watch a generation that has just begun. Look again if anything may have changed since `principal` was read."""
        generation.end_at(principal.key.expires_at)
        if principal.change_count != self._db.principals.value:
            self._look.set()

    async def _run(self) -> None:
        while True:
            await self._look.wait()
            self._look.clear()
            try:
                await self.check()
            except Exception:  # owned task: a database that is away for a moment must not let a revoked key go on for ever
                log.exception("keys of running requests could not be checked")
                await asyncio.sleep(RETRY_S)
                self._look.set()

    async def check(self) -> None:
        """Read the keys of all requests: end those that may not go on, and tell admission what the others may use."""
        running, waiting = list(self._live()), self._admission.waiting
        keys = {generation.live.key_id for generation in running} | {request.key_id for request in waiting}
        principals = await read_principals(self._db, keys)
        if keys:
            self._admission.reconfigure(principals, {policy.model: policy for policy in await self._policies.list()})
        now = self._clock.now()
        for generation in running:
            principal = principals.get(generation.live.key_id)
            why = end_cause(principal, now)
            if why is not None:
                generation.end_early(why)
            elif principal is not None:
                generation.end_at(principal.key.expires_at)
