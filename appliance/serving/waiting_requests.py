"""A request that is not admitted yet: it waits for room in its limits, or it is being decided whether it must. It leaves no
record when it ends. Knows no engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable

from appliance.base.clock import Clock
from appliance.base.errors import ExpiredApiKey, GatehouseError
from appliance.metering.limits.limit_waits import LimitWait
from appliance.metering.limits.reservations import Reservation
from appliance.serving.expiry_timer import ExpiryTimer
from appliance.serving.live_requests import LiveRequest
from appliance.serving.prepared_requests import PreparedRequest
from appliance.tenancy.principals import Principal


class WaitingRequest:
    """A request between its arrival and its admission, served by the task that creates it. `prepared` has the principal as last
    read, `wait` is its wait for limits."""

    def __init__(self, prepared: PreparedRequest, clock: Clock) -> None:
        self.prepared = prepared
        self.wait = LimitWait()
        self._clock = clock
        self._task = asyncio.current_task()  # None once it no longer waits
        self._error: GatehouseError | None = None
        self._expiry = ExpiryTimer(clock, lambda: self.end(ExpiredApiKey("the API key has expired")))
        self._expiry.set(prepared.principal.key.expires_at)

    @property
    def live(self) -> LiveRequest:
        """Return its state at this moment."""
        live = self.prepared.live_request(admitted_at=None, monotonic_s=self._clock.monotonic_s(), wait=self.wait)
        if self._error is not None:
            live.finish("aborted", now=self._clock.now(), error=self._error.message)
        return live

    def set_principal(self, principal: Principal) -> None:
        """Set the current state of its tenant and key: it is admitted on their terms, and ends when the key expires."""
        if self._task is not None:
            self.prepared = dataclasses.replace(self.prepared, principal=principal)
            self._expiry.set(principal.key.expires_at)

    def end(self, error: GatehouseError) -> None:
        """End the request with `error`, which its client receives. Only the first call counts, and none after admission."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()

    async def until_admitted(self, admission: Awaitable[Reservation]) -> Reservation:
        """Return the result of `admission`, which reserves nothing if it is cancelled. Raises its error, or that of `end`."""
        task = self._task
        assert task is not None, "a request is admitted once, by the task that created it"
        try:
            return await admission
        except asyncio.CancelledError:
            if self._error is not None and task.uncancel() == 0:  # above 0: its client has disconnected as well
                raise self._error from None
            raise
        finally:
            self._task = None
            self._expiry.set(None)
