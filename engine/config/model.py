"""The configuration of a decoder in a model directory, checked before anything is loaded. Reads JSON; knows no torch.

Every key that changes the computation is either honoured or refused by name; keys that only describe training are ignored.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.config.families import FAMILIES, Family
from engine.config.quantization import parse_quantization
from engine.config.quantization_keys import KEY as QUANTIZATION
from engine.config.rope import RopeConfig, RopeDefaults, parse_rope
from engine.config.stored_weights import CheckpointQuantization
from engine.config.values import JsonObject, flag, integers, mapping, number, positive
from engine.config.windows import layer_windows
from engine.errors import NotAModelDirectory, UnsupportedModel

LAYERS_MAX = 1024
EXPERTS_MAX = 4096
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
ENCODERS = ("BertModel", "RobertaModel", "XLMRobertaModel")
HEADLESS = {  # decoders whose checkpoint has no output head, and the family they belong to
    name.replace("ForCausalLM", "Model"): name
    for name in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
}
EMBEDDERS = (*ENCODERS, *HEADLESS)
OF_WHOLE_MODEL = ("architectures", "dtype", "torch_dtype", "eos_token_id")
"""Keys that describe a model of several parts, whatever its `text_config` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What may differ from layer to layer: indices into `ModelConfig.ropes` and `.windows`, and dense or sparse."""

    rope_idx: int
    window_idx: int
    is_sparse: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of experts. `normalised`: the weights of a token's chosen experts sum to one."""

    num_experts: int
    num_chosen: int
    intermediate_size: int
    normalised: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder. `windows` and `ropes` hold each distinct one once; a window counts the tokens that a query sees,
    itself included, and None is unlimited. Multipliers are 1 and soft-caps None where a family has none."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_len: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    windows: tuple[int | None, ...]
    experts: ExpertsConfig | None
    activation: str
    has_head: bool
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: CheckpointQuantization | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)


def kv_elements_per_token(num_layers: int, num_kv_heads: int, head_dim: int) -> int:
    """Elements of one token in the KV cache: a key and a value of `head_dim` for each KV head of every layer."""
    return 2 * num_layers * num_kv_heads * head_dim


