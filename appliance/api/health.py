"""Health for load balancers and people: does the process answer, and would a request be answered; and the metrics."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Request, Response, get

from appliance.api.services_of import services_of
from appliance.serving.services import Services

METRICS_MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class LiveShape(msgspec.Struct, kw_only=True):
    """The process answers."""

    status: str
    version: str


class HealthShape(msgspec.Struct, kw_only=True):
    """`parts` names each part with `ok` or why it is not ready."""

    status: str
    version: str
    parts: dict[str, str]


@get("/health/live", summary="Is the process alive", tags=["health"])
async def live(request: Request[Any, Any, Any]) -> LiveShape:
    """Answer as long as the process does."""
    return LiveShape(status="ok", version=services_of(request).version)


@get(["/health/ready", "/health"], summary="Would a request be answered", tags=["health"])
async def ready(request: Request[Any, Any, Any]) -> Response[HealthShape]:
    """Answer 200 when every part is ready, else 503 naming those that are not."""
    services = services_of(request)
    parts = await _parts(services)
    is_ready = all(state == "ok" for state in parts.values())
    body = HealthShape(status="ok" if is_ready else "not ready", version=services.version, parts=parts)
    return Response(body, status_code=200 if is_ready else 503, headers={} if is_ready else {"retry-after": "1"})


@get("/metrics", summary="Metrics in Prometheus' text format", tags=["health"])
async def metrics(request: Request[Any, Any, Any]) -> Response[bytes]:
    """Return every metric of the appliance."""
    return Response(services_of(request).metrics.render(), media_type=METRICS_MEDIA_TYPE)


async def _parts(services: Services) -> dict[str, str]:
    parts = {
        "gateway": "draining" if services.generations.draining else "ok",
        "database": await services.database_watch.problem() or "ok",
        "ledger": "ok" if services.ledger.healthy else f"cannot be written: {services.ledger.last_error}",
    }
    for model in services.models.list():
        parts[f"engine {model.name}"] = services.readiness.problem(model) or "ok"
    return parts
