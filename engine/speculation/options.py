"""An operator's settings for speculative decoding. Field names are those of vLLM's `speculative_config`. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.errors import EngineConfigError
from engine.number_checks import is_integer

OPTION = "speculative_config"
METHODS = ("ngram", "draft_model")
SPECULATIVE_TOKENS_MAX = 32
NGRAM_MAX = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeOptions:
    """`ngram` drafts what followed an earlier occurrence of the last `prompt_lookup_max` … `prompt_lookup_min` tokens;
    `draft_model` uses the smaller model in the directory `model`. At most `num_speculative_tokens` are drafted per step, and
    none while more than `disable_by_batch_size` requests run; None derives that limit from the measured cost of drafts.

    Raises `EngineConfigError` for the option `speculative_config`, naming the field.
    """

    method: str
    model: Path | None = None
    num_speculative_tokens: int = 16
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 1
    disable_by_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise field_error("method", f"must be one of {', '.join(METHODS)}, not {self.method!r}")
        if (self.model is None) == (self.method == "draft_model"):
            raise field_error("model", "must be a model directory for draft_model and is not used by ngram")
        _check_count("num_speculative_tokens", self.num_speculative_tokens, SPECULATIVE_TOKENS_MAX)
        _check_count("prompt_lookup_max", self.prompt_lookup_max, NGRAM_MAX)
        _check_count("prompt_lookup_min", self.prompt_lookup_min, self.prompt_lookup_max)
        if self.disable_by_batch_size is not None:
            _check_count("disable_by_batch_size", self.disable_by_batch_size, 2**31 - 1)

    @property
    def ngram_sizes(self) -> tuple[int, ...]:
        """Lengths of the n-grams to look up, the longest first; none for a draft model."""
        return tuple(range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1)) if self.method == "ngram" else ()

    @classmethod
    def parse(cls, value: Mapping[str, Any]) -> SpeculativeOptions:
        """From a mapping as in a settings file or a call. Raises `EngineConfigError`."""
        if not isinstance(value, Mapping):
            raise EngineConfigError(OPTION, f"must be a mapping of options, not {value!r}")
        unknown = sorted(set(map(str, value)) - {field.name for field in fields(cls)})
        if unknown:
            raise EngineConfigError(OPTION, f"has unknown fields: {', '.join(unknown)}")
        if "method" not in value:
            raise field_error("method", f"must be one of {', '.join(METHODS)}")
        settings = dict(value)
        model = settings.get("model")
        if model is not None:
            if not isinstance(model, str | Path):
                raise field_error("model", f"must be a path, not {model!r}")
            settings["model"] = Path(model)
        return cls(**settings)


def _check_count(name: str, value: object, limit: int) -> None:
    if not is_integer(value) or not 1 <= value <= limit:
        raise field_error(name, f"must be a whole number between 1 and {limit}, not {value!r}")


def field_error(name: str, message: str) -> EngineConfigError:
    """The refusal of the option for a field of it."""
    return EngineConfigError(OPTION, f"field {name} {message}")