def read_json_value(path: Path) -> Any:
    """What a JSON file of the model directory holds. Raises `NotAModelDirectory`, naming the file."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    # ValueError: no JSON, no UTF-8, or an integer of more digits than Python reads; RecursionError: nested too deeply.
    except (OSError, ValueError, RecursionError) as error:
        raise NotAModelDirectory(f"{path} cannot be read as JSON: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file of the model directory holds. Raises `NotAModelDirectory`, naming the file."""
    value = read_json_value(path)
    if not isinstance(value, dict):
        raise NotAModelDirectory(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_model_json(directory: Path) -> dict[str, Any]:
    """`config.json` of a model directory, with the description of its quantisation that early AutoGPTQ and ModelOpt put in a
    file of its own. Raises `NotAModelDirectory` and `UnsupportedModel`."""
    path = directory / "config.json"
    try:
        is_directory, has_config = directory.is_dir(), path.is_file()
    except OSError as error:  # a folder that may not be searched, or a name that is too long
        raise NotAModelDirectory(f"{directory} cannot be read: {error.strerror}") from error
    if not is_directory:
        raise NotAModelDirectory(f"{directory} is not a directory; give the folder that holds config.json and the weights")
    if not has_config:
        raise NotAModelDirectory(f"{directory} has no config.json; give the folder of a Hugging Face model")
    config = read_json(path)
    if not config.get(QUANTIZATION):
        config |= _quantization_beside(directory)
    return config


def _quantization_beside(directory: Path) -> dict[str, Any]:
    """`quantization_config` from the first of these files that is there; without any, nothing."""
    gptq, modelopt = directory / "quantize_config.json", directory / "hf_quant_config.json"
    if gptq.is_file():
        return {QUANTIZATION: {"quant_method": "gptq", **read_json(gptq)}}
    if modelopt.is_file():
        return {QUANTIZATION: {"quant_method": "modelopt", **mapping(read_json(modelopt), "quantization")}}
    return {}


def load_model_config(directory: Path) -> ModelConfig:
    """Read and check `config.json` of a decoder that generates. Raises `NotAModelDirectory` or `UnsupportedModel`."""
    config = read_model_json(directory)
    name = architecture_of(config)
    if name in EMBEDDERS:
        raise UnsupportedModel(f"architecture {name} gives embeddings (LLM.embed) and generates no text")
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    return parse_model_config(config, generation)


def load_embedder_config(directory: Path) -> ModelConfig:
    """Read and check `config.json` of a decoder, with an output head or without. Raises as `load_model_config`."""
    return parse_model_config(read_model_json(directory), {})


def architecture_of(config: JsonObject) -> str:
    """The first supported architecture that `config.json` names. Raises `UnsupportedModel` with the list of them."""
    architectures = config.get("architectures")
    supported = f"{', '.join(sorted(FAMILIES))}; for embeddings only: {', '.join(EMBEDDERS)}"
    if not isinstance(architectures, list) or not architectures:
        raise UnsupportedModel(f"config.json names no architecture; supported: {supported}")
    for name in map(str, architectures):
        if name in FAMILIES or name in EMBEDDERS:
            return name
    raise UnsupportedModel(f"architecture {', '.join(map(str, architectures))} is not supported; supported: {supported}")


def stored_dtype(config: JsonObject) -> str:
    """The format that `config.json` names for the weights, float32 where it names none. `torch_dtype` is its older key."""
    return str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")


def parse_model_config(config: JsonObject, generation: JsonObject) -> ModelConfig:
    """The checked form of `config.json` and `generation_config.json` of a decoder."""
    architecture = architecture_of(config)
    family = FAMILIES[HEADLESS.get(architecture, architecture)]
    config = _text_config(config, family)
    refuse_unsupported(config, family)
    hidden_size = positive(config, "hidden_size")
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads ({num_kv_heads})")
    head_dim = positive(config, "head_dim", default=family.head_dim or hidden_size // num_heads)
    if head_dim % 2 or not head_dim:
        raise UnsupportedModel(f"head_dim must be even, not {head_dim}")
    experts = _experts(config, family)
    layers, ropes, windows = _layers(config, family, head_dim, experts)
    attention_bias = family.reads_attention_bias and flag(config, "attention_bias")
    vocab_size = positive(config, "vocab_size")
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(config, "rms_norm_eps", family.norm_eps),
        max_position_len=max(positive(config, "max_position_embeddings"), *(rope.context_len for rope in ropes)),
        layers=layers,
        ropes=ropes,
        windows=windows,
        experts=experts,
        activation=_activation(config, family),
        has_head=architecture not in HEADLESS,
        tie_word_embeddings=flag(config, "tie_word_embeddings", default=family.tied),
        qkv_bias=family.always_qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and flag(config, "mlp_bias"),
        attention_scale=_attention_scale(config, family, head_dim),
        attention_softcap=_softcap(
            config, "attn_logit_softcapping", family.attention_softcap, reads=family.reads_attention_softcap
        ),
        logits_softcap=_softcap(config, "final_logit_softcapping", family.logits_softcap, reads=family.reads_logits_softcap),
        embedding_multiplier=_embedding_multiplier(config, family, hidden_size),
        residual_multiplier=_multiplier(config, family, "residual_multiplier"),
        logits_divisor=_multiplier(config, family, "logits_scaling"),
        torch_dtype=stored_dtype(config),
        eos_token_ids=_eos_token_ids(config, generation, vocab_size),
        quantization=parse_quantization(config),
    )


def _text_config(config: JsonObject, family: Family) -> JsonObject:
    """The configuration of the decoder: all of `config`, or its `text_config` where the model has other parts. `config` fills
    in what is missing there, and decides what holds for the whole model, as in transformers."""
    if family.text_part is None:
        return config
    text = {key: value for key, value in mapping(config, "text_config").items() if value is not None}
    if not text:
        raise UnsupportedModel(f"config.json: text_config is missing, which {family.architecture} must have")
    whole = {key: config[key] for key in OF_WHOLE_MODEL if config.get(key) is not None}
    return {**family.text_part.defaults, **config, **text, **whole}


def refuse_unsupported(config: JsonObject, family: Family | None = None) -> None:
    """Raise `UnsupportedModel` for an option that changes the result and is not supported. `family`: None for an encoder."""
    if family is None and config.get(QUANTIZATION):
        raise UnsupportedModel(f"config.json: {QUANTIZATION} is not supported for encoders; supported: unquantised weights")
    if config.get("use_bidirectional_attention") or config.get("is_causal", True) is not True:
        raise UnsupportedModel("use_bidirectional_attention and is_causal = false are not supported for decoders")
    for key in ("clip_qkv", "lm_head_bias", "add_cross_attention", "is_decoder"):
        if config.get(key):
            raise UnsupportedModel(f"{key} {config[key]!r} is not supported")
    partial = number(config, "partial_rotary_factor", 1.0)
    if partial != 1.0 and not (family and family.reads_partial_rotary):
        raise UnsupportedModel(f"partial_rotary_factor {partial} is not supported; supported: 1.0")


def _multiplier(config: JsonObject, family: Family, key: str) -> float:
    return number(config, key, 1.0) if family.reads_multipliers else 1.0


def _embedding_multiplier(config: JsonObject, family: Family, hidden_size: int) -> float:
    return math.sqrt(hidden_size) if family.scaled_embedding else _multiplier(config, family, "embedding_multiplier")


def _softcap(config: JsonObject, key: str, default: float | None, *, reads: bool) -> float | None:
    if not reads or config.get(key, default) is None:
        return None
    return number(config, key, default)


def _attention_scale(config: JsonObject, family: Family, head_dim: int) -> float:
    if family.reads_multipliers:
        return number(config, "attention_multiplier", 1.0)
    if family.reads_query_scalar:
        return float(number(config, "query_pre_attn_scalar", 256.0) ** -0.5)
    return float(head_dim**-0.5)


def _activation(config: JsonObject, family: Family) -> str:
    activation = config.get(family.activation_key, family.activation)
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"{family.activation_key} {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return str(activation)


def _experts(config: JsonObject, family: Family) -> ExpertsConfig | None:
    if family.experts is None:
        return None
    key = "num_local_experts" if "num_local_experts" in config else "num_experts"
    num_experts, num_chosen = positive(config, key, at_most=EXPERTS_MAX), positive(config, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise UnsupportedModel(f"num_experts_per_tok ({num_chosen}) must be at most {key} ({num_experts})")
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=positive(config, family.experts.size_key),
        normalised=family.experts.always_normalised or flag(config, "norm_topk_prob"),
    )


def _layers(
    config: JsonObject, family: Family, head_dim: int, experts: ExpertsConfig | None
) -> tuple[tuple[LayerConfig, ...], tuple[RopeConfig, ...], tuple[int | None, ...]]:
    """The layers with the distinct rotations and windows that they point to."""
    windows_by_layer = layer_windows(config, family, positive(config, "num_hidden_layers", at_most=LAYERS_MAX))
    windows = tuple(dict.fromkeys(windows_by_layer))
    ropes = _ropes(config, family, head_dim)
    dense, step = integers(config, "mlp_only_layers"), positive(config, "decoder_sparse_step", default=1)
    layers = tuple(
        LayerConfig(
            rope_idx=1 if len(ropes) == 2 and window is not None else 0,
            window_idx=windows.index(window),
            is_sparse=experts is not None and index not in dense and (index + 1) % step == 0,
        )
        for index, window in enumerate(windows_by_layer)
    )
    return layers, ropes, windows


def _ropes(config: JsonObject, family: Family, head_dim: int) -> tuple[RopeConfig, ...]:
    """The rotation of the layers without a window, and that of the layers with one where it differs."""
    key = "original_max_position_embeddings"
    original = family.original_max_len if config.get(key) is None else positive(config, key)
    defaults = RopeDefaults(
        theta=number(config, "rope_theta", family.rope_theta),
        head_dim=head_dim,
        max_position_len=positive(config, "max_position_embeddings"),
        original_max_len=original,
        partial_rotary_factor=number(config, "partial_rotary_factor", 1.0),
    )
    settings = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    if not family.reads_partial_rotary and number(settings, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModel(f"partial_rotary_factor {settings['partial_rotary_factor']} is not supported; supported: 1.0")
    if family.architecture == "Phi3ForCausalLM" and (settings.get("rope_type") or settings.get("type")) in ("su", "yarn"):
        settings = {**settings, "rope_type": "longrope", "type": "longrope"}  # its older names for LongRoPE
    if family.local_rope_theta is None:
        return (parse_rope(settings, defaults),)
    nested = "full_attention" in settings or "sliding_attention" in settings
    local_theta = number(config, "rope_local_base_freq", family.local_rope_theta)
    global_rope = parse_rope(mapping(settings, "full_attention") if nested else settings, defaults)
    local_rope = parse_rope(mapping(settings, "sliding_attention") if nested else {}, replace(defaults, theta=local_theta))
    return global_rope, local_rope


def _eos_token_ids(config: JsonObject, generation: JsonObject, vocab_size: int) -> tuple[int, ...]:
    """The ids of generation_config.json if it names any; else of config.json. Ids outside the vocabulary, as in configurations
    that were cut down or name -1, are left out: no step chooses them, and samplers use ids as indices of a row of logits."""
    ids = integers(generation, "eos_token_id") or integers(config, "eos_token_id")
    return tuple(token_id for token_id in ids if 0 <= token_id < vocab_size)
