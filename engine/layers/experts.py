"""A mixture of experts as the feed-forward part: a router chooses a few for each token (arXiv 2401.04088)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.config.families import ExpertNames
from engine.config.model import ExpertsConfig
from engine.layers.linear import FusedLinear
from engine.layers.mlp import GatedMLP
from engine.weights import WeightPlan
from kernels import ops

Mixture = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""x: [T, hidden], the router's logits: [T, E], slots as of `SparseMLP.__call__` → [T, hidden]"""


class SparseMLP:
    """Router and experts. Only the experts that a step's tokens chose are computed, each once over all of its tokens."""

    def __init__(
        self,
        config: ExpertsConfig,
        names: ExpertNames,
        hidden_size: int,
        *,
        activation: str,
        dtype: torch.dtype,
        device: torch.device,
        batch_invariant: bool,
    ) -> None:
        self._config = config
        self._ops = ops.operations(device, batch_invariant=batch_invariant)
        self._block = names.block
        self._router = FusedLinear([("gate", config.num_experts)], hidden_size, bias=False, dtype=dtype, device=device)
        self._experts = [
            GatedMLP(
                hidden_size,
                config.intermediate_size,
                activation=activation,
                bias=False,
                dtype=dtype,
                device=device,
                gate_up=(names.gate, names.up),
                down=names.down,
            )
            for _ in range(config.num_experts)
        ]
        self._mixture: Mixture | None = None

    def plan(self, plan: WeightPlan, prefix: str) -> None:
        """`prefix` is the layer's; the families name what follows differently."""
        self._router.plan(plan, f"{prefix}.{self._block}")
        for index, expert in enumerate(self._experts):
            expert.plan(plan, f"{prefix}.{self._block}.experts.{index}")

    def pack(self, packer: ops.LinearPacker = ops.pack_linear) -> None:
        self._router.pack(packer)
        for expert in self._experts:
            expert.pack(packer)
        self._mixture = self._bind_experts()

    @property
    def has_host_sync(self) -> bool:
        """Whether a step waits for the host to read which experts were chosen, so that it cannot be captured."""
        return self._mixture is None

    def _bind_experts(self) -> Mixture | None:
        """All experts in one function, where there is such an operation and it can read their weights."""
        bind, route = self._ops.bind_experts, self._ops.route_live
        weights = [expert.weights for expert in self._experts]
        if bind is None or route is None or any(gate_up is None or down is None for gate_up, down in weights):
            return None
        gate_ups, downs = zip(*weights, strict=True)
        mix = bind(gate_ups, downs, self._experts[0].gate)
        if mix is None:
            return None
        choose = partial(route, num_chosen=self._config.num_chosen, normalised=self._config.normalised)

        def routed(x: torch.Tensor, logits: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
            return mix(x, *choose(logits, slots=slots))

        return routed

    def __call__(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, hidden] → [T, hidden]

        slots: [T], below 0 for rows of padding, whose experts need not be read and whose output is undefined. None where there
        are no such rows.
        """
        logits = self._router(x)
        if self._mixture is not None:
            return self._mixture(x, logits, slots)
        weights, expert_ids = self._ops.route(logits, self._config.num_chosen, normalised=self._config.normalised)
        return self._ops.mix_experts(x, weights, expert_ids, self._experts)
