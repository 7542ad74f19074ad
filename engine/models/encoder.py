"""Encoders of the BERT kind: whole texts in, hidden states of their tokens out; attention is bidirectional."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.config.encoder import EncoderConfig
from engine.layers.forward_inputs import ForwardInputs
from engine.layers.linear import FusedLinear
from engine.layers.norm import LayerNorm
from engine.weights import WeightPlan
from kernels import ops


class EncoderLayer:
    """Attention and feed-forward part, each added to its input and then normalised."""

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        parts = [("query", hidden), ("key", hidden), ("value", hidden)]
        self._qkv = FusedLinear(parts, hidden, bias=True, dtype=dtype, device=device)
        self._out = FusedLinear([("dense", hidden)], hidden, bias=True, dtype=dtype, device=device)
        self._attention_norm = LayerNorm(hidden, config.layer_norm_eps, dtype=dtype, device=device)
        self._up = FusedLinear([("dense", inner)], hidden, bias=True, dtype=dtype, device=device)
        self._down = FusedLinear([("dense", hidden)], inner, bias=True, dtype=dtype, device=device)
        self._output_norm = LayerNorm(hidden, config.layer_norm_eps, dtype=dtype, device=device)
        self._ops = ops.operations(device, dtype)
        self._activate = ops.gelu if config.activation == "gelu" else ops.gelu_tanh

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        self._qkv.plan(plan, f"{prefix}.attention.self")
        self._out.plan(plan, f"{prefix}.attention.output")
        self._attention_norm.plan(plan, f"{prefix}.attention.output.LayerNorm")
        self._up.plan(plan, f"{prefix}.intermediate")
        self._down.plan(plan, f"{prefix}.output")
        self._output_norm.plan(plan, f"{prefix}.output.LayerNorm")

    def pack(self) -> None:
        for linear in (self._qkv, self._out, self._up, self._down):
            linear.pack()

    def __call__(self, x: torch.Tensor, attention: ops.AnyPlan) -> torch.Tensor:
        """x: [T, hidden] → [T, hidden]"""
        qkv = self._qkv(x).view(-1, 3 * self._num_heads, self._head_dim)
        attended = ops.paged_attention(self._ops, qkv, None, attention).flatten(1)
        x = self._attention_norm(x + self._out(attended))
        return self._output_norm(x + self._down(self._activate(self._up(x))))


class Encoder:
    """Embeddings and layers. The checkpoint's pooler, which only training used, is ignored."""

    def __init__(self, config: EncoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        hidden = config.hidden_size
        self._word_embeddings = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
        self._position_embeddings = torch.empty(config.num_positions, hidden, dtype=dtype, device=device)
        self._token_type_embeddings = torch.empty(config.num_token_types, hidden, dtype=dtype, device=device)
        self._norm = LayerNorm(hidden, config.layer_norm_eps, dtype=dtype, device=device)
        self._layers = [EncoderLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self._first_position = config.first_position

    def weight_plan(self) -> WeightPlan:
        plan = WeightPlan(ignored=("pooler.", "embeddings.position_ids", "embeddings.token_type_ids"))
        plan.add("embeddings.word_embeddings.weight", self._word_embeddings)
        plan.add("embeddings.position_embeddings.weight", self._position_embeddings)
        plan.add("embeddings.token_type_embeddings.weight", self._token_type_embeddings)
        self._norm.plan(plan, "embeddings.LayerNorm")
        for index, layer in enumerate(self._layers):
            layer.plan(plan, f"encoder.layer.{index}")
        return plan

    def pack(self) -> None:
        for layer in self._layers:
            layer.pack()

    def __call__(self, inputs: ForwardInputs, kv_caches: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Hidden states of `sampled_rows`: [R, hidden]. There is no cache, and all tokens have the first token type."""
        assert kv_caches is None, "an encoder keeps nothing"
        x = functional.embedding(inputs.token_ids, self._word_embeddings) + self._token_type_embeddings[0]
        x = self._norm(x + self._position_embeddings.index_select(0, inputs.positions + self._first_position))
        for layer in self._layers:
            x = layer(x, inputs.attention[0])
        assert inputs.sampled_rows is not None, "texts are pooled from the rows that were named"
        return x.index_select(0, inputs.sampled_rows)
