"""The configuration of an encoder in a model directory (BERT, arXiv 1810.04805; RoBERTa, 1907.11692). Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.config.model import LAYERS_MAX, architecture_of, read_model_json, refuse_unsupported, stored_dtype
from engine.config.values import JsonObject, number, positive
from engine.errors import UnsupportedModel
from engine.number_checks import is_integer

ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh")  # the last two are one function


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Shape of an encoder. The first token of a text has the position `first_position` in the table of positions."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    layer_norm_eps: float
    num_positions: int
    first_position: int
    num_token_types: int
    activation: str
    torch_dtype: str

    @property
    def max_position_len(self) -> int:
        """Tokens of the longest text."""
        return self.num_positions - self.first_position


def load_encoder_config(directory: Path) -> EncoderConfig:
    """Read and check `config.json` of an encoder. Raises `NotAModelDirectory` or `UnsupportedModel`."""
    config = read_model_json(directory)
    architecture = architecture_of(config)
    refuse_unsupported(config)
    _refuse_other_encoders(config)
    hidden_size, num_heads = positive(config, "hidden_size"), positive(config, "num_attention_heads")
    if hidden_size % num_heads:
        raise UnsupportedModel(f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_heads})")
    num_positions = positive(config, "max_position_embeddings")
    first_position = 0 if architecture == "BertModel" else _padding_id(config) + 1
    if first_position >= num_positions:
        raise UnsupportedModel(
            f"max_position_embeddings ({num_positions}) must be larger than pad_token_id ({first_position - 1}) + 1"
        )
    return EncoderConfig(
        architecture=architecture,
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=positive(config, "intermediate_size"),
        num_layers=positive(config, "num_hidden_layers", at_most=LAYERS_MAX),
        num_heads=num_heads,
        head_dim=hidden_size // num_heads,
        layer_norm_eps=number(config, "layer_norm_eps", 1e-12),
        num_positions=num_positions,
        first_position=first_position,
        num_token_types=positive(config, "type_vocab_size"),
        activation=str(config.get("hidden_act", "gelu")),
        torch_dtype=stored_dtype(config),
    )


def _refuse_other_encoders(config: JsonObject) -> None:
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"hidden_act {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    positions = config.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise UnsupportedModel(f"position_embedding_type {positions!r} is not supported; supported: absolute")


def _padding_id(config: JsonObject) -> int:
    padding_id = config.get("pad_token_id", 1)
    if not is_integer(padding_id) or padding_id < 0:
        raise UnsupportedModel(f"config.json: pad_token_id must be an integer from 0 on, not {padding_id!r}")
    return padding_id
