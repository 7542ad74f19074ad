"""The simulation: requests arrive, the product's scheduler plans, the simulated device advances the clock, results are applied.

Nothing here decides which requests are served, when and with how much: `Scheduler.schedule` and `Scheduler.apply` do, with the
product's block pool, prefix cache, fairness and step budget. Only time is simulated. Knows no torch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from engine.errors import EngineConfigError
from engine.memory.fit import MemoryFit, format_distinct
from engine.memory.needs import GIB
from engine.options import SEATS_MAX, EngineOptions
from engine.protocol import SamplingParams
from engine.scheduling.block_pool import PROTECTED_PERCENT, BlockPool
from engine.scheduling.fair_policy import FairPolicy
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.policy import FcfsPolicy, Policy, PolicyContext
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import RequestStatus
from engine.scheduling.scheduled_batch import ScheduledBatch
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_budget import BudgetTargets, StepBudget
from engine.scheduling.step_time import StepTimeModel
from engine.simulator.device import SimulatedDevice, SimulatedRequest, VirtualClock, make_request
from engine.simulator.fitting import engine_fit
from engine.simulator.models import BLOCK_SIZE, SimulatedGpu, SimulatedModel, check_card
from engine.simulator.recorder import Recorder
from engine.simulator.trace import HASH_BLOCK_TOKENS, TOKENS_MAX, TracedRequest
from engine.simulator.vtc_policy import VtcPolicy
from engine.simulator.workload import Workload

POLICIES: dict[str, Callable[[PolicyContext], Policy]] = {
    "fair": FairPolicy,
    "fcfs": FcfsPolicy,
    "vtc": VtcPolicy,
    "static": FcfsPolicy,
}
"""`static`: first come, first served, in batches, each of which begins when the previous one has ended."""

KV_BYTES = {"auto": 2, "bf16": 2, "fp8": 1}
"""Bytes of a number in the cache."""

PROGRESS_STEPS = 2048
BLOCKS_PER_HASH = HASH_BLOCK_TOKENS // BLOCK_SIZE


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How the simulated engine is configured. `max_num_seqs` and `num_kv_blocks`: None is as many as an engine with these
    options would have (`gatehouse plan`). Raises `EngineConfigError`, naming the option."""

    model: SimulatedModel
    gpu: SimulatedGpu
    policy: str = "fair"
    max_num_seqs: int | None = None
    token_budget: int | None = None
    inter_token_target_s: float = 0.025
    kv_cache_dtype: str = "auto"
    num_kv_blocks: int | None = None
    host_cache_gib: float = 0.0
    max_tokens: int | None = None
    weights: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_card(self.model, self.gpu)
        if self.policy not in POLICIES:
            raise EngineConfigError("policy", f"must be one of {', '.join(POLICIES)}, not {self.policy!r}")
        if self.kv_cache_dtype not in KV_BYTES:
            raise EngineConfigError("kv_cache_dtype", f"must be one of {', '.join(KV_BYTES)}, not {self.kv_cache_dtype!r}")
        if self.max_num_seqs is not None and not 1 <= self.max_num_seqs <= SEATS_MAX:
            raise EngineConfigError("max_num_seqs", f"must be between 1 and {SEATS_MAX}, not {self.max_num_seqs}")
        least = self.max_num_seqs or 1
        if self.token_budget is not None and not least <= self.token_budget <= TOKENS_MAX:
            least_named = "1" if self.max_num_seqs is None else f"max_num_seqs ({least})"
            raise EngineConfigError("token_budget", f"must be between {least_named} and {TOKENS_MAX}, not {self.token_budget}")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= TOKENS_MAX:
            raise EngineConfigError("max_tokens", f"must be between 1 and {TOKENS_MAX}, not {self.max_tokens}")
        if not 1e-4 <= self.inter_token_target_s <= 1000:
            raise EngineConfigError("slo_tpot_ms", f"must be between 0.1 and 1000000, not {self.inter_token_target_s * 1e3:g}")
        if not 0 <= self.host_cache_gib <= 1e6:
            raise EngineConfigError("host_cache_gib", f"must be between 0 and 1000000, not {self.host_cache_gib}")
        if self.num_kv_blocks is not None and self.num_kv_blocks < 1:
            raise EngineConfigError("num_kv_blocks", f"must be at least 1, not {self.num_kv_blocks}")
        if self.num_kv_blocks is None and not self.fit.context_len:
            raise self._no_room()

    @property
    def kv_bytes(self) -> int:
        """Bytes of each number in the KV cache."""
        return KV_BYTES[self.kv_cache_dtype]

    @cached_property
    def fit(self) -> MemoryFit:
        """The memory of an engine with these options, as `gatehouse plan` computes it."""
        return self._fit_with(self.max_num_seqs, self.token_budget)

    def _fit_with(self, max_num_seqs: int | None, token_budget: int | None) -> MemoryFit:
        options = EngineOptions(
            model=Path(self.model.name),
            device="cuda",
            quantization=self.model.quantization,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=token_budget,
            kv_cache_dtype="fp8" if self.kv_cache_dtype == "fp8" else "auto",
        )
        return engine_fit(self.model.config, options, self.gpu)

    def _no_room(self) -> EngineConfigError:
        """Names the option without which there would be room for keys and values, else the GPU."""
        needs, option = self.fit.needs, "gpu"
        if self.token_budget is not None and self._fit_with(self.max_num_seqs, None).context_len:
            option = "token_budget"
        elif self.max_num_seqs is not None and self._fit_with(None, self.token_budget).context_len:
            option = "max_num_seqs"
        needed, usable = format_distinct(needs.fixed_bytes + needs.block_bytes, self.fit.usable_bytes)
        value = self.gpu.name if option == "gpu" else getattr(self, option)
        return EngineConfigError(
            option,
            f"{value} leaves {self.model.name} no room: it needs at least {needed}, and {usable} may be used "
            f"(`gatehouse plan` says what would make it fit)",
        )

    @property
    def seats(self) -> int:
        """The most running requests."""
        return self.fit.load.num_seqs

    @cached_property
    def blocks(self) -> int:
        """KV blocks."""
        return self.fit.kv_tokens // BLOCK_SIZE if self.num_kv_blocks is None else self.num_kv_blocks

    @cached_property
    def max_model_len(self) -> int:
        """The longest request, at most the model's context."""
        return min(self.model.config.max_position_len, self.blocks * BLOCK_SIZE)

    @property
    def num_host_blocks(self) -> int:
        return int(self.host_cache_gib * GIB) // (BLOCK_SIZE * self.model.shape.kv_token_bytes(self.kv_bytes))

    def step_time(self) -> StepTimeModel:
        return StepTimeModel(
            self.model.shape,
            self.gpu.speed,
            weight_bytes=self.model.weight_bytes,
            kv_bytes=self.kv_bytes,
            block_size=BLOCK_SIZE,
        )


