"""How the hidden states of a text become one vector: as the files of sentence-transformers say, or by a default.

`modules.json` lists the steps, `1_Pooling/config.json` the way of pooling, `sentence_bert_config.json` the longest text, and
`config_sentence_transformers.json` a prefix for each input. A step that is not supported is refused by name.
Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from engine.config.model import read_json, read_json_value
from engine.config.values import JsonObject, flag
from engine.errors import NotAModelDirectory, UnsupportedModel
from engine.number_checks import is_integer

MODES = ("mean", "cls", "last")
MODE_OF = {
    "mean": "mean", "cls": "cls", "lasttoken": "last",
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last",
}  # fmt: skip
"""The mode of each value of `pooling_mode`, and of each older key with the value true."""

LIMITS_FILES = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names of the file with the longest text; all but the first are those of older models. The first that is there counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """`mode`: mean of all tokens, the first (cls) or the last one. `normalised`: vectors of length one.

    `max_len` is the longest text in tokens if the files name one; `prompt` is prepended to each text.
    """

    mode: str
    normalised: bool = True
    max_len: int | None = None
    prompt: str = ""
    lowercase: bool = False


def load_pooling_config(directory: Path, *, default_mode: str) -> PoolingConfig:
    """The pooling of a model directory; without `modules.json` the default mode, normalised. Raises `ModelError`."""
    path = directory / "modules.json"
    if not path.is_file():
        return PoolingConfig(mode=default_mode)
    types = _module_types(path)
    if types[:2] != ["Transformer", "Pooling"] or types[2:] not in ([], ["Normalize"]):
        raise UnsupportedModel(
            f"{path}: the modules {', '.join(types)} are not supported; supported: Transformer, Pooling, Normalize"
        )
    pooling = read_json(directory / "1_Pooling" / "config.json")
    config = PoolingConfig(mode=_mode(pooling), normalised="Normalize" in types)
    included = flag(pooling, "include_prompt", default=True, file="1_Pooling")
    return _with_prompt(_with_limits(config, directory), directory, included=included)


def _module_types(path: Path) -> list[str]:
    """The last part of each module's type, in order."""
    modules = read_json_value(path)
    if not isinstance(modules, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules):
        raise NotAModelDirectory(f"{path} must hold a list of modules with a type each")
    if modules and modules[0].get("path"):
        raise UnsupportedModel(f"{path}: a transformer in the folder {modules[0]['path']!r} is not supported; give that folder")
    return [module["type"].rpartition(".")[2] for module in modules]


def _mode(pooling: JsonObject) -> str:
    """Exactly one way of pooling; several are concatenated by sentence-transformers, and refused here."""
    named = pooling.get("pooling_mode")
    if named is None:
        keys = [key for key in pooling if key.startswith("pooling_mode_")]
        named = [key for key in keys if flag(pooling, key, file="1_Pooling")] or "mean"
    if not isinstance(named, str | list):
        raise UnsupportedModel(f"1_Pooling: pooling_mode must be a name or a list of names, not {named!r}")
    names = [named] if isinstance(named, str) else named
    modes = [MODE_OF.get(str(name)) for name in names]
    if len(modes) != 1 or modes[0] is None:
        raise UnsupportedModel(
            f"1_Pooling: {' with '.join(map(str, names))} is not supported; supported: one of mean, cls, lasttoken"
        )
    return modes[0]


def _with_limits(config: PoolingConfig, directory: Path) -> PoolingConfig:
    path = next((directory / name for name in LIMITS_FILES if (directory / name).is_file()), None)
    if path is None:
        return config
    settings = read_json(path)
    max_len = settings.get("max_seq_length")
    if max_len is not None and (not is_integer(max_len) or max_len < 1):
        raise UnsupportedModel(f"{path}: max_seq_length must be a positive integer or null, not {max_len!r}")
    return replace(config, max_len=max_len, lowercase=flag(settings, "do_lower_case", file=str(path)))


def _with_prompt(config: PoolingConfig, directory: Path, *, included: bool) -> PoolingConfig:
    path = directory / "config_sentence_transformers.json"
    settings = read_json(path) if path.is_file() else {}
    name = settings.get("default_prompt_name")
    if name is None:
        return config
    prompts = settings.get("prompts")
    prompt = prompts.get(str(name)) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise UnsupportedModel(f"{path}: default_prompt_name {name!r} names no prompt")
    if prompt and not included:
        raise UnsupportedModel("1_Pooling: include_prompt = false with a default prompt is not supported")
    return replace(config, prompt=prompt)
