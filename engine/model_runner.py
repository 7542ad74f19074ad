"""Runs one scheduled batch on the device: inputs, forward pass, sampling. Keeps weights, cache and tables; decides nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch_inputs import make_batch_inputs
from engine.config import ModelConfig
from engine.embedder import TextModel
from engine.kv_cache import allocate_kv_cache
from engine.layers.attention import attention_shapes
from engine.layers.rotary import RotaryTable
from engine.logits_rules import SampledRow
from engine.memory_plan import MemoryPlan
from engine.models.decoder import Decoder
from engine.sampler import SampledToken, Sampler
from engine.scheduled_batch import ScheduledRequest, StepOutput
from kernels.ops import AttentionPlanner


class ModelRunner:
    """The device half behind one call. Running the same items twice writes the same cache slots: a step may be repeated."""

    def __init__(
        self,
        config: ModelConfig,
        decoder: Decoder,
        plan: MemoryPlan,
        block_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._block_size = block_size
        self._device = device
        self._kv_caches = allocate_kv_cache(config, plan, block_size, dtype=dtype, device=device)
        self._rotaries = [RotaryTable(rope, plan.max_model_len, dtype=dtype, device=device) for rope in config.ropes]
        shapes = attention_shapes(config, block_size)
        self._planners = [AttentionPlanner(shape, dtype=dtype, device=device) for shape in shapes]
        self._sampler = Sampler(config.vocab_size, device)
        self.text_model = TextModel(
            forward=decoder,
            rotaries=self._rotaries,
            planners=self._planners,
            vocab_size=config.vocab_size,
            max_len=plan.max_model_len,
            device=device,
        )

    @torch.inference_mode()
    def run(self, items: Sequence[ScheduledRequest]) -> list[StepOutput]:
        """Compute `items`; one output per item, in their order."""
        inputs = make_batch_inputs(
            items, block_size=self._block_size, rotaries=self._rotaries, planners=self._planners, device=self._device
        )
        hidden = self._decoder(inputs, self._kv_caches)
        rows = [SampledRow(item.request, item.request.num_tokens) for item in items if item.samples]
        if not rows:
            return [StepOutput() for _ in items]
        sampled = iter(self._sampler.sample(self._decoder.logits(hidden), rows))
        return [_output(next(sampled)) if item.samples else StepOutput() for item in items]


def _output(sampled: SampledToken) -> StepOutput:
    if sampled.token_id is None:
        return StepOutput(error=sampled.error)
    return StepOutput(token_ids=[sampled.token_id], logprobs=None if sampled.logprob is None else [sampled.logprob])
