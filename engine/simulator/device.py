"""A device simulated in time only: steps take as long as the step-time model says, and answers end as in the trace. No torch.

The scheduler sees ordinary requests: as in the product, it learns of an answer's end by a stop token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from hashlib import blake2b

from engine.protocol import SamplingParams
from engine.scheduling.prefix_cache import HASH_BYTES
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, StepOutput
from engine.scheduling.step_time import StepTimeModel
from engine.simulator.recorder import Recorder, TenantRecord, gap_bucket
from engine.simulator.trace import TOKENS_MAX

TOKEN, STOP_TOKEN = 2, 1
STOP_IDS = frozenset({STOP_TOKEN})
TOKEN_OUTPUT = StepOutput(token_ids=[TOKEN])
STOP_OUTPUT = StepOutput(token_ids=[STOP_TOKEN])
NO_OUTPUT = StepOutput()


class VirtualClock:
    """Seconds since the start of the trace; only the replay moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True, eq=False, kw_only=True)
class SimulatedRequest(Request):
    """A request with the length of its answer, which the scheduler does not know, and with its measurements."""

    tenant: TenantRecord
    num_outputs_left: int
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    gap_max_s: float = 0.0
    is_queued: bool = True


def make_request(
    request_id: str,
    tenant: TenantRecord,
    sampling: SamplingParams,
    *,
    arrived_s: float,
    input_tokens: int,
    output_tokens: int,
    max_total_tokens: int,
    number: int,
    block_names: list[bytes],
) -> SimulatedRequest:
    """A request whose prompt is a sequence of equal ids: only the names of their blocks distinguish prompts.

    `block_names` are those of the prompt; the prefix cache derives the others from a running hash that starts with `number`.
    """
    return SimulatedRequest(
        request_id=request_id,
        tenant_id=tenant.name,
        sampling=sampling,
        token_ids=[TOKEN] * input_tokens,
        num_prompt_tokens=input_tokens,
        max_total_tokens=max_total_tokens,
        stop_ids=STOP_IDS,
        arrived_s=arrived_s,
        weight=tenant.weight,
        block_hashes=block_names,
        prefix_hash=blake2b(number.to_bytes(8, "big"), digest_size=HASH_BYTES),
        tenant=tenant,
        num_outputs_left=min(output_tokens, max_total_tokens - input_tokens),
    )


class SimulatedDevice:
    """Runs batches on a virtual clock."""

    def __init__(
        self, model: StepTimeModel, clock: VirtualClock, recorder: Recorder, windows: tuple[int | None, ...] = ()
    ) -> None:
        """`windows`: one per layer; empty if every layer sees the whole context."""
        self._model = model
        self._windows = {window: count / len(windows) for window, count in Counter(windows).items()}
        self._has_windows = any(window is not None for window in windows)
        self._clock = clock
        self._recorder = recorder
        self._costs = model.token_costs()
        self._decode_ns = self._costs.decode_token_ps / 1000
        self._context_ns = self._costs.decode_context_ps / 1000

    def run(self, batch: ScheduledBatch) -> tuple[list[StepOutput], list[SimulatedRequest]]:
        """Advance the clock by the length of the step. Returns the outputs by item, and the requests that end with them."""
        before_s = self._clock.now_s
        step_s = self._model.batch_s(batch, self._attention_work(batch) if self._has_windows else None)
        now_s = self._clock.now_s = before_s + step_s
        ended: list[SimulatedRequest] = []
        outputs = self._decode(batch, before_s, now_s, gap_bucket(step_s), ended)
        self._prefill(batch, now_s, outputs, ended)
        recorder = self._recorder
        recorder.num_steps += 1
        recorder.num_tokens += batch.num_tokens
        recorder.busy_s += step_s
        recorder.steps_s[gap_bucket(step_s)] += 1
        recorder.step_max_s = max(recorder.step_max_s, step_s)
        return outputs, ended

    def _attention_work(self, batch: ScheduledBatch) -> tuple[float, float]:
        """The number of cached tokens that are read, and that of (query, key) pairs: averages over layers, some of which have a
        window."""
        context_tokens, pairs = 0.0, 0.0
        for window, fraction in self._windows.items():
            window_len = TOKENS_MAX if window is None else window
            context_tokens += fraction * sum(min(item.start, window_len) for item in (*batch.decodes, *batch.prefills))
            for item in batch.prefills:
                pairs += fraction * (_pairs(item.start + item.num_tokens, window_len) - _pairs(item.start, window_len))
        return context_tokens, pairs

    def _decode(
        self, batch: ScheduledBatch, before_s: float, now_s: float, step_bucket: int, ended: list[SimulatedRequest]
    ) -> list[StepOutput]:
        decode_ns, context_ns = self._decode_ns, self._context_ns
        outputs = []
        for item in batch.decodes:
            request: SimulatedRequest = item.request  # type: ignore[assignment]
            tenant = request.tenant
            tenant.service_ns += decode_ns + context_ns * item.start
            tenant.service_tokens += 2
            if request.last_token_s == before_s:
                tenant.gaps[step_bucket] += 1
                gap_s = now_s - before_s
            else:
                gap_s = now_s - request.last_token_s
                tenant.gaps[gap_bucket(gap_s)] += 1
            if gap_s > request.gap_max_s:
                request.gap_max_s = gap_s
            request.last_token_s = now_s
            request.num_outputs_left = remaining = request.num_outputs_left - 1
            if remaining:
                outputs.append(TOKEN_OUTPUT)
            else:
                outputs.append(STOP_OUTPUT)
                ended.append(request)
        return outputs

    def _prefill(self, batch: ScheduledBatch, now_s: float, outputs: list[StepOutput], ended: list[SimulatedRequest]) -> None:
        swapped_in = {target for _, target in batch.moves.swap_in}
        for item in batch.prefills:
            request: SimulatedRequest = item.request  # type: ignore[assignment]
            tenant = request.tenant
            if swapped_in:
                tenant.service_ns += self._costs.swap_in_ns(len(swapped_in.intersection(request.block_table)))
            if request.is_queued:
                request.is_queued = False
                tenant.unqueue()
            tenant.service_ns += self._costs.prefill_ns(item.start, item.num_tokens)
            tenant.service_tokens += item.num_tokens
            if not item.samples:
                outputs.append(NO_OUTPUT)
                continue
            self._record_prefill_token(request, now_s)
            request.num_outputs_left -= 1
            outputs.append(TOKEN_OUTPUT if request.num_outputs_left else STOP_OUTPUT)
            if not request.num_outputs_left:
                ended.append(request)

    def _record_prefill_token(self, request: SimulatedRequest, now_s: float) -> None:
        """The token at the end of a prefill: the first of an answer, or the next one after a preemption."""
        tenant = request.tenant
        tenant.service_tokens += 2
        if request.first_token_s < 0:
            request.first_token_s = now_s
        else:
            gap_s = now_s - request.last_token_s
            tenant.gaps[gap_bucket(gap_s)] += 1
            request.gap_max_s = max(request.gap_max_s, gap_s)
        request.last_token_s = now_s


def _pairs(num_tokens: int, window: int) -> float:
    """The number of (query, key) pairs in a text of `num_tokens` tokens when each query sees at most `window` keys."""
    short = min(num_tokens, window)
    return short * short / 2 + (num_tokens - short) * window
