"""The one decoder that every family here is an instance of: token ids of a batch in, hidden states of its rows out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.batch_inputs import BatchInputs
from engine.config import ModelConfig
from engine.layers.attention import Attention
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.weights import WeightPlan
from kernels import ops


class DecoderLayer:
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self._attention = Attention(config, dtype=dtype, device=device)
        self._post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self._mlp = GatedMLP(config, dtype=dtype, device=device)

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        self._input_norm.plan(plan, f"{prefix}.input_layernorm")
        self._attention.plan(plan, f"{prefix}.self_attn")
        self._post_norm.plan(plan, f"{prefix}.post_attention_layernorm")
        self._mlp.plan(plan, f"{prefix}.mlp")

    def pack(self) -> None:
        self._attention.pack()
        self._mlp.pack()

    def __call__(self, x: torch.Tensor, inputs: BatchInputs, kv_cache: torch.Tensor) -> torch.Tensor:
        x = x + self._attention(self._input_norm(x), inputs, kv_cache)
        return x + self._mlp(self._post_norm(x))


class Decoder:
    """Embedding, layers, final norm and the output head. Weights are uninitialised until `engine.weights` fills the plan."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [DecoderLayer(config, dtype=dtype, device=device) for _ in range(config.num_layers)]
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self._head: torch.Tensor | None = self._embedding if config.tie_word_embeddings else torch.empty_like(self._embedding)
        self._head_kernel: ops.LinearKernel | None = None

    def weight_plan(self) -> WeightPlan:
        plan = WeightPlan()
        plan.add("model.embed_tokens.weight", self._embedding)
        for index, layer in enumerate(self._layers):
            layer.plan(plan, f"model.layers.{index}")
        self._norm.plan(plan, "model.norm")
        if self._head is self._embedding:
            plan.twins["lm_head.weight"] = "model.embed_tokens.weight"
        elif self._head is not None:
            plan.add("lm_head.weight", self._head)
        return plan

    def pack(self) -> None:
        """Bind the loaded weights to kernels. A tied embedding is kept beside its packed twin: rows are looked up in it."""
        assert self._head is not None, "the weights are packed already"
        for layer in self._layers:
            layer.pack()
        self._head_kernel = ops.pack_linear(self._head, None)
        self._head = None

    def __call__(self, inputs: BatchInputs, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hidden states of the rows that sample: [B_sampled, hidden]; keys and values of all T tokens go to the caches."""
        x = functional.embedding(inputs.token_ids, self._embedding)
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            x = layer(x, inputs, kv_cache)
        return self._norm(x.index_select(0, inputs.sampled_rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [B, hidden] → [B, V] float32"""
        assert self._head_kernel is not None, "the weights are not packed yet"
        return self._head_kernel(hidden).float()
