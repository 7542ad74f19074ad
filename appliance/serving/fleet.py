"""Makes the served models out of the settings: one folder, one tokenizer, one supervised engine process each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from appliance.base.clock import Clock
from appliance.base.settings import Settings
from appliance.serving.model_folder import ModelFolder
from appliance.serving.model_registry import ModelRegistry, ServedModel
from appliance.serving.prompting import Prompting
from appliance.serving.supervisor import Supervisor
from appliance.telemetry.metrics import Metrics
from appliance.telemetry.readings import EngineReading, TenantReading
from engine.protocol import EngineFrame, TenantProgress

DEMO_MODEL = Path(__file__).resolve().parents[2] / "engine" / "demo" / "gatehouse-demo"
MS_PER_S = 1000


def model_folders(settings: Settings) -> list[ModelFolder]:
    """Return the folders that the settings name, checked. Raises NotAModel."""
    paths = [Path(model) for model in settings.models] or [DEMO_MODEL]
    return [ModelFolder.check(path) for path in paths]


def build_models(
    settings: Settings, *, clock: Clock, metrics: Metrics, on_frame: Callable[[EngineFrame], None]
) -> ModelRegistry:
    """Return the registry, with engines that are not started yet. Raises NotAModel."""
    created = clock.now()
    return ModelRegistry(
        _serve(folder, settings, clock=clock, metrics=metrics, on_frame=on_frame, created=created)
        for folder in model_folders(settings)
    )


def engine_reading(model: ServedModel, clock: Clock, tenant_names: Mapping[str, str]) -> EngineReading:
    """Return what the live pages show of a model's engine. `tenant_names` are those with live requests."""
    client = model.client
    return EngineReading(
        model=model.name,
        state=client.state,
        error=client.error,
        load_fraction=client.load_fraction,
        info=client.info,
        status=client.status,
        pid=client.pid,
        started_at=client.started_at,
        restarts=client.restarts,
        tokens_per_second=client.figures.tokens_per_second(clock.monotonic_s()),
        probe_prompt_tokens=client.figures.probe_prompt_tokens,
        ttft_p50_s=client.figures.ttft_quantile_s(0.5),
        ttft_p95_s=client.figures.ttft_quantile_s(0.95),
        tenants=tenant_readings(client.figures.tenants if client.state == "ready" else [], tenant_names),
    )


def tenant_readings(tenants: Sequence[TenantProgress], names: Mapping[str, str]) -> list[TenantReading]:
    """Return who holds and waits for what. Without a name: our own probe, or one whose last request was settled just now."""
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


def engine_command(folder: ModelFolder, settings: Settings, fd: int) -> list[str]:
    """Return the command line of an engine process that speaks on the inherited socket `fd`."""
    options = {"model": str(folder.path), "name": folder.name, **settings.engine_options()}
    return [sys.executable, "-m", "engine.main", "--fd", str(fd), "--options", json.dumps(options)]


def _serve(
    folder: ModelFolder,
    settings: Settings,
    *,
    clock: Clock,
    metrics: Metrics,
    on_frame: Callable[[EngineFrame], None],
    created: datetime,
) -> ServedModel:
    metrics.add_model(folder.name)
    supervisor = Supervisor(
        name=folder.name,
        command=lambda fd: engine_command(folder, settings, fd),
        clock=clock,
        on_frame=_observed(on_frame, metrics, folder.name),
        on_restart=lambda: metrics.engine_restarted(folder.name),
        switched_off=settings.switched_off,
    )
    return ServedModel(
        name=folder.name,
        path=folder.path,
        client=supervisor,
        prompting=Prompting.load(folder.path),
        context_len=folder.context_len,
        sampling_defaults=folder.sampling_defaults,
        created=created,
    )


def _observed(on_frame: Callable[[EngineFrame], None], metrics: Metrics, model: str) -> Callable[[EngineFrame], None]:
    """Return `on_frame` that also counts each engine step once; idle status frames repeat the last step."""
    last_step = 0

    def observe(frame: EngineFrame) -> None:
        nonlocal last_step
        if frame.status is not None and frame.status.steps_total != last_step:
            last_step = frame.status.steps_total
            metrics.engine_step(model, frame.status.step_ms / MS_PER_S)
        on_frame(frame)

    return observe
