"""A folder that holds a model: checked before anything starts, and read for the settings that serving needs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.base.errors import InvalidValue
from appliance.tenancy.fields import check_name

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class NotAModel(Exception):
    """A path does not hold a model that can be served. The message says why."""


@dataclass(slots=True, kw_only=True)
class ModelFolder:
    """A checked model folder: every file that serving needs is there."""

    name: str
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]

    @classmethod
    def check(cls, path: Path) -> ModelFolder:
        """Check the folder at `path`; the model is named after its directory. Raises NotAModel."""
        path = path.expanduser().absolute()
        try:
            if not path.is_dir():
                raise NotAModel(f"{path} is not a model: there is no such folder, and nothing is downloaded")
            check_folder_name(path)
            missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
            missing += _missing_weights(path)
        except OSError as error:  # a folder that may not be searched, or a name that is too long
            raise NotAModel(f"{path} cannot be read: {error.strerror}") from error
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
        """Return the context length in tokens from `config.json` (from its `text_config` if there is one), None if missing."""
        text = self.config.get("text_config")
        value = (text if isinstance(text, dict) else self.config).get("max_position_embeddings")
        return value if isinstance(value, int) else None

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Return the sampling parameters recommended in `generation_config.json`, used where a request gives none."""
        if self.generation_config.get("do_sample") is False:
            return {}
        return {
            name: self.generation_config[name] for name in SAMPLING_DEFAULTS if self.generation_config.get(name) is not None
        }


def check_folder_name(path: Path) -> None:
    """Raise NotAModel for names that cannot be typed or that display as another name."""
    try:
        name = check_name(path.name)
    except InvalidValue as error:
        raise NotAModel(f"the folder {str(path)!r} cannot name a model: {error.message}") from error
    if name != path.name:
        raise NotAModel(f"the folder {str(path)!r} cannot name a model: its name begins or ends with a space")


def _missing_weights(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [] if (path / "model.safetensors").is_file() else ["model.safetensors"]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise NotAModel(f"{index} cannot be read: its weight_map must give the file of each tensor")
    return [shard for shard in sorted(set(weight_map.values())) if not os.path.isfile(path / shard)]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise NotAModel(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise NotAModel(f"{path} cannot be read: it is not a JSON object")
    return content
