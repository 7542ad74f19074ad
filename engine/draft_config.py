"""The configuration of a draft model, checked before the model is loaded. Knows no torch."""

from __future__ import annotations

from dataclasses import replace

from engine.config.model import ModelConfig, load_model_config
from engine.errors import EngineConfigError, UnsupportedModel
from engine.formats import check_formats
from engine.options import EngineOptions
from engine.speculation.options import OPTION, check_draft_vocabulary


def draft_config(
    options: EngineOptions, target: ModelConfig, dtype: str, capability: tuple[int, int] | None
) -> ModelConfig | None:
    """The configuration of the draft model, None without one. It is loaded as stored, whatever the target is quantised to.
    Raises `EngineConfigError` or `ModelError`."""
    if options.draft_model is None:
        return None
    draft = load_model_config(options.draft_model)
    check_draft_vocabulary(draft, target)
    if draft.quantization is not None and draft.quantization.decoded is not None:
        stored = draft.quantization.decoded
        raise EngineConfigError(
            OPTION, f"field model cannot be served: it is {stored}, and draft models are not decoded while they are read"
        )
    try:
        check_formats(draft, replace(options, quantization=None, head_quantization=None), dtype, capability)
    except (EngineConfigError, UnsupportedModel) as error:
        raise EngineConfigError(OPTION, f"field model cannot be served: {error}") from error
    return draft
