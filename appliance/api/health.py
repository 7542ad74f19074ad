"""Liveness, readiness and metrics, for load balancers, monitoring and people."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get

from appliance.api.auth import authenticate_administrator, is_from_this_machine
from appliance.api.connection_services import services_of
from appliance.serving.services import Services
from appliance.tenancy.roles import Action
from engine.protocol import EngineInfo

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4"  # the framework adds the charset


class LiveShape(msgspec.Struct, kw_only=True):
    """The response of a live process."""

    status: str
    version: str


class HealthShape(msgspec.Struct, kw_only=True):
    """The readiness of the appliance and of each of its parts."""

    status: str
    version: str
    parts: dict[str, str]
    notes: dict[str, str]


@get("/health/live", summary="Check that the process is alive")
async def check_live(request: Request[Any, Any, Any]) -> LiveShape:
    """Return 200 as long as the process runs, even while models load."""
    return LiveShape(status="ok", version=services_of(request).version)


@get(
    ["/health/ready", "/health"],
    summary="Check that requests can be served",
    opt={"errors": (503,), "error_body": HealthShape},
)
async def check_ready(request: Request[Any, Any, Any]) -> Response[HealthShape]:
    """Return 200 if every part is ready, else 503 with the reason for each part that is not."""
    services = services_of(request)
    parts = await _parts(services)
    is_ready = all(state == "ok" for state in parts.values())
    body = HealthShape(status="ok" if is_ready else "not ready", version=services.version, parts=parts, notes=_notes(services))
    return Response(body, status_code=200 if is_ready else 503, headers={} if is_ready else {"retry-after": "1"})


@get(
    "/metrics",
    summary="Read the metrics",
    opt={"text": "text/plain", "security": (None, "administrator"), "errors": (401, 403)},
)
async def read_metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return all metrics in the Prometheus text format. Callers on other machines need an administrator token."""
    if not is_from_this_machine(request):
        await authenticate_administrator(request, Action.READ_APPLIANCE)
    return Response(await services_of(request).metrics.render(), media_type=METRICS_MEDIA_TYPE)


async def _parts(services: Services) -> dict[str, str]:
    """Return `ok` or a short reason for each part. Anyone may read this, so paths and error details stay in the log."""
    parts = {
        "gateway": "draining" if services.generations.draining else "ok",
        "database": "ok" if await services.database_watch.problem() is None else "takes no writes",
        "ledger": "ok" if services.ledger.healthy else "cannot be written",
    }
    for model in services.models.list():
        parts[f"engine {model.name}"] = services.readiness.problem(model) or "ok"
    return parts


def _notes(services: Services) -> dict[str, str]:
    """Return what slows a ready part down. Its reason stays in the console and the log."""
    engines = {model.name: model.engine.info for model in services.models.list()}
    return {f"engine {name}": note for name, info in engines.items() if info is not None and (note := _engine_note(info))}


def _engine_note(info: EngineInfo) -> str | None:
    if info.device_note is not None:
        return "serves on the CPU, because the GPU cannot be used"
    if info.refused_kernels:
        return "serves by older kernels, because newer ones were refused"
    return None
