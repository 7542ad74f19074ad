"""The models that are served, those of the settings, and their engines' options as the engine's own checks take them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.base.texts import did_you_mean
from appliance.cli.connection import AdminClient
from appliance.cli.model_store import locate

if TYPE_CHECKING:
    from appliance.base.engine_settings import ModelSettings
    from appliance.base.settings import Settings


def configured_models(settings: Settings) -> Sequence[ModelSettings]:
    """Return the models of the settings, or the demo model if there are none."""
    from appliance.base.engine_settings import ModelSettings
    from appliance.serving.model_builder import DEMO_MODEL

    return settings.models or (ModelSettings(str(DEMO_MODEL)),)


async def served_models(client: AdminClient, settings: Settings) -> Sequence[str]:
    """Return the names of the models that engines serve, or of the configured ones if the appliance is not running."""
    served = [engine["model"] for engine in (await client.call("GET", "/system"))["engine"]]
    return served or [Path(chosen.model).name for chosen in configured_models(settings)]


def note_unserved(model: str, served: Sequence[str], consequence: str) -> None:
    """Say on standard error if no engine serves `model`, with the `consequence`, such as "its price applies when one does"."""
    if model not in served:
        hint = did_you_mean(model, served)
        sys.stderr.write(f"gatehouse: no engine serves a model named {model!r}; {consequence}{hint}\n")


def engine_options(settings: Settings) -> list[dict[str, Any]]:
    """Return the engine options of each configured model, by name."""
    return [
        {"model": locate(model.model, settings.data_dir), **settings.for_model(model).engine_options()}
        for model in configured_models(settings)
    ]
