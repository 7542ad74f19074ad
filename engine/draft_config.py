"""The configuration of a draft model, checked before the model is loaded. Knows no torch."""

from __future__ import annotations

from dataclasses import replace

from engine.config.model import ModelConfig, load_model_config
from engine.errors import EngineConfigError, ModelError, UnsupportedModel
from engine.formats import check_formats
from engine.options import EngineOptions
from engine.speculation.options import field_error


def draft_config(
    options: EngineOptions, target: ModelConfig, dtype: str, capability: tuple[int, int] | None
) -> ModelConfig | None:
    """The configuration of the draft model, None without one. It is loaded as stored, whatever the target is quantised to.
    Raises `EngineConfigError`, which names the option, also where the draft model's own files are at fault."""
    if options.draft_model is None:
        return None
    try:
        draft = load_model_config(options.draft_model)
    except ModelError as error:
        raise _refusal(error) from error
    if draft.vocab_size != target.vocab_size:  # its token ids would have other meanings
        raise field_error(
            "model", f"has a vocabulary of {draft.vocab_size} tokens, the served model one of {target.vocab_size}"
        )
    if draft.quantization is not None and draft.quantization.decoded is not None:
        raise _refusal(f"it is {draft.quantization.decoded}, and draft models are not decoded while they are read")
    try:
        check_formats(draft, replace(options, quantization=None, head_quantization=None), dtype, capability)
    except (EngineConfigError, UnsupportedModel) as error:
        raise _refusal(error) from error
    return draft


def check_draft_context(draft: ModelConfig, max_model_len: int) -> None:
    """Raise `EngineConfigError` for a draft model whose context is shorter than that of requests."""
    if draft.max_position_len < max_model_len:
        raise field_error("model", f"has a context of {draft.max_position_len} tokens; set max_model_len to at most that")


def _refusal(reason: object) -> EngineConfigError:
    return field_error("model", f"cannot be served: {reason}")
