"""The planner's formulae for a workload on the calibrated card: the roofline, and the prediction that operators get.

Both use the step-time model of scheduler and simulator (`engine.scheduling.step_time`): the roofline without losses, the
prediction with the efficiencies that the planner expects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.gpu.context import Context
from bench.gpu.traffic import BenchRequest
from engine.protocol import EngineInfo
from engine.scheduling.step_time import DeviceSpeed, Efficiency, StepTimeModel
from engine.simulator.models import find_model

LINK = 50e9
"""Bytes per second between host and card; no step here uses it."""


@dataclass(slots=True)
class PlannedRequest:
    """A request in the plan of a run."""

    prompt_len: int
    outputs_left: int
    num_computed: int = 0


class Planner:
    """Times of one model on the calibrated device. All methods raise `FactMissing` if the calibration lacks a figure."""

    def __init__(self, context: Context, directory: Path, info: EngineInfo, *, expected: bool) -> None:
        """`expected`: use the planner's efficiencies instead of the full bandwidth and matmul rate."""
        self._context, self._info, self._expected = context, info, expected
        model = find_model(str(directory))
        self._shape = model.shape
        embedding = 0 if model.config.tie_word_embeddings else self._shape.head_params
        self.read_bytes = info.weights_bytes - embedding * (4 if context.rehearsal else 2)

    @cached_property
    def model(self) -> StepTimeModel:
        context, info, shape = self._context, self._info, self._shape
        flops = context.flops_fp8 if info.quantization == "fp8" and "flops_fp8" in context.facts else context.flops
        return StepTimeModel(
            shape,
            DeviceSpeed(bandwidth=context.bandwidth, flops=flops, link_bandwidth=LINK),
            weight_bytes=self.read_bytes / shape.num_params,
            kv_bytes=1 if "fp8" in info.kv_cache_dtype else (4 if context.rehearsal else 2),
            efficiency=None if self._expected else Efficiency(bandwidth=1.0, flops=1.0, host_s=0.0),
        )

    def decode_rate(self, num_requests: int, context_len: float) -> float:
        """Tokens per second of `num_requests` requests in steady decode."""
        step_s = self.model.step_s(
            num_tokens=num_requests, num_rows=num_requests, context_tokens=int(num_requests * context_len), attention_pairs=0.0
        )
        return num_requests / step_s

    def offline_rate(self, requests: Sequence[BenchRequest], seats: int, budget: int) -> float:
        """Output tokens per second of all requests submitted at once, prompts in chunks alongside decodes."""
        waiting = [PlannedRequest(len(request.prompt), request.num_outputs) for request in reversed(requests)]
        running: list[PlannedRequest] = []
        seconds, tokens = 0.0, sum(request.num_outputs for request in requests)
        while waiting or running:
            while waiting and len(running) < seats:
                running.append(waiting.pop())
            seconds += self._step(running, budget)
            running = [request for request in running if request.outputs_left > 0]
        return tokens / seconds

    def _step(self, running: list[PlannedRequest], budget: int) -> float:
        """Advance one step and return its seconds: every decode, then prompts in order while the token budget lasts."""
        decodes = [request for request in running if request.num_computed >= request.prompt_len]
        left, num_tokens, rows = budget - len(decodes), len(decodes), len(decodes)
        seen, pairs = sum(request.num_computed for request in decodes), 0.0
        for request in decodes:
            request.num_computed += 1
            request.outputs_left -= 1
        for request in running:
            chunk = min(left, request.prompt_len - request.num_computed)
            if chunk <= 0:
                continue
            pairs += chunk * (request.num_computed + chunk / 2)
            seen += request.num_computed
            request.num_computed += chunk
            left -= chunk
            num_tokens += chunk
            if request.num_computed == request.prompt_len:
                rows += 1
                request.outputs_left -= 1
        return self.model.step_s(num_tokens=num_tokens, num_rows=rows, context_tokens=seen, attention_pairs=pairs)

    def saturated_rate(self, in_len: int, out_len: int, seats: int) -> float:
        """Output tokens per second when each finished request is replaced at once; prefill and decode do not overlap."""
        decode_s = out_len / self.decode_rate(seats, in_len + out_len / 2)
        return out_len / (self.prefill_s(in_len) + decode_s)

    def prefill_s(self, in_len: int) -> float:
        """Seconds for the products and the attention of one prompt."""
        return self.model.token_s * in_len + self.model.pair_s * in_len * in_len / 2
