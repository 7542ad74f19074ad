"""How long one step takes on a given device, from the shape of the model: the planner's formulae. Knows no torch.

A step that computes B decode tokens and T prefill tokens reads every weight once and multiplies B + T rows by it, reads the
keys and values of every context, and does the causal attention of the prefill chunks:

    max(W / BW, (2·L·P·(B+T) + 2·V·d·rows) / FL) + kv·Σ context / BW + 4·L·H·D·Σ chunk·(start + chunk/2) / FL + host
        + depth·draft

W bytes of layers and output head, P weights of one layer, kv bytes of one token's keys and values, rows that are sampled.
The draft model computes all tokens of the step too, which is measured as a part of BW and FL. `depth` is the largest number of
drafts per request; each takes a small step of the draft model before the step that verifies them.
BW and FL are what the device was measured to reach, times an efficiency. The same linear costs, as integers, are what the
scheduler charges tenants with: `token_costs`.

The roofline form follows Williams et al., "Roofline", CACM 2009; splitting a step into matrix products, cache reads and
prefill attention follows Agrawal et al., Sarathi-Serve, arXiv 2403.02310, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.model import ModelConfig, kv_elements_per_token
from engine.scheduling.costs import TokenCosts
from engine.scheduling.scheduled_batch import ScheduledBatch

PS = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a decoder that determine its speed. With experts, `intermediate_size` is that of one expert."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 1
    num_chosen_experts: int = 1

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShape:
        experts = config.experts
        return cls(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size if experts is None else experts.intermediate_size,
            vocab_size=config.vocab_size,
            num_experts=1 if experts is None else experts.num_experts,
            num_chosen_experts=1 if experts is None else experts.num_chosen,
        )

    @property
    def attention_params(self) -> int:
        """Weights of one layer's four projections."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_params(self) -> int:
        """Weights of one feed-forward part: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Weights of all matrices that are multiplied: an embedding counts only where it is the head as well."""
        return self.num_layers * (self.attention_params + self.num_experts * self.expert_params) + self.head_params

    def kv_token_bytes(self, element_bytes: int) -> int:
        """Keys and values of one token in all layers."""
        return kv_elements_per_token(self.num_layers, self.num_kv_heads, self.head_dim) * element_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """Measured speed of a device in plain copies (bytes/s, read and written) and matrix products (flop/s), and its host
    link."""

    bandwidth: float
    flops: float
    link_bandwidth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The shares of the measured peaks that a step reaches, and the host time that is not hidden."""

    bandwidth: float = 0.80
    flops: float = 0.75
    host_s: float = 150e-6


class StepTimeModel:
    """Seconds of a step and prices of its parts, for one model on one device."""

    def __init__(
        self,
        shape: ModelShape,
        device: DeviceSpeed,
        *,
        weight_bytes: float = 2,
        kv_bytes: int = 2,
        block_size: int = 16,
        efficiency: Efficiency | None = None,
    ) -> None:
        reached = Efficiency() if efficiency is None else efficiency
        byte_s = 1 / (device.bandwidth * reached.bandwidth)
        flop_s = 1 / (device.flops * reached.flops)
        active = shape.attention_params + shape.num_chosen_experts * shape.expert_params
        self.shape = shape
        self.host_s = reached.host_s
        self.draft_step_s = 0.0
        """Seconds in which a draft model drafts one more token for every request."""
        self.dense_weights_s = weight_bytes * (shape.num_layers * shape.attention_params + shape.head_params) * byte_s
        self.expert_weights_s = weight_bytes * shape.num_layers * shape.num_experts * shape.expert_params * byte_s
        self.token_s = 2 * shape.num_layers * active * flop_s
        self.sampled_row_s = 2 * shape.head_params * flop_s
        self.context_s = shape.kv_token_bytes(kv_bytes) * byte_s
        self.pair_s = 4 * shape.num_layers * shape.num_heads * shape.head_dim * flop_s
        self.block_copy_s = block_size * shape.kv_token_bytes(kv_bytes) / device.link_bandwidth
        self._expert_unused_share = 1 - shape.num_chosen_experts / shape.num_experts

    def weights_s(self, num_tokens: int) -> float:
        """Time to read the weights that a batch of `num_tokens` uses: with experts, those that any token chose."""
        if not self._expert_unused_share:
            return self.dense_weights_s + self.expert_weights_s
        return self.dense_weights_s + self.expert_weights_s * (1 - self._expert_unused_share**num_tokens)

    def step_s(self, *, num_tokens: int, num_rows: int, context_tokens: float, attention_pairs: float) -> float:
        """Seconds of one step.

        `num_rows`: tokens that are sampled. `context_tokens`: cached tokens read, summed over requests.
        `attention_pairs`: Σ chunk·(start + chunk/2) over the prefill chunks.
        """
        products_s = self.token_s * num_tokens + self.sampled_row_s * num_rows
        return (
            max(self.weights_s(num_tokens), products_s)
            + self.context_s * context_tokens
            + self.pair_s * attention_pairs
            + self.host_s
        )

    def batch_s(self, batch: ScheduledBatch, attention_work: tuple[float, float] | None = None) -> float:
        """Seconds of one step over `batch`, with the moves of blocks and the drafts of a draft model before it.
        `attention_work`: context tokens and attention pairs, as of `step_s`; None counts those of layers without a window."""
        context_tokens, pairs = _attention_work(batch) if attention_work is None else attention_work
        num_rows = len(batch.decodes) + batch.num_draft_tokens + sum(item.samples for item in batch.prefills)
        depth = max(item.num_draft_tokens for item in batch.decodes) if batch.num_draft_tokens else 0
        step_s = self.step_s(
            num_tokens=batch.num_tokens, num_rows=num_rows, context_tokens=context_tokens, attention_pairs=pairs
        )
        moves_s = self.block_copy_s * (len(batch.moves.swap_in) + len(batch.moves.swap_out))
        return step_s + depth * self.draft_step_s + moves_s

    def token_costs(self) -> TokenCosts:
        """The linear prices that the scheduler charges with."""
        return TokenCosts(
            prefill_token_ps=round(self.token_s * PS),
            prefill_pair_ps=round(self.pair_s * PS),
            decode_token_ps=round((self.token_s + self.sampled_row_s) * PS),
            decode_context_ps=round(self.context_s * PS),
            swap_in_block_ps=round(self.block_copy_s * PS),
        )


def _attention_work(batch: ScheduledBatch) -> tuple[int, float]:
    context_tokens, pairs = 0, 0.0
    for item in batch.decodes:
        context_tokens += item.start
    for item in batch.prefills:
        context_tokens += item.start
        pairs += item.num_tokens * (item.start + item.num_tokens / 2)
    return context_tokens, pairs
