"""Readings for the live pages: the state of an engine and of the tenants that it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from appliance.base.clock import Clock
from appliance.serving.model_registry import ServedModel
from appliance.serving.readiness import Readiness
from appliance.telemetry.readings import EngineReading, TenantReading
from engine.protocol import TenantProgress


def engine_reading(
    model: ServedModel, clock: Clock, readiness: Readiness, *, tenant_names: Mapping[str, str], waiting_for_limits: int
) -> EngineReading:
    """Return the reading of a model's engine. `tenant_names`: id to name, of tenants with admitted requests.
    `waiting_for_limits`: how many requests for the model are not admitted yet."""
    engine = model.engine
    return EngineReading(
        model=model.name,
        state=engine.state,
        error=engine.error,
        problem=readiness.problem(model),
        load_fraction=engine.load_fraction,
        info=engine.info,
        default_max_tokens=model.default_max_tokens,
        status=engine.status,
        pid=engine.pid,
        started_at=engine.started_at,
        restarts=engine.restarts,
        tokens_per_second=engine.stats.tokens_per_second(clock.monotonic_s()),
        probe_prompt_tokens=engine.stats.probe_prompt_tokens,
        ttft_p50_s=engine.stats.ttft_quantile_s(0.5),
        ttft_p95_s=engine.stats.ttft_quantile_s(0.95),
        requests_waiting_for_limits=waiting_for_limits,
        tenants=tenant_readings(engine.stats.tenants if engine.state == "ready" else [], tenant_names),
    )


def tenant_readings(tenants: Sequence[TenantProgress], names: Mapping[str, str]) -> list[TenantReading]:
    """Return what each tenant has running and waiting, most KV blocks first. Tenants without a name are left out: they are the
    readiness probe, or their last request was settled just now."""
    readings = [
        TenantReading(
            tenant_id=tenant.tenant_id,
            name=names[tenant.tenant_id],
            requests_running=tenant.num_running,
            requests_waiting=tenant.num_waiting,
            kv_blocks=tenant.kv_blocks,
            service_s=tenant.service_s,
        )
        for tenant in tenants
        if tenant.tenant_id in names
    ]
    return sorted(readings, key=lambda reading: (-reading.kv_blocks, -reading.requests_waiting, reading.name))
