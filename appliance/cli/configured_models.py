"""The models of the settings, and the options of their engines as the engine's own checks take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from appliance.cli.model_store import locate

if TYPE_CHECKING:
    from appliance.base.engine_settings import ModelSettings
    from appliance.base.settings import Settings


def configured_models(settings: Settings) -> Sequence[ModelSettings]:
    """Return the models of the settings, or the demo model if there are none."""
    from appliance.base.engine_settings import ModelSettings
    from appliance.serving.model_builder import DEMO_MODEL

    return settings.models or (ModelSettings(str(DEMO_MODEL)),)


def engine_options(settings: Settings) -> list[dict[str, Any]]:
    """Return the engine options of each configured model, by name."""
    return [
        {"model": locate(model.model, settings.data_dir), **settings.for_model(model).engine_options()}
        for model in configured_models(settings)
    ]
