"""The rotary settings of config.json, checked. Knows no torch; `engine.layers.rotary` turns them into tables.

Both spellings are read: `rope_parameters` of transformers 5, and `rope_theta` with `rope_scaling` before it. Linear scaling:
arXiv 2306.15595; YaRN: arXiv 2309.00071; LongRoPE: arXiv 2402.13753; dynamic NTK has no paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from engine.config.values import INTEGER_MAX, JsonObject, flag, number, positive
from engine.errors import UnsupportedModel

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
KNOWN_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "short_factor", "long_factor",
}  # fmt: skip
IGNORED_KEYS = {"finetuned"}  # describes training


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One rotation. It rotates the first `rotary_dim` of a head's dimensions; `attention_factor` multiplies cosine and sine.

    `dynamic` is the plain rotation up to the model's context, and there is nothing beyond: its frequencies would follow the
    length of the running request, so that keys in the cache and new queries would disagree. `longrope` takes the short
    factors when the engine's context (`max_model_len`) is at most `original_max_len`, else the long ones for every position.
    """

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_len: int = 8192
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()  # longrope, one per pair of dimensions
    long_factors: tuple[float, ...] = ()

    @property
    def context_len(self) -> int:
        """Positions that the scaling reaches; 0 where the model's own context decides."""
        return int(self.factor * self.original_max_len) if self.kind == "yarn" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeDefaults:
    """The defaults of a rotation, from the rest of config.json or the family."""

    theta: float
    head_dim: int
    max_position_len: int
    original_max_len: int | None = None
    partial_rotary_factor: float = 1.0


def parse_rope(parameters: JsonObject, defaults: RopeDefaults) -> RopeConfig:
    """Check one rotation's settings. Raises `UnsupportedModel`, naming the key."""
    unknown = set(parameters) - KNOWN_KEYS - IGNORED_KEYS
    if unknown:
        raise UnsupportedModel(f"config.json: {', '.join(sorted(unknown))} of the rope settings is not supported")
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    theta = number(parameters, "rope_theta", defaults.theta)
    partial = number(parameters, "partial_rotary_factor", defaults.partial_rotary_factor)
    rotary_dim = int(defaults.head_dim * partial)
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > defaults.head_dim:
        raise UnsupportedModel(f"partial_rotary_factor {partial} rotates {rotary_dim} of {defaults.head_dim} dimensions")
    rope = RopeConfig(kind=kind, theta=theta, rotary_dim=rotary_dim)
    if kind in ("default", "dynamic"):
        return rope
    if kind == "linear":
        return replace(rope, factor=number(parameters, "factor"))
    rope = replace(rope, original_max_len=_original_max_len(parameters, defaults))
    if kind == "llama3":
        return replace(
            rope,
            factor=number(parameters, "factor"),
            low_freq_factor=number(parameters, "low_freq_factor"),
            high_freq_factor=number(parameters, "high_freq_factor"),
        )
    if kind in ("yarn", "longrope"):
        rope = replace(rope, factor=number(parameters, "factor", defaults.max_position_len / rope.original_max_len))
        return _yarn(parameters, rope) if kind == "yarn" else _longrope(parameters, rope)
    raise UnsupportedModel(f"rope type {kind!r} is not supported; supported: {', '.join(KINDS)}")


def _original_max_len(parameters: JsonObject, defaults: RopeDefaults) -> int:
    """The key beside the rope settings takes precedence over the one inside them, as in transformers."""
    if defaults.original_max_len is not None:
        return defaults.original_max_len
    return positive(parameters, "original_max_position_embeddings", default=defaults.max_position_len)


def _yarn(parameters: JsonObject, rope: RopeConfig) -> RopeConfig:
    factor = rope.factor
    if rope.theta == 1:
        raise UnsupportedModel("config.json: rope_theta must not be 1 with yarn, which divides by its logarithm")
    if factor * rope.original_max_len > INTEGER_MAX:
        raise UnsupportedModel(
            f"config.json: yarn's factor {factor:g} times {rope.original_max_len} positions must be at most {INTEGER_MAX}"
        )
    inferred = _attention_mscale(factor, 1.0)
    mscale, mscale_all = (number(parameters, key) if parameters.get(key) else 0.0 for key in ("mscale", "mscale_all_dim"))
    if mscale and mscale_all:
        inferred = _attention_mscale(factor, mscale) / _attention_mscale(factor, mscale_all)
    return replace(
        rope,
        attention_factor=number(parameters, "attention_factor", inferred),
        beta_fast=number(parameters, "beta_fast", 32.0),
        beta_slow=number(parameters, "beta_slow", 1.0),
        truncate=flag(parameters, "truncate", default=True),
    )


def _attention_mscale(factor: float, mscale: float) -> float:
    """The temperature of attention that YaRN folds into the rotation (its equation 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(parameters: JsonObject, rope: RopeConfig) -> RopeConfig:
    if rope.original_max_len < 2:
        raise UnsupportedModel("config.json: original_max_position_embeddings must be at least 2 with longrope")
    inferred = 1.0 if rope.factor <= 1.0 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_len))
    return replace(
        rope,
        attention_factor=number(parameters, "attention_factor", inferred),
        short_factors=_numbers(parameters, "short_factor", rope.rotary_dim // 2),
        long_factors=_numbers(parameters, "long_factor", rope.rotary_dim // 2),
    )


def _numbers(parameters: JsonObject, key: str, count: int) -> tuple[float, ...]:
    values = parameters.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise UnsupportedModel(f"config.json: {key} of the rope settings must be a list of {count} numbers")
    return tuple(number({key: value}, key) for value in values)
