"""The gateway of `bench.admission`: the appliance unchanged, plus a path that skips key, limits and pending event.

python -m bench.admission_gateway FOLDER ANSWER_S [PROFILE]      serves a gateway and prints its port
python -m bench.admission_gateway --fd N ANSWER_S                runs its engine
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from appliance.api import chat
from appliance.api.auth import authenticate_tenant
from appliance.base.clock import SystemClock
from appliance.metering.limits.admission_request import AdmissionRequest
from appliance.metering.limits.limit_waits import LimitWait
from appliance.serving.generation import Generation
from appliance.serving.generations import Generations
from appliance.serving.prepared_requests import PreparedRequest
from appliance.tenancy.principals import ApiKey, Limits, Principal, Tenant
from bench.admission import PLAIN
from bench.gateway_streams import serve_engine, serve_gateway
from engine.protocol import EngineFrame, FinishReason, GatewayFrame, GenerationRequest, TokenEvent
from tests.support.fake_engine import FakeEngine, make_event

STATUS_S = 0.5


class DelayedEngine(FakeEngine):
    """Sends all tokens of a request at once, `step_s` ± 50 % after its arrival: equal delays would synchronise the clients, and
    the bench would measure bursts."""

    _rng = random.Random(0)

    def _receive(self, frame: GatewayFrame) -> None:
        loop = asyncio.get_running_loop()
        for request in frame.submit:
            loop.call_later(self._step_s * self._rng.uniform(0.5, 1.5), self._answer, [request])
        if frame.shutdown:
            self._writer.close()

    def _answer(self, requests: list[GenerationRequest]) -> None:
        self.send(EngineFrame(events=[_final(request) for request in requests]))

    async def _step_forever(self) -> None:
        while True:
            self.send(EngineFrame(status=self._status()))
            await asyncio.sleep(STATUS_S)


def _final(request: GenerationRequest) -> TokenEvent:
    count = request.sampling.max_tokens or 1
    prompt = request.prompt_token_ids
    token_ids = [prompt[index % len(prompt)] for index in range(count)]
    return make_event(request, token_ids, count, finish_reason=FinishReason.LENGTH)


class NoReservation:
    """A reservation that reserves nothing."""

    reserved_tokens = 0
    basis_points = 10_000
    shadow_refusals: tuple[()] = ()

    def __init__(self, request: AdmissionRequest) -> None:
        self.request = request
        self.admitted_at = SystemClock().now()

    def settle(self, tokens_used: int, **_options: Any) -> None:
        """Do nothing."""

    def void(self) -> None:
        """Do nothing."""

    def record_progress(self, *_counts: int) -> None:
        """Do nothing."""

    def mark_recorded(self) -> None:
        """Do nothing."""


class NoAdmission:
    """Admits every request."""

    async def admit(self, request: AdmissionRequest, _wait_s: float, _wait: LimitWait) -> NoReservation:
        """Return a reservation that reserves nothing."""
        return NoReservation(request)

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_options: None


class NoWatch:
    """Watches no principal: the plain path's principal is in no table."""

    async def refresh(self, _request: Any) -> None:
        """Do nothing."""


class NoLedger:
    """A ledger that writes nothing."""

    healthy = True

    async def open(self, _entry: Any) -> None:
        """Do nothing."""

    async def settle(self, _settlement: Any, _on_recorded: Any) -> None:
        """Do nothing."""

    def checkpoint(self, _rows: Any) -> None:
        """Do nothing."""


def install_plain_path(generations: Generations) -> None:
    """Serve requests with the key PLAIN through the same handlers, without admission."""
    now = datetime.now(UTC)
    common: dict[str, Any] = {"allowed_models": None, "limits": Limits(), "created_at": now}
    tenant = Tenant(id="plain", name="plain", tier="standard", weight=1, suspended=False, archived=False, **common)
    key = ApiKey(
        id="plain", tenant_id="plain", name="plain", prefix="gh_plainplai", scopes=("inference",), allowed_networks=None,
        expires_at=None, revoked_at=None, last_used_at=None, **common,
    )  # fmt: skip
    principal = Principal(tenant=tenant, key=key)
    plain_generations = Generations.__new__(Generations)
    plain_generations.__dict__.update(generations.__dict__)
    plain_generations.__dict__.update(_admission=NoAdmission(), _ledger=NoLedger(), _watch=NoWatch(), _requests={})
    authenticate, start = authenticate_tenant, Generations.start

    async def authenticate_unless_plain(request: Any) -> Principal:
        if request.headers.get("authorization", "").endswith(PLAIN):
            return principal
        return await authenticate(request)

    async def start_either_way(self: Generations, prepared: PreparedRequest, *args: Any, **options: Any) -> Generation:
        return await start(plain_generations if prepared.principal is principal else self, prepared, *args, **options)

    chat.authenticate_tenant = authenticate_unless_plain  # type: ignore[attr-defined]
    Generations.start = start_either_way  # type: ignore[method-assign]


def main() -> None:
    """Run the gateway or its engine."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if sys.argv[1] == "--fd":
        serve_engine(DelayedEngine, int(sys.argv[2]), float(sys.argv[3]))
        return
    os.environ.pop("GATEHOUSE_DATABASE_URL", None)
    folder, answer_s, profile = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None
    serve_gateway(
        folder,
        lambda fd: [sys.executable, "-m", "bench.admission_gateway", "--fd", str(fd), answer_s],
        profile,
        on_start=lambda started: install_plain_path(started.services.generations),
    )


if __name__ == "__main__":
    main()
