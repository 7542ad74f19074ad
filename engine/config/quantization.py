"""The formats of the weights in a checkpoint: `quantization_config` of config.json, checked. Reads JSON; knows no torch.

Which modules are quantised is not read here: the tensors in the files decide, not the lists of exceptions.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.config.compressed_tensors import check_kv_scheme, parse_compressed, read_block
from engine.config.quantization_keys import KEY, group_size, refusal, require_one_of
from engine.config.stored_weights import (
    Activations,
    CheckpointQuantization,
    Fp8BlockWeights,
    Fp8Weights,
    GroupLayout,
    Int4Weights,
    Int8GroupWeights,
    StoredWeights,
)
from engine.config.values import JsonObject, flag, mapping
from engine.errors import UnsupportedModel


def parse_quantization(config: JsonObject) -> CheckpointQuantization | None:
    """The checked form of `quantization_config`, None without one. Raises `UnsupportedModel` with the key and the supported
    values."""
    settings = mapping(config, KEY)
    if not settings:
        if config.get("compression_config"):
            raise UnsupportedModel(f"config.json: compression_config is not read; supported: the same under {KEY}")
        return None
    method = settings.get("quant_method")
    parsers: dict[str, Callable[[JsonObject], StoredWeights]] = {
        "fp8": _fp8,
        "compressed-tensors": parse_compressed,
        "awq": _awq,
        "gptq": _gptq,
        "modelopt": _modelopt,
    }
    if not isinstance(method, str) or method not in parsers:
        raise refusal("quant_method", method, ", ".join(parsers))
    return CheckpointQuantization(method=method, weights=parsers[method](settings))


def _fp8(settings: JsonObject) -> Fp8Weights | Fp8BlockWeights:
    """The layout of vLLM's and transformers' `fp8`: weight, weight_scale and, with static activations, input_scale. With blocks
    it is DeepSeek's: weight and weight_scale_inv, by which codes are multiplied, whatever the name suggests."""
    require_one_of(settings, "fmt", None, "e4m3", "float8_e4m3fn")
    if settings.get("weight_block_size") is None:
        require_one_of(settings, "activation_scheme", None, "dynamic", "static")
        return Fp8Weights(activations=Activations(settings.get("activation_scheme") or "dynamic"))
    require_one_of(settings, "activation_scheme", None, "dynamic")
    block = read_block(settings, "weight_block_size")
    return Fp8BlockWeights(block=block, marker="weight_scale_inv", key=f"weight_block_size {list(block)}")


def _modelopt(settings: JsonObject) -> Fp8Weights:
    """The layout of ModelOpt's FP8: one weight_scale and one input_scale for each matrix."""
    require_one_of(settings, "quant_algo", "FP8")
    require_one_of(settings, "kv_cache_quant_algo", None, "FP8")
    check_kv_scheme(mapping(settings, "kv_cache_scheme"))
    return Fp8Weights(activations=Activations.STATIC)


def _awq(settings: JsonObject) -> Int4Weights:
    settings = {"bits": settings.get("w_bit"), "group_size": settings.get("q_group_size"), **settings}
    require_one_of(settings, "bits", 4)
    if str(settings.get("version") or "gemm").lower() != "gemm":
        raise refusal("version", settings["version"], "gemm")
    return Int4Weights(layout=GroupLayout.AWQ, group_size=group_size(settings), zero_offset=0)


def _gptq(settings: JsonObject) -> Int4Weights | Int8GroupWeights:
    """With `desc_act`, `g_idx` in the files says which group an input belongs to, unless groups were formed before inputs were
    sorted (`static_groups`). Entries of `dynamic` that begin with `-:` name modules that are not quantised."""
    require_one_of(settings, "bits", 4, 8)
    require_one_of(settings, "pack_dtype", None, "int32")
    others = [pattern for pattern in mapping(settings, "dynamic") if not pattern.startswith("-:")]
    if others:
        raise refusal("dynamic", others, "the same bits and group_size for all modules; exceptions begin with -:")
    if flag(settings, "is_marlin_format"):
        raise refusal("is_marlin_format", True, "false")
    format_name = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if format_name not in ("gptq", "gptq_v2"):
        raise refusal("checkpoint_format", format_name, "gptq, gptq_v2")
    offset = 1 if format_name == "gptq" else 0  # the first format stores zero - 1
    size = group_size(settings)
    ordered = size is not None and flag(settings, "desc_act") and not flag(settings, "static_groups")
    if settings["bits"] == 4:
        return Int4Weights(layout=GroupLayout.GPTQ, group_size=size, zero_offset=offset, needs_order=ordered)
    return Int8GroupWeights(layout=GroupLayout.GPTQ, group_size=size, zero_offset=offset, needs_order=ordered, key="bits 8")
