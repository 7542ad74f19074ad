"""The JSON of `/admin/v1/system` and of the events of `/admin/v1/events`."""

from __future__ import annotations

import msgspec

from appliance.api.shapes import Shape
from appliance.telemetry.readings import EngineReading, SystemSnapshot


class ProcessShape(Shape, kw_only=True):
    """A process of the appliance."""

    role: str
    pid: int | None
    model: str | None
    started_at: str | None
    restarts: int


class KvBlocksShape(msgspec.Struct, kw_only=True):
    """The blocks of an engine's KV cache."""

    total: int
    used: int
    cached: int
    free: int


class HostBlocksShape(msgspec.Struct, kw_only=True):
    """KV blocks in host memory, which hold blocks evicted from the device."""

    total: int
    used: int
    swapped_in_total: int
    swapped_out_total: int


class MemoryPartShape(Shape, kw_only=True):
    """The device memory of one part of an engine, predicted before loading and measured."""

    name: str
    predicted_bytes: int
    measured_bytes: int | None
    num_predicted: int | None
    num_measured: int | None


class TenantLoadShape(Shape, kw_only=True):
    """The load of a tenant with live requests. If a request generates several choices (`n`), each of them counts."""

    tenant_id: str
    name: str
    requests_running: int
    requests_waiting: int
    kv_blocks: int
    service_s: float


class EngineShape(Shape, kw_only=True):
    """An engine and its load. Totals count since the engine process started."""

    model: str
    state: str
    error: str | None
    load_fraction: float | None
    device: str | None
    device_name: str | None
    max_model_len: int | None
    default_max_tokens: int | None
    quantization: str | None
    requests_running: int
    requests_waiting: int
    requests_waiting_for_limits: int
    kv_blocks: KvBlocksShape
    host_kv_blocks: HostBlocksShape
    memory: list[MemoryPartShape]
    memory_note: str | None
    device_note: str | None
    preemptions_total: int
    draft_tokens_total: int
    accepted_draft_tokens_total: int
    fallback_steps_total: int
    fallback_reason: str | None
    plain_steps_total: dict[str, int]
    switched_off: list[str]
    tenants: list[TenantLoadShape]
    tokens_per_second: float
    step_ms: float
    ttft_p50_s: float | None
    ttft_p95_s: float | None


class GpuShape(Shape, kw_only=True):
    """A GPU as NVML reports it."""

    index: int
    name: str
    memory_total_bytes: int
    memory_used_bytes: int
    utilization: int | None
    power_w: float | None
    temperature_c: int | None


class HostShape(Shape, kw_only=True):
    """The host machine."""

    cpu_percent: float
    memory_total_bytes: int
    memory_used_bytes: int
    disk_free_bytes: int


class DatabaseShape(Shape, kw_only=True):
    """The database."""

    kind: str
    ok: bool


class SystemShape(Shape, kw_only=True):
    """The state of the whole appliance at one moment."""

    version: str
    at: str
    processes: list[ProcessShape]
    engine: list[EngineShape]
    gpus: list[GpuShape]
    gpu_error: str | None
    host: HostShape
    database: DatabaseShape


def system_shape(snapshot: SystemSnapshot, version: str) -> SystemShape:
    """Return `snapshot` as JSON."""
    return SystemShape.of(
        snapshot,
        version=version,
        processes=[ProcessShape.of(process) for process in snapshot.processes],
        engine=[_engine(engine) for engine in snapshot.engines],
        gpus=[GpuShape.of(gpu) for gpu in snapshot.gpus],
        host=HostShape.of(snapshot.host),
        database=DatabaseShape.of(snapshot.database),
    )


def _engine(engine: EngineReading) -> EngineShape:
    status, info = engine.status_or_zeros, engine.info
    return EngineShape.of(
        engine,
        device=info.device if info else None,
        device_name=info.device_name if info else None,
        max_model_len=info.max_model_len if info else None,
        quantization=info.quantization if info else None,
        requests_running=status.num_running,
        requests_waiting=status.num_waiting,
        kv_blocks=KvBlocksShape(
            total=status.kv_blocks_total,
            used=status.kv_blocks_used,
            cached=status.kv_blocks_cached,
            free=status.kv_blocks_free,
        ),
        host_kv_blocks=HostBlocksShape(
            total=status.host_blocks_total,
            used=status.host_blocks_used,
            swapped_in_total=status.swapped_in_blocks_total,
            swapped_out_total=status.swapped_out_blocks_total,
        ),
        memory=[MemoryPartShape.of(part) for part in info.memory] if info else [],
        memory_note=info.memory_note if info else None,
        device_note=info.device_note if info else None,
        preemptions_total=status.preemptions_total,
        draft_tokens_total=status.draft_tokens_total,
        accepted_draft_tokens_total=status.accepted_draft_tokens_total,
        fallback_steps_total=status.fallback_steps_total,
        fallback_reason=status.fallback_reason,
        plain_steps_total=status.plain_steps_total,
        switched_off=info.switched_off if info else [],
        tenants=[TenantLoadShape.of(tenant) for tenant in engine.tenants],
        step_ms=status.step_ms,
    )
