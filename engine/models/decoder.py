"""The decoder that all supported families share: token ids of a batch in, hidden states of its rows out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.config.model import ModelConfig
from engine.layers.attention import Attention
from engine.layers.experts import SparseMLP
from engine.layers.forward_inputs import ForwardInputs
from engine.layers.linear import FusedLinear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.models.fused_layers import FusedLayer, FusedLayers
from engine.weights import LinearStorage, WeightPlan
from kernels import ops


class DecoderLayer:
    """Attention and feed-forward part, each normalised before, after or both, and added to the residual stream."""

    def __init__(
        self, config: ModelConfig, index: int, *, dtype: torch.dtype, device: torch.device, batch_invariant: bool
    ) -> None:
        layer = config.layers[index]
        self._attention = Attention(config, layer, dtype=dtype, device=device, batch_invariant=batch_invariant)
        self._mlp = _feed_forward(
            config, is_sparse=layer.is_sparse, dtype=dtype, device=device, batch_invariant=batch_invariant
        )
        self._norms = {
            name: RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device, offset=config.family.norm_offset)
            for name in config.family.norms.value
            if name is not None
        }
        norms = [None if name is None else self._norms[name] for name in config.family.norms.value]
        self._before_attention, self._after_attention, self._before_mlp, self._after_mlp = norms
        self._multiplier = config.residual_multiplier
        self._eps = config.rms_norm_eps
        self._ops = ops.operations(device, dtype)

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
        for before, module in ((self._before_attention, self._attention), (self._before_mlp, self._mlp)):
            if before is not None:
                before.set_consumer(takes_fp8_rows=not isinstance(module, SparseMLP) and module.takes_fp8_rows)

    def scale_kv(self) -> bool:
        return self._attention.scale_kv()

    @property
    def has_host_sync(self) -> bool:
        return isinstance(self._mlp, SparseMLP) and self._mlp.has_host_sync

    def fused(self, dtype: torch.dtype) -> FusedLayer | None:
        """The layer for steps of few rows, once it is packed; None where it cannot be fused."""
        norms = (self._before_attention, self._after_attention, self._before_mlp, self._after_mlp)
        return FusedLayer.of(self._attention, self._mlp, norms, dtype)

    @property
    def input_norm(self) -> RMSNorm | None:
        """The norm before attention. The previous layer applies it when it adds to the residual stream."""
        return self._before_attention

    def __call__(
        self,
        x: torch.Tensor | ops.Fp8Rows,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        kv_cache: torch.Tensor | None,
        next_norm: RMSNorm | None,
        sampled_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor | ops.Fp8Rows, torch.Tensor]:
        """x: residual normalised by `input_norm`, both [T, hidden] → the new residual normalised by `next_norm`, and itself,
        both [R, hidden]. Attention is computed for all rows, the rest only for `sampled_rows`; None is all of them."""
        x, slots = self._attention(x, inputs, kv_cache), None if kv_cache is None else inputs.slot_mapping
        if sampled_rows is not None:
            x, residual, slots = x.index_select(0, sampled_rows), residual.index_select(0, sampled_rows), None
            if not len(sampled_rows):
                return residual, residual
        branch = self._attention.output_projection(x)
        x, residual = self._add_norm(branch, residual, self._after_attention, self._before_mlp)
        branch = self._mlp(_unquantised(x), slots) if isinstance(self._mlp, SparseMLP) else self._mlp(x)
        return self._add_norm(branch, residual, self._after_mlp, next_norm)

    def _add_norm(
        self, branch: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None, before: RMSNorm | None
    ) -> tuple[torch.Tensor | ops.Fp8Rows, torch.Tensor]:
        alpha, branch_weight = self._multiplier, None if after is None else after.weight
        if before is not None:
            return before.add_norm_for_consumer(branch, residual, alpha=alpha, branch_weight=branch_weight)
        return self._ops.add_rms_norm(branch, residual, None, self._eps, alpha=alpha, branch_weight=branch_weight)


def _unquantised(x: torch.Tensor | ops.Fp8Rows) -> torch.Tensor:
    assert isinstance(x, torch.Tensor), "rows in 8 bits are for a product with such weights alone"
    return x


def _feed_forward(
    config: ModelConfig, *, is_sparse: bool, dtype: torch.dtype, device: torch.device, batch_invariant: bool
) -> GatedMLP | SparseMLP:
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
            batch_invariant=batch_invariant,
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

    Weights are uninitialised until `engine.weights` fills the plan.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, batch_invariant: bool = False) -> None:
        """`batch_invariant`: packed weights and the other operations compute the same bits for a row in any batch."""
        self.config, self.dtype, self.device, self.batch_invariant = config, dtype, device, batch_invariant
        self._embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self._layers = [
            DecoderLayer(config, index, dtype=dtype, device=device, batch_invariant=batch_invariant)
            for index in range(config.num_layers)
        ]
        self._later_norms = tuple(layer.input_norm for layer in self._layers[1:])
        offset = config.family.norm_offset
        self._norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device, offset=offset)
        self._head: FusedLinear | None = None
        if config.has_head:
            self._head = FusedLinear(
                [("lm_head", config.vocab_size)], config.hidden_size, bias=False, dtype=dtype, device=device
            )
            if config.tie_word_embeddings:
                self._head.tie(self._embedding)
        self.greedy_head: Callable[[torch.Tensor], torch.Tensor] | None = None
        """Takes a few rows [B, hidden] and returns the tokens with the largest logits, [B] int64. None if no kernel does it."""
        self._ops = ops.operations(device, dtype, batch_invariant=batch_invariant)
        # The multiplier is rounded to the format of the embeddings, as the reference implementations do.
        self._multiplier = torch.tensor(config.embedding_multiplier, dtype=dtype).item()
        self._fused: FusedLayers | None = None
        self._softcap, self._divisor = config.logits_softcap, config.logits_divisor

    def weight_plan(self, storage: LinearStorage | None = None) -> WeightPlan:
        """What the checkpoint must hold. `storage`: how its linear modules are stored, None is as plain tensors."""
        plan = WeightPlan(optional_prefix="model.", storage=storage)
        part = self.config.family.text_part
        if part is not None:
            plan.renamed, plan.ignored = part.renamed, part.ignored
        plan.add("model.embed_tokens.weight", self._embedding)
        for index, layer in enumerate(self._layers):
            layer.plan(plan, f"model.layers.{index}")
        self._norm.plan(plan, "model.norm")
        if self._head is not None and self.config.tie_word_embeddings:
            plan.tied["lm_head.weight"] = "model.embed_tokens.weight"
        elif self._head is not None:
            self._head.plan(plan)
        return plan

    def pack(self, packer: ops.LinearPacker = ops.pack_linear, head_packer: ops.LinearPacker | None = None) -> None:
        """Bind the loaded weights to kernels. A tied embedding is kept besides its packed copy, for lookups of rows.

        `head_packer` is for an output head that is not packed yet, None is `packer`."""
        for layer in self._layers:
            layer.pack(packer)
        self._norm.pack()
        if self._head is not None:
            self._head.pack(head_packer or packer)
        self.greedy_head = self._bind_greedy_head()
        self._fused = self._fuse()

    def _bind_greedy_head(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Bind it to the weights that `logits` multiplies with, if nothing follows that product."""
        bind, head = self._ops.bind_greedy_head, None if self._head is None else self._head.fusible
        if bind is None or head is None or self._softcap is not None or self._divisor != 1.0:
            return None
        return bind(head.weight)

    @property
    def has_host_sync(self) -> bool:
        """Whether a step waits for the host somewhere between its layers, so that it cannot be captured."""
        return any(layer.has_host_sync for layer in self._layers)

    def _fuse(self) -> FusedLayers | None:
        linear_add, normed_linear = self._ops.linear_add, self._ops.normed_linear
        if linear_add is None or normed_linear is None:
            return None
        layers = [layer.fused(self.dtype) for layer in self._layers]
        fused = [layer for layer in layers if layer is not None]
        if len(fused) < len(layers):
            return None
        return FusedLayers(fused, linear_add, normed_linear, multiplier=self.config.residual_multiplier, eps=self._norm.eps)

    def scale_kv(self) -> bool:
        """Keep keys and values in 8 bits from now on. Returns whether the checkpoint had scales for every layer."""
        calibrated = [layer.scale_kv() for layer in self._layers]
        return all(calibrated)

    def __call__(
        self,
        inputs: ForwardInputs,
        kv_caches: Sequence[torch.Tensor] | None,
        before_layer: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """Hidden states of the rows that sample: [B_sampled, hidden]; keys and values of all T tokens go to the caches.

        Without caches every text of the batch must be whole, and nothing is kept of it. `before_layer` is called before each
        layer of a step that is being recorded; all of its rows sample.
        """
        if before_layer is not None:
            return self._run_layers(self._embed(inputs), inputs, kv_caches, before_layer)
        if self._fused is not None and kv_caches is not None and len(inputs.token_ids) <= ops.FUSED_ROWS_MAX:
            x = self._fused(self._embed(inputs), inputs, kv_caches, self._norm)
            return self._norm(x if inputs.sampled_rows is None else x.index_select(0, inputs.sampled_rows))
        return self._run_layers(self._embed(inputs), inputs, kv_caches)  # holds the only reference, so it can free the rows

    def _embed(self, inputs: ForwardInputs) -> torch.Tensor:
        return self._ops.embed(inputs.token_ids, self._embedding, multiplier=self._multiplier)

    def _run_layers(
        self,
        residual: torch.Tensor,
        inputs: ForwardInputs,
        kv_caches: Sequence[torch.Tensor] | None,
        before_layer: Callable[[], None] = lambda: None,
    ) -> torch.Tensor:
        """Run all layers: [T, hidden] → [R, hidden], the sampled rows, normalised. After the last layer's attention the other
        rows are not read, so nothing is computed for them."""
        first = self._layers[0].input_norm
        rows: torch.Tensor | ops.Fp8Rows = residual if first is None else first.norm_for_consumer(residual)
        norms = (*self._later_norms, self._norm)
        caches = (None,) * len(norms) if kv_caches is None else kv_caches
        for layer, kv_cache, next_norm in zip(self._layers, caches, norms, strict=True):
            before_layer()
            sampled_rows = inputs.sampled_rows if layer is self._layers[-1] else None
            rows, residual = layer(rows, residual, inputs, kv_cache, next_norm, sampled_rows)
        return _unquantised(rows)

    def logits(self, hidden: torch.Tensor, *, wide: bool = True) -> torch.Tensor:
        """hidden: [B, hidden] → [B, V] float32; unless `wide`, in the format of the product where nothing follows it"""
        assert self._head is not None, "there is no head"
        logits = self._head(hidden)
        if self._divisor != 1.0 or self._softcap is not None:
            return self._ops.cap_logits(logits.float(), divisor=self._divisor, softcap=self._softcap)
        return logits.float() if wide else logits
