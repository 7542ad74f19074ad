"""The models that are served: name, folder, tokenizer, engine. Finds out before anything starts whether a folder is a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.base.errors import ModelNotFound
from appliance.serving.supervisor import Supervisor
from engine.protocol import EngineInfo

if TYPE_CHECKING:
    from appliance.serving.prompting import Prompting

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class NotAModel(Exception):
    """A path does not hold a model that can be served. The message names what is missing."""


@dataclass(slots=True, kw_only=True)
class ModelFolder:
    """A folder that was checked: it has every file that serving needs."""

    name: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @classmethod
    def check(cls, path: Path) -> ModelFolder:
        """Return the folder under the name of its directory. Raises NotAModel."""
        path = path.expanduser().absolute()
        if not path.is_dir():
            raise NotAModel(f"{path} is not a model: there is no such folder")
        missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
        missing += _missing_weights(path)
        if missing:
            raise NotAModel(f"{path} is not a model: it has no {', no '.join(missing)}")
        return cls(
            name=path.name,
            path=path,
            config=_read_json(path / "config.json"),
            generation_config=_read_json(path / "generation_config.json"),
        )

    @property
    def context_len(self) -> int | None:
        """Return the context that the model's own configuration names."""
        value = self.config.get("max_position_embeddings")
        return value if isinstance(value, int) else None

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling values that the model's makers recommend; a request's own values come first."""
        if self.generation_config.get("do_sample") is False:
            return {}
        return {
            name: self.generation_config[name] for name in SAMPLING_DEFAULTS if self.generation_config.get(name) is not None
        }


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """One model under its public name."""

    name: str
    path: Path
    client: Supervisor
    prompting: Prompting
    context_len: int | None
    sampling_defaults: dict[str, Any]
    created: datetime

    @property
    def info(self) -> EngineInfo | None:
        """Return the engine's facts, or None before it was ready."""
        return self.client.info

    @property
    def max_model_len(self) -> int | None:
        """Return the longest prompt plus output in tokens; before the engine is ready, what the folder says."""
        return self.info.max_model_len if self.info is not None else self.context_len


class ModelRegistry:
    """Served models by name. Filled once at start."""

    def __init__(self, models: Iterable[ServedModel] = ()) -> None:
        self._models: dict[str, ServedModel] = {}
        for model in models:
            if model.name in self._models:
                raise NotAModel(f"two models are named {model.name}: {self._models[model.name].path} and {model.path}")
            self._models[model.name] = model

    def get(self, name: str) -> ServedModel:
        """Return the model. Raises ModelNotFound."""
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(f"the model {name!r} does not exist here", param="model")
        return model

    def list(self) -> list[ServedModel]:
        """Return every served model in the order of the settings."""
        return list(self._models.values())


def _missing_weights(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [] if (path / "model.safetensors").is_file() else ["model.safetensors"]
    shards = sorted(set(_read_json(index).get("weight_map", {}).values()))
    return [shard for shard in shards if not (path / shard).is_file()]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise NotAModel(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise NotAModel(f"{path} cannot be read: it holds no object")
    return content
