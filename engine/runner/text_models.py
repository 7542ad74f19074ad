"""Loads models that give embeddings and generate no text: encoders, and decoders whose checkpoint has no output head."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from engine.config.encoder import load_encoder_config
from engine.config.model import EMBEDDERS, ENCODERS, architecture_of, load_embedder_config, read_model_json
from engine.device import device_capability, format_name, resolve_device, resolve_dtype
from engine.environment import default_threads
from engine.errors import EngineConfigError
from engine.formats import check_formats
from engine.layers.attention import attention_shapes
from engine.layers.rotary import RotaryTable
from engine.memory.forecast import check_text_decoder, check_weights
from engine.models.encoder import Encoder
from engine.models.loading import load_decoder
from engine.options import EngineOptions
from engine.runner.embedder import TextModel
from engine.switches import check_switches
from engine.weights import WeightsSize, load_weights
from kernels import ops

GENERATION_OPTIONS = ("speculative_config", "batch_invariant", "swap_space", "kv_cache_dtype", "shared_prefixes")
"""Options that promise something of generated text or of its cache. Those that set limits hold where there is neither."""


def is_embedding_model(directory: Path) -> bool:
    """Whether no text can be generated with the model of this directory. Raises `ModelError`."""
    return architecture_of(read_model_json(directory)) in EMBEDDERS


def load_text_model(options: EngineOptions) -> TextModel:
    """Load a model for embeddings. Raises `ModelError` or `EngineConfigError`, before anything is loaded for what contradicts
    itself, the model, the device or its memory."""
    for option in fields(options):
        if option.name in GENERATION_OPTIONS and getattr(options, option.name) != option.default:
            raise EngineConfigError(option.name, "is not supported for a model that gives embeddings and generates no text")
    check_switches()
    torch.set_num_threads(options.threads or default_threads())
    device = resolve_device(options.device)
    is_encoder = architecture_of(read_model_json(options.model)) in ENCODERS
    return _load_encoder(options, device) if is_encoder else _load_decoder(options, device)


def _load_encoder(options: EngineOptions, device: torch.device) -> TextModel:
    for option in ("quantization", "head_quantization"):
        if getattr(options, option) is not None:
            raise EngineConfigError(option, "is not supported for encoders")
    config = load_encoder_config(options.model)
    dtype = resolve_dtype(options.dtype, config.torch_dtype, device)
    max_len = _max_len(options, config.max_position_len)
    unloaded = Encoder(config, dtype=dtype, device=torch.device("meta"))
    check_weights(_name(options), WeightsSize.of(unloaded.weight_plan()).num_bytes, options, device)
    encoder = Encoder(config, dtype=dtype, device=device)
    load_weights(options.model, encoder.weight_plan(), progress=lambda _: None)
    encoder.pack()
    shape = ops.AttentionShape(options.block_size, config.num_heads, config.num_heads, config.head_dim, causal=False)
    return TextModel(
        forward=encoder,
        rotaries=(),
        planners=(ops.GatheredPlanner(shape, dtype=dtype, device=device),),
        vocab_size=config.vocab_size,
        max_len=max_len,
        device=device,
        default_pooling="mean",
    )


def _load_decoder(options: EngineOptions, device: torch.device) -> TextModel:
    ops.put_in_force(ops.oldest_alternatives())  # no steps by which kernels could be timed, and no marks for new ones
    config = load_embedder_config(options.model)
    dtype = resolve_dtype(options.dtype, config.torch_dtype, device)
    max_len = _max_len(options, config.max_position_len)
    check_formats(config, options, format_name(dtype), device_capability(device))
    check_text_decoder(_name(options), config, options, max_len=max_len, dtype=dtype, device=device)
    model = load_decoder(
        options.model,
        config,
        dtype=dtype,
        device=device,
        quantization=options.quantization,
        head_quantization=options.head_quantization,
    )
    rotaries = [RotaryTable(rope, max_len, dtype=dtype, device=device) for rope in config.ropes]
    return TextModel.of_decoder(model.decoder, rotaries, attention_shapes(config, options.block_size), max_len)


def _name(options: EngineOptions) -> str:
    return options.name or options.model.name


def _max_len(options: EngineOptions, max_position_len: int) -> int:
    max_len = options.max_model_len or max_position_len
    if max_len > max_position_len:
        raise EngineConfigError("max_model_len", f"({max_len}) is longer than the model's context ({max_position_len})")
    return max_len
