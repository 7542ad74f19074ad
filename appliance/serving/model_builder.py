"""Builds the served models from the settings: each has a folder, a tokenizer and a supervised engine process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from appliance.base.clock import Clock
from appliance.base.settings import Settings
from appliance.serving.model_folder import ModelFolder
from appliance.serving.model_registry import ModelRegistry, ServedModel
from appliance.serving.supervisor import Supervisor
from appliance.serving.tokenizer import ModelTokenizer
from appliance.telemetry.metrics import Metrics
from engine.protocol import EngineFrame

DEMO_MODEL = Path(__file__).resolve().parents[2] / "engine" / "demo" / "gatehouse-demo"
MS_PER_S = 1000


def model_folders(settings: Settings) -> list[ModelFolder]:
    """Return the checked model folders of the settings, or that of the demo model if there are none. Raises NotAModel."""
    return [ModelFolder.check(model.path) for model in settings.models] or [ModelFolder.check(DEMO_MODEL)]


def build_models(
    settings: Settings, *, clock: Clock, metrics: Metrics, on_frame: Callable[[EngineFrame], None]
) -> ModelRegistry:
    """Return the registry of models; their engines are not started yet. Raises NotAModel."""
    created = clock.now()
    return ModelRegistry(
        _serve(folder, settings, clock=clock, metrics=metrics, on_frame=on_frame, created=created)
        for folder in model_folders(settings)
    )


def engine_command(folder: ModelFolder, settings: Settings, fd: int, *, on_gpu: bool = False) -> list[str]:
    """Return the command line of an engine process that uses the inherited socket `fd`. All engines share the GPU, if there is
    one: each is told of the others, so that it leaves them memory. `on_gpu`: the engine has served on a GPU; without one it
    must fail to start, instead of going on many times slower."""
    others = [
        {"model": str(model.path), **_without_prefixes(settings.for_model(model).engine_options())}
        for model in settings.models
        if model.path != folder.path
    ]
    own = _own_settings(folder, settings).engine_options()
    options = {"model": str(folder.path), "name": folder.name, **own, "colocated_models": others}
    if on_gpu:
        options["device"] = "cuda"
    return [sys.executable, "-m", "engine.main", "--fd", str(fd), "--options", json.dumps(options)]


def _own_settings(folder: ModelFolder, settings: Settings) -> Settings:
    """Return the settings with the model's overrides, if it has any."""
    return next((settings.for_model(model) for model in settings.models if model.path == folder.path), settings)


def _without_prefixes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the paths of shared prefixes: repeated, they could exceed the length of an argument, and they use no GPU memory
    of the other engines."""
    return {name: value for name, value in options.items() if name != "shared_prefixes"}


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
        command=lambda fd: engine_command(folder, settings, fd, on_gpu=supervisor.has_served_on_gpu),
        clock=clock,
        on_frame=_with_step_metrics(on_frame, metrics, folder.name),
        on_restart=lambda: metrics.engine_restarted(folder.name),
        switched_off=settings.switched_off,
    )
    return ServedModel(
        name=folder.name,
        path=folder.path,
        engine=supervisor,
        tokenizer=ModelTokenizer.load(folder.path),
        context_len=folder.context_len,
        sampling_defaults=folder.sampling_defaults,
        default_max_tokens=_own_settings(folder, settings).default_max_tokens,
        created=created,
    )


def _with_step_metrics(on_frame: Callable[[EngineFrame], None], metrics: Metrics, model: str) -> Callable[[EngineFrame], None]:
    """Return `on_frame` that also records each engine step once in the metrics; status frames of an idle engine repeat the last
    step."""
    last_step = 0

    def observe(frame: EngineFrame) -> None:
        nonlocal last_step
        if frame.status is not None and frame.status.steps_total != last_step:
            last_step = frame.status.steps_total
            metrics.engine_step(model, frame.status.step_ms / MS_PER_S)
        on_frame(frame)

    return observe
