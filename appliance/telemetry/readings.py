"""Readings at one moment: engines, processes, database, and the snapshot of everything for the live pages. Plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from datetime import datetime

from appliance.telemetry.gpu import GpuReading
from appliance.telemetry.host import HostReading
from engine.protocol import EngineInfo, EngineStatus

NO_STATUS = EngineStatus(
    num_running=0,
    num_waiting=0,
    kv_blocks_total=0,
    kv_blocks_used=0,
    kv_blocks_cached=0,
    kv_blocks_free=0,
    step_ms=0.0,
    num_batched_tokens=0,
    steps_total=0,
    prompt_tokens_total=0,
    generation_tokens_total=0,
    prefix_cache_hit_tokens_total=0,
    preemptions_total=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantReading:
    """A tenant's share of an engine and its waiting requests. A request with several answers counts once per answer.
    `service_s` is the predicted device time spent on the tenant since it last had no request."""

    tenant_id: str
    name: str
    requests_running: int
    requests_waiting: int
    kv_blocks: int
    service_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReading:
    """One served model at one moment. `requests_waiting_for_limits` are not admitted yet and not among the waiting ones of
    `status`. `problem`: why `/health/ready` does not call it ready, None if it does.
    `tokens_per_second` is the recent generation rate, excluding probes; `probe_prompt_tokens` is the total sent by probes.
    `tenants` are those with live requests, by KV blocks held, largest first. `default_max_tokens` is the operator's setting for
    the model, None if there is none."""

    model: str
    state: str
    error: str | None
    problem: str | None
    load_fraction: float | None
    info: EngineInfo | None
    default_max_tokens: int | None
    status: EngineStatus | None
    pid: int | None
    started_at: datetime | None
    restarts: int
    tokens_per_second: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    requests_waiting_for_limits: int = 0
    probe_prompt_tokens: int = 0
    tenants: list[TenantReading] = field(default_factory=list)

    @property
    def status_or_zeros(self) -> EngineStatus:
        """Return the engine's status, all zeros before it has sent one."""
        return NO_STATUS if self.status is None else self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseReading:
    """The kind of database, and whether its last test write succeeded."""

    kind: str
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    """One process of the appliance. `role` is `gateway` or `engine`; only an engine has a model."""

    role: str
    pid: int | None
    model: str | None
    started_at: datetime | None
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSnapshot:
    """Everything that the live pages show, read at one moment. `requests_waiting` wait for a seat in an engine's batch."""

    at: datetime
    engines: list[EngineReading]
    gpus: list[GpuReading]
    gpu_error: str | None
    host: HostReading
    database: DatabaseReading
    processes: list[ProcessReading]
    requests_running: int
    requests_waiting: int
    requests_waiting_for_limits: int
    tokens_per_second: float

    @property
    def gpu_power_w(self) -> list[int]:
        """Return the power draw in watts, rounded up, of each GPU that reports it."""
        return [math.ceil(gpu.power_w) for gpu in self.gpus if gpu.power_w is not None]
