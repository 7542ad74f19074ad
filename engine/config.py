"""What a model directory says about its model, checked before anything is loaded. Reads JSON; knows no torch.

Every key that changes the computation is either honoured or refused by name; keys that only describe training are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import NotAModelDirectory, UnsupportedModel
from engine.models.families import FAMILIES, Family

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions. `kind` is default, linear or llama3; the last four fields are those of llama3 (Llama 3.1)."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder. `sliding_window` counts tokens that a query sees, itself included; None is unlimited."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_len: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    torch_dtype: str
    eos_token_ids: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model directory; `NotAModelDirectory` names the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise NotAModelDirectory(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise NotAModelDirectory(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def load_model_config(directory: Path) -> ModelConfig:
    """Read and check `config.json`. Raises `NotAModelDirectory` or `UnsupportedModel`."""
    if not directory.is_dir():
        raise NotAModelDirectory(f"{directory} is not a directory; give the folder that holds config.json and the weights")
    path = directory / "config.json"
    if not path.is_file():
        raise NotAModelDirectory(f"{directory} has no config.json; give the folder of a Hugging Face model")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return parse_model_config(read_json(path), generation)


def parse_model_config(config: JsonObject, generation: JsonObject) -> ModelConfig:
    """The checked form of `config.json` and `generation_config.json`."""
    family = _family(config)
    _refuse_uncomputed(config)
    hidden_size = _positive(config, "hidden_size")
    num_heads = _positive(config, "num_attention_heads")
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    if head_dim % 2:
        raise UnsupportedModel(f"head_dim must be even, not {head_dim}")
    attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        family=family,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_position_len=_positive(config, "max_position_embeddings"),
        rope=_rope(config, family),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.always_qkv_bias or (family.reads_attention_bias and attention_bias),
        o_bias=family.reads_attention_bias and attention_bias,
        mlp_bias=family.reads_mlp_bias and bool(config.get("mlp_bias", False)),
        sliding_window=_sliding_window(config, family),
        torch_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=_eos_token_ids(config, generation),
    )


def _family(config: JsonObject) -> Family:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise UnsupportedModel(f"config.json names no architecture; supported: {', '.join(sorted(FAMILIES))}")
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    raise UnsupportedModel(
        f"architecture {', '.join(map(str, architectures))} is not supported; supported: {', '.join(sorted(FAMILIES))}"
    )


def _refuse_uncomputed(config: JsonObject) -> None:
    """Options that change the numbers and that no family here computes."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; supported: silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"quantization_config ({method}) is not supported by this version; use unquantized weights")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {config['partial_rotary_factor']} is not supported; supported: 1.0")
    if config.get("use_sliding_window"):
        raise UnsupportedModel("use_sliding_window with a window in some layers only is not supported")


def _positive(config: JsonObject, key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _rope(config: JsonObject, family: Family) -> RopeConfig:
    """Both spellings: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling` before it."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or family.rope_theta)
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=_number(parameters, "factor"))
    if kind == "llama3":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=_number(parameters, "factor"),
            low_freq_factor=_number(parameters, "low_freq_factor"),
            high_freq_factor=_number(parameters, "high_freq_factor"),
            original_max_len=int(_number(parameters, "original_max_position_embeddings")),
        )
    raise UnsupportedModel(f"rope type {kind!r} is not supported; supported: default, linear, llama3")


def _number(parameters: JsonObject, key: str) -> float:
    value = parameters.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnsupportedModel(f"config.json: {key} of the rope settings must be a number, not {value!r}")
    return float(value)


def _sliding_window(config: JsonObject, family: Family) -> int | None:
    window = config.get("sliding_window") if family.reads_sliding_window else None
    if window is not None and (not isinstance(window, int) or window < 1):
        raise UnsupportedModel(f"sliding_window must be a positive integer or null, not {window!r}")
    return window


def _eos_token_ids(config: JsonObject, generation: JsonObject) -> tuple[int, ...]:
    """generation_config.json decides when it names one; else config.json."""
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
