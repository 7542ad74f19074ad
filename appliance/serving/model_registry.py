"""The served models: name, folder, tokenizer and engine of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from appliance.base.errors import ModelNotFound
from appliance.serving.model_folder import NotAModel
from appliance.serving.supervisor import Supervisor
from appliance.serving.tokenizer import ModelTokenizer


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """One served model. `name` is the public one; `context_len` and `sampling_defaults` come from its folder.
    `default_max_tokens` is the longest answer to a request without a maximum, None for the rest of the context."""

    name: str
    path: Path
    engine: Supervisor
    tokenizer: ModelTokenizer
    context_len: int | None
    sampling_defaults: dict[str, Any]
    default_max_tokens: int | None
    created: datetime

    @property
    def max_model_len(self) -> int | None:
        """Return the context length in tokens; before the engine is ready, the one of the model's configuration."""
        info = self.engine.info
        return self.context_len if info is None else info.max_model_len


class ModelRegistry:
    """The served models by name, fixed at start. Raises NotAModel for two models of the same name."""

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
            raise model_not_found(name)
        return model

    def list(self) -> list[ServedModel]:
        """Return every served model in the order of the settings."""
        return list(self._models.values())


def model_not_found(name: str) -> ModelNotFound:
    """Return the error for a model that is not served, or that the key may not know of."""
    return ModelNotFound(f"the model {name!r} does not exist here; GET /v1/models lists those that do", param="model")
