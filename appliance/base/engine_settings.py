"""Settings for all models or for one, of its engine process or of the gateway, with defaults and limits. Imports no engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

from appliance.base import setting_values as parsers
from appliance.base.texts import did_you_mean

_OPTION_NAMES = {"engine_threads": "threads", "swap_space_gib": "swap_space", "speculative": "speculative_config"}
"""Names in `engine.options.EngineOptions` that differ from the setting's name."""

SETTING_NAMES = {option: setting for setting, option in _OPTION_NAMES.items()}
"""The settings of these engine options; the others have the option's name."""

_NOT_PER_MODEL = ("gpu_memory_utilization",)
"""All models on a GPU share this fraction of its memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """None lets the engine choose. `speculative` is the text of a JSON object with vLLM's keys; None disables it.
    `shared_prefixes` are paths of files."""

    device: Annotated[str, parsers.choice("auto", "cuda", "cpu")] = "auto"
    dtype: Annotated[str, parsers.choice("auto", "float32", "bfloat16", "float16")] = "auto"
    engine_threads: Annotated[int | None, parsers.whole(1, 1024)] = None
    max_num_seqs: Annotated[int | None, parsers.whole(1, 1024)] = None
    max_num_batched_tokens: Annotated[int | None, parsers.whole(1, 1_000_000)] = None
    max_model_len: Annotated[int | None, parsers.context_len] = None
    kv_cache_bytes: Annotated[int | None, parsers.size(parsers.MIB, 1024**5)] = None
    gpu_memory_utilization: Annotated[float, parsers.number(0.01, 1)] = 0.9
    enable_prefix_caching: Annotated[bool, parsers.flag] = True
    block_size: Annotated[int, parsers.power_of_two(1024)] = 16
    quantization: Annotated[
        str | None, parsers.choice("int8", "fp8", "none", "awq", "gptq", "compressed-tensors", "modelopt")
    ] = None
    head_quantization: Annotated[str | None, parsers.choice("none", "int8")] = None
    kv_cache_dtype: Annotated[str, parsers.choice("auto", "fp8", "fp8_e4m3")] = "auto"
    swap_space_gib: Annotated[float, parsers.number(0, 4096)] = 0.0
    speculative: Annotated[str | None, parsers.speculative] = None
    batch_invariant: Annotated[bool, parsers.flag] = False
    enforce_eager: Annotated[bool, parsers.flag] = False
    scheduling_policy: Annotated[str, parsers.choice("fair", "fcfs")] = "fair"
    inter_token_target_ms: Annotated[float | None, parsers.number(0.1, 60_000)] = None
    shared_prefixes: Annotated[tuple[str, ...], parsers.files] = ()

    @property
    def draft_folder(self) -> Path | None:
        """The folder of the draft model, None without one."""
        folder = None if self.speculative is None else json.loads(self.speculative).get("model")
        return None if folder is None else Path(folder)

    def engine_options(self) -> dict[str, Any]:
        """Return the engine's options by name, as JSON values; settings that are None are omitted."""
        values = {field.name: getattr(self, field.name) for field in fields(EngineSettings)}
        if self.speculative is not None:
            values["speculative"] = json.loads(self.speculative)
        return {_OPTION_NAMES.get(name, name): value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class PerModelSettings(EngineSettings):
    """What a model may have a value of its own for: the settings of its engine, and those that the gateway applies to its
    requests, which no engine gets. `default_max_tokens` None: the rest of the context."""

    default_max_tokens: Annotated[int | None, parsers.whole(1, 10_000_000)] = None


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model to serve: its folder or the name of an added model, and the settings that it overrides in `own`."""

    model: str
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The absolute path of its folder."""
        return Path(self.model).expanduser().absolute()

    @classmethod
    def parse(cls, value: object, number: int, appliance_keys: Container[str]) -> ModelSettings:
        """Parse entry `number`, counted from 1, of the setting `models`: a path or name, or a table with `model` and
        settings of its own. Raises ValueError with the rest of the sentence "models …"."""
        if isinstance(value, str):
            value = {"model": value}
        model = value.get("model") if isinstance(value, Mapping) else None
        if not isinstance(value, Mapping) or not isinstance(model, str) or not model.strip():
            raise ValueError(f"has no model in entry {number}: {_ENTRY_MESSAGE}")
        model = model.strip()
        own = {key: _parse_own(model, str(key), setting, appliance_keys) for key, setting in value.items() if key != "model"}
        return cls(model, own)


_MODELS_MESSAGE = "must be a list of paths or names, or of tables with the key model and settings"
_ENTRY_MESSAGE = "an entry is a path or name, or a table with the key model and settings"


def parse_models(value: object, appliance_keys: Container[str] = ()) -> tuple[ModelSettings, ...]:
    """Parse a list of models; text is a JSON list, or paths and names separated by commas. Raises ValueError; a model that
    sets one of `appliance_keys` gets a message of its own."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.lstrip().startswith(("[", "{")) else value.split(",")
        except (ValueError, RecursionError):
            raise ValueError(_MODELS_MESSAGE) from None
    if not isinstance(value, list | tuple):
        raise ValueError(_MODELS_MESSAGE)  # noqa: TRY004 - the same error as for invalid text
    return tuple(ModelSettings.parse(entry, number, appliance_keys) for number, entry in enumerate(value, start=1))


def _parse_own(model: str, key: str, value: object, appliance_keys: Container[str]) -> Any:
    if key in _NOT_PER_MODEL:
        raise ValueError(f"has an invalid setting for {model}: {key} is shared by all models on a GPU")
    if key not in PARSERS and key in appliance_keys:
        advice = "put it above the first [[models]], because TOML assigns the lines below that to the model"
        raise ValueError(f"has an invalid setting for {model}: {key} is a setting of the whole appliance; {advice}")
    if key not in PARSERS:
        raise ValueError(f"has an unknown setting for {model}: {key}{did_you_mean(key, PARSERS)}")
    try:
        return PARSERS[key](value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"has an invalid setting for {model}: {key} {error}") from None


PARSERS: dict[str, Callable[[object], Any]] = {
    key: hint.__metadata__[0] for key, hint in get_type_hints(PerModelSettings, include_extras=True).items()
}
"""The parser of each setting that a model may have of its own."""
