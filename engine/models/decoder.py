"""The one decoder that every family here is an instance of: token ids of a batch in, hidden states of its rows out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.config.model import ModelConfig
from engine.layers.attention import Attention
from engine.layers.experts import SparseMLP
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.runner.batch_inputs import BatchInputs
from engine.runner.weights import WeightPlan
from kernels import ops


class DecoderLayer:
    """Attention and feed-forward part, each normalised before, after or both, and added to the residual stream."""

    def __init__(self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device) -> None:
        layer = config.layers[index]
        self._attention = Attention(config, layer, dtype=dtype, device=device)
        self._mlp = _feed_forward(config, is_sparse=layer.is_sparse, dtype=dtype, device=device)
        self._norms = {
            name: RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device, offset=config.family.norm_offset)
            for name in config.family.norms.value
            if name is not None
        }
        norms = [None if name is None else self._norms[name] for name in config.family.norms.value]
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = norms
        self._multiplier = config.residual_multiplier

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        self._attention.plan(plan, f"{prefix}.self_attn")
        self._mlp.plan(plan, prefix if isinstance(self._mlp, SparseMLP) else f"{prefix}.mlp")
        for name, norm in self._norms.items():
            norm.plan(plan, f"{prefix}.{name}")

    def pack(self, packer: ops.LinearPacker) -> None:
        self._attention.pack(packer)
        self._mlp.pack(packer)
        for norm in self._norms.values():
            norm.pack()

    def __call__(self, x: torch.Tensor, inputs: BatchInputs, kv_cache: torch.Tensor | None) -> torch.Tensor:
        """x: [T, hidden] → [T, hidden]"""
        branch = self._attention(_normed(x, self._before_attention), inputs, kv_cache)
        x = self._add(x, _normed(branch, self._after_attention))
        branch = self._mlp(_normed(x, self._before_mlp))
        return self._add(x, _normed(branch, self._after_mlp))

    def _add(self, x: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """A sum without a multiplier costs a quarter less on one row, twice a layer."""
        return x + branch if self._multiplier == 1.0 else torch.add(x, branch, alpha=self._multiplier)


def _normed(x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
    return x if norm is None else norm(x)


def _feed_forward(config: ModelConfig, *, is_sparse: bool, dtype: torch.dtype, device: torch.device) -> GatedMLP | SparseMLP:
    if is_sparse:
        assert config.experts is not None
        assert config.family.experts is not None
        return SparseMLP(
            config.experts,
            config.family.experts,
            config.hidden_size,
            activation=config.activation,
            dtype=dtype,
            device=device,
        )
    return GatedMLP(
        config.hidden_size,
        config.intermediate_size,
        activation=config.activation,
        bias=config.mlp_bias,
        dtype=dtype,
        device=device,
        gate_up=("gate_up_proj",) if config.family.fused_projections else ("gate_proj", "up_proj"),
    )


class Decoder:
    """Embedding, layers, final norm and, but for models that only embed, the output head.

    Weights are uninitialised until `runner.weights` fills the plan.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [DecoderLayer(config, index, dtype=dtype, device=device) for index in range(config.num_layers)]
        offset = config.family.norm_offset
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device, offset=offset)
        self._head: torch.Tensor | None = None
        if config.has_head:
            self._head = self._embedding if config.tie_word_embeddings else torch.empty_like(self._embedding)
        self._head_kernel: ops.LinearKernel | None = None
        # The multiplier is rounded to the format of the embeddings, as the reference implementations do.
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype).item()
        self._softcap, self._divisor = config.logits_softcap, config.logits_divisor

    def weight_plan(self) -> WeightPlan:
        plan = WeightPlan(optional_prefix="model.")
        plan.add("model.embed_tokens.weight", self._embedding)
        for index, layer in enumerate(self._layers):
            layer.plan(plan, f"model.layers.{index}")
        self._norm.plan(plan, "model.norm")
        if self._head is self._embedding:
            plan.twins["lm_head.weight"] = "model.embed_tokens.weight"
        elif self._head is not None:
            plan.add("lm_head.weight", self._head)
        return plan

    def pack(self, packer: ops.LinearPacker = ops.pack_linear) -> None:
        """Bind the loaded weights to kernels. A tied embedding is kept beside its packed twin: rows are looked up in it."""
        for layer in self._layers:
            layer.pack(packer)
        self._norm.pack()
        if self._head is not None:
            self._head_kernel = packer(self._head, None)
            self._head = None

    def __call__(self, inputs: BatchInputs, kv_caches: Sequence[torch.Tensor] | None) -> torch.Tensor:
        """Hidden states of the rows that sample: [B_sampled, hidden]; keys and values of all T tokens go to the caches.

        Without caches every text of the batch must be whole, and nothing is kept of it.
        """
        x = functional.embedding(inputs.token_ids, self._embedding)
        if self._multiplier != 1.0:
            x = x * self._multiplier
        for index, layer in enumerate(self._layers):
            x = layer(x, inputs, None if kv_caches is None else kv_caches[index])
        return self._norm(x.index_select(0, inputs.sampled_rows))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [B, hidden] → [B, V] float32"""
        assert self._head_kernel is not None, "the weights are not packed yet, or there is no head"
        logits = self._head_kernel(hidden).float()
        if self._divisor != 1.0:
            logits.div_(self._divisor)
        return logits if self._softcap is None else logits.div_(self._softcap).tanh_().mul_(self._softcap)