class Replay:
    """One simulation of one workload."""

    def __init__(self, setup: Setup, workload: Workload) -> None:
        self.setup = setup
        self.workload = workload
        self.clock = VirtualClock()
        self.recorder = Recorder()
        self.pool = BlockPool(setup.blocks, protected_percent=PROTECTED_PERCENT if setup.policy == "fair" else 0)
        self.scheduler = self._make_scheduler()
        self.device = SimulatedDevice(setup.step_time(), self.clock, self.recorder, setup.model.windows)
        self._arrivals = iter(workload.requests)
        self._next = next(self._arrivals, None)
        self._num_arrived = 0
        self._static_waiting: list[SimulatedRequest] = []

    def _make_scheduler(self) -> Scheduler:
        setup = self.setup
        limits = SchedulerLimits(
            max_num_seqs=setup.seats,
            max_num_batched_tokens=setup.fit.load.num_tokens,
            max_model_len=setup.max_model_len,
            block_size=BLOCK_SIZE,
        )
        cache = PrefixCache(self.pool, BLOCK_SIZE)
        step_time = setup.step_time()
        return Scheduler(
            limits,
            self.pool,
            clock=self.clock,
            costs=VtcPolicy.TOKEN_PRICES if setup.policy == "vtc" else step_time.token_costs(),
            prefix_cache=cache,
            num_host_blocks=setup.num_host_blocks,
            step_budget=self._step_budget(step_time),
            policy=POLICIES[setup.policy],
        )

    def _step_budget(self, step_time: StepTimeModel) -> StepBudget | None:
        if self.setup.token_budget is not None:
            return None
        return StepBudget(step_time, BudgetTargets.from_target(self.setup.inter_token_target_s))

    def run(self, progress: Callable[[float], None] = lambda _: None) -> None:
        """Replay until the last answer has ended."""
        total = len(self.workload.requests)
        with _collector_disabled():
            while True:
                self._submit_arrivals()
                batch = self.scheduler.schedule()
                if batch.is_empty:
                    if self._next is None:
                        break
                    self._advance_to(self._next.arrival_s)
                    continue
                self._step(batch)
                if not self.recorder.num_steps % PROGRESS_STEPS:
                    waiting = self.scheduler.num_waiting + self.scheduler.num_running
                    progress((self._num_arrived - waiting) / total)
        assert not self.scheduler.has_requests, "requests are live but none can go on"
        progress(1.0)

    def _submit_arrivals(self) -> None:
        """Submit the requests that have arrived; static batching collects them until the current batch has ended."""
        now_s, traced = self.clock.now_s, self._next
        while traced is not None and traced.arrival_s <= now_s:
            self._submit(traced)
            self._next = traced = next(self._arrivals, None)
        if self._static_waiting and not self.scheduler.has_requests:
            for request in self._static_waiting[: self.setup.seats]:
                self.scheduler.add(request)
            del self._static_waiting[: self.setup.seats]

    def _submit(self, traced: TracedRequest) -> None:
        """Submit a request. A prompt that does not fit the context is refused, as by the engine, and recorded."""
        tenant = self.recorder.tenant(traced.tenant, self.setup.weights.get(traced.tenant, 1))
        tenant.num_requests += 1
        limit = self.setup.max_model_len
        self._num_arrived += 1
        if traced.input_tokens >= limit:
            tenant.num_refused += 1
            return
        request = make_request(
            str(self._num_arrived),
            tenant,
            SamplingParams(max_tokens=self.setup.max_tokens or limit, seed=0, temperature=0.0),
            arrived_s=traced.arrival_s,
            input_tokens=traced.input_tokens,
            output_tokens=traced.output_tokens,
            max_total_tokens=min(limit, traced.input_tokens + (self.setup.max_tokens or limit)),
            number=self._num_arrived,
            block_names=block_names(traced),
        )
        tenant.queue(traced.arrival_s)
        if self.setup.policy == "static":
            self._static_waiting.append(request)
        else:
            self.scheduler.add(request)

    def _step(self, batch: ScheduledBatch) -> None:
        recorder, pool = self.recorder, self.pool
        before_s = self.clock.now_s
        used, running = pool.num_used, self.scheduler.num_running
        outputs, ended = self.device.run(batch)
        step_s = self.clock.now_s - before_s
        recorder.kv_block_seconds += used * step_s
        recorder.running_seconds += running * step_s
        if used > recorder.kv_blocks_max:
            recorder.kv_blocks_max = used
        if running > recorder.running_max:
            recorder.running_max = running
        self.scheduler.apply(batch, outputs)
        for request in ended:
            self._record_outcome(request)
        if self.clock.now_s >= recorder.next_due_s:
            self._sample()

    def _record_outcome(self, request: SimulatedRequest) -> None:
        assert request.status is RequestStatus.FINISHED, f"request {request.request_id} did not end with its last token"
        tenant, num_outputs = request.tenant, request.num_output_tokens
        tenant.gap_max_s = max(tenant.gap_max_s, request.gap_max_s)
        ttft_s = request.first_token_s - request.arrived_s
        tpot_s = (request.last_token_s - request.first_token_s) / (num_outputs - 1) if num_outputs > 1 else None
        tenant.outcomes.append((ttft_s, tpot_s))

    def _sample(self) -> None:
        """Record slots of used blocks that hold no token, and the recorder's own samples."""
        recorder = self.recorder
        for request in self.scheduler.running:
            slots = len(request.block_table) * BLOCK_SIZE
            recorder.sampled_slots += slots
            recorder.wasted_slots += max(0, slots - request.num_tokens)
        recorder.advance_to(self.clock.now_s)

    def _advance_to(self, time_s: float) -> None:
        self.clock.now_s = time_s
        self.recorder.advance_to(time_s)


def block_names(traced: TracedRequest) -> list[bytes]:
    """Names of a prompt's full blocks, if the trace says which prefixes are equal. One block of the trace is many here."""
    names: list[bytes] = []
    for block_id in traced.block_ids:
        chain = blake2b(f"{block_id} {traced.tenant}".encode(), digest_size=12).digest()
        names += [chain + index.to_bytes(4, "big") for index in range(BLOCKS_PER_HASH)]
    return names[: traced.input_tokens // BLOCK_SIZE]


@contextmanager
def _collector_disabled() -> Iterator[None]:
    """Keep the garbage collector from walking millions of live objects; the loop creates no reference cycles."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
