"""The Prometheus metrics of the appliance. Labels are bounded: model, tenant (up to TENANTS_MAX, then `other`) and reason."""

from __future__ import annotations

import asyncio
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance.base.errors import GatehouseError
from appliance.telemetry.gpu import NO_GPU, GpuReading
from appliance.telemetry.readings import EngineReading, SystemSnapshot, TenantReading
from engine.protocol import EngineStatus, PlainReason

M = TypeVar("M", Counter, Histogram)
R = TypeVar("R")

TENANTS_MAX = 500
OTHER_TENANTS = "other"
LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)

ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineReading], float]]] = {
    "gatehouse_requests_running": ("Requests in the running batch", lambda e: e.status_or_zeros.num_running),
    "gatehouse_requests_waiting": ("Requests waiting for a seat in the batch", lambda e: e.status_or_zeros.num_waiting),
    "gatehouse_admission_waiting": (
        "Requests waiting for room in their limits, before they wait for a seat",
        lambda e: e.requests_waiting_for_limits,
    ),
    "gatehouse_kv_cache_usage_ratio": (
        "Used share of the KV blocks, 0 to 1",
        lambda e: e.status_or_zeros.kv_blocks_used / max(e.status_or_zeros.kv_blocks_total, 1),
    ),
    "gatehouse_engine_up": ("1 if the engine accepts requests", lambda e: float(e.state == "ready")),
    "gatehouse_model_ready": (
        "1 if the engine has generated a token within probe_interval_s",
        lambda e: float(e.problem is None),
    ),
    "gatehouse_engine_gpu_unused": (
        "1 if the engine serves on the CPU although an NVIDIA driver is installed",
        lambda e: float(e.info is not None and e.info.device_note is not None),
    ),
    "gatehouse_engine_kernels_refused": (
        "Kernels that do not serve because they were refused",
        lambda e: 0 if e.info is None else len(e.info.refused_kernels),
    ),
    "gatehouse_host_kv_blocks": ("KV blocks that fit in main memory", lambda e: e.status_or_zeros.host_blocks_total),
    "gatehouse_host_kv_blocks_used": ("KV blocks kept in main memory", lambda e: e.status_or_zeros.host_blocks_used),
}
ENGINE_COUNTERS: dict[str, tuple[str, Callable[[EngineStatus], int]]] = {
    "gatehouse_engine_steps": ("Steps of the current engine process", lambda s: s.steps_total),
    "gatehouse_engine_fallback_steps": (
        "Steps computed on the slow path because the fast one failed",
        lambda s: s.fallback_steps_total,
    ),
    "gatehouse_swapped_in_kv_blocks": ("KV blocks copied back from main memory", lambda s: s.swapped_in_blocks_total),
    "gatehouse_swapped_out_kv_blocks": ("KV blocks copied to main memory", lambda s: s.swapped_out_blocks_total),
    "gatehouse_draft_tokens": ("Tokens proposed by speculative decoding", lambda s: s.draft_tokens_total),
    "gatehouse_accepted_draft_tokens": ("Proposed tokens that were accepted", lambda s: s.accepted_draft_tokens_total),
}
TENANT_GAUGES: dict[str, tuple[str, Callable[[TenantReading], int]]] = {
    "gatehouse_tenant_requests_running": ("Seats held in the running batch", lambda t: t.requests_running),
    "gatehouse_tenant_requests_waiting": ("Requests waiting for a seat", lambda t: t.requests_waiting),
    "gatehouse_tenant_kv_blocks": ("KV blocks held", lambda t: t.kv_blocks),
}
GPU_GAUGES: dict[str, tuple[str, Callable[[GpuReading], int]]] = {
    "gatehouse_gpu_memory_used_bytes": ("Used GPU memory", lambda g: g.memory_used_bytes),
    "gatehouse_gpu_memory_total_bytes": ("GPU memory", lambda g: g.memory_total_bytes),
}
APPLIANCE_GAUGES: dict[str, tuple[str, Callable[[SystemSnapshot], float]]] = {
    "gatehouse_gpu_driver_up": (
        "1 if the GPU driver answers, or there is no GPU",
        lambda s: s.gpu_error in (None, NO_GPU),
    ),
    "gatehouse_host_memory_used_bytes": ("Used memory of the machine", lambda s: s.host.memory_used_bytes),
    "gatehouse_host_memory_total_bytes": ("Memory of the machine", lambda s: s.host.memory_total_bytes),
    "gatehouse_host_disk_free_bytes": ("Free disk of the data folder", lambda s: s.host.disk_free_bytes),
    "gatehouse_database_up": (
        "1 if the database accepts writes, as far as a test shows that adds nothing",
        lambda s: s.database.ok,
    ),
}


class Metrics:
    """Counters and histograms updated by the serving layer; `attach` adds gauges read from the sampler."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tenants: set[str] = set()
        self._children: dict[tuple[Counter | Histogram, tuple[str, ...]], Any] = {}
        by_tenant = ["model", "tenant"]
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of settled requests", by_tenant)
        self._cached_tokens = self._counter("prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", by_tenant)
        self._generation_tokens = self._counter("generation_tokens", "Generated tokens of settled requests", by_tenant)
        self._discarded = self._counter("discarded_tokens", "Tokens generated after a stop string, never billed", ["model"])
        self._unpriced = self._counter("unpriced_requests", "Requests served without a price, at no cost", ["model"])
        self._requests = self._counter("requests", "Settled requests", ["model", "reason"])
        self._rejected = self._counter("requests_rejected", "Requests refused before any work", ["reason"])
        for reason in sorted(_codes(GatehouseError)):
            self._rejected.labels(reason)
        self._shadow_refusals = self._counter(
            "shadow_refusals", "Served requests that a limit in shadow mode would have refused", ["reason"]
        )
        self._waits = self._counter("admission_waits", "Requests that waited for room in their limits", ["model", "reason"])
        self._admission_wait_s = self._histogram("admission_wait_seconds", "Wait for room in the limits", LATENCY_BUCKETS_S)
        self._preemptions = self._counter("preemptions", "Preemptions of settled requests", ["model"])
        self._restarts = self._counter("engine_restarts", "Restarts of engine processes", ["model"])
        self._unrecorded_tokens = 0
        self._unexplained: Callable[[], int] = lambda: 0
        self._unrecorded = (
            self._gauge(  # a gauge: it decreases when an event is found; its name is published and ends in `_total`
                "unrecorded_usage_tokens_total", "Tokens counted by engines but missing in usage events, when nothing runs"
            )
        )
        self._ledger_up = self._gauge("ledger_up", "1 if usage can be recorded")
        self._alerts_pending = self._gauge("alerts_pending", "Alerts waiting for delivery, without those of disabled targets")
        self._alerts_delivered = self._counter("alerts_delivered", "Alerts delivered")
        self._alerts_given_up = self._counter("alerts_given_up", "Alerts no longer retried")
        self._alerts_failed = self._counter("alert_attempts_failed", "Failed attempts to deliver an alert", ["reason"])
        self._ttft_s = self._histogram("time_to_first_token_seconds", "Admission to first token", LATENCY_BUCKETS_S)
        self._inter_token_s = self._histogram("inter_token_latency_seconds", "Time between two tokens", TOKEN_BUCKETS_S)
        self._request_s = self._histogram("request_seconds", "Admission to end", LATENCY_BUCKETS_S)
        self._queue_s = self._histogram("queue_seconds", "Admission to first seat in a batch", LATENCY_BUCKETS_S)
        self._step_s = self._histogram("engine_step_seconds", "One engine step", TOKEN_BUCKETS_S)

    def add_model(self, model: str) -> None:
        """Create the counters of `model` at zero, so that their first event appears as an increase."""
        for counter in (self._preemptions, self._discarded, self._restarts, self._unpriced):
            counter.labels(model)

    def add_alert_failures(self, reasons: Iterable[str]) -> None:
        """Create the counters of failed attempts to deliver an alert at zero, for the same purpose."""
        for reason in reasons:
            self._alerts_failed.labels(reason)

    def attach(self, snapshot: Callable[[], SystemSnapshot]) -> None:
        """Export gauges from the latest snapshot at every scrape."""
        self.registry.register(_SnapshotCollector(snapshot, self._tenant_label))

    async def render(self) -> bytes:
        """Return all metrics in Prometheus' text format. Uses a thread: TENANTS_MAX tenants take a tenth of a second."""
        self._unrecorded.set(self._unrecorded_tokens + self._unexplained())  # compares counts that change in the event loop
        return await asyncio.to_thread(generate_latest, self.registry)

    def settled(
        self, *, model: str, tenant: str, reason: str, prompt_tokens: int, cached_tokens: int, completion_tokens: int
    ) -> None:
        """Count one settled request and its billed tokens."""
        labels = (model, self._tenant_label(tenant))
        self._child(self._requests, model, reason).inc()
        self._child(self._prompt_tokens, *labels).inc(prompt_tokens)
        self._child(self._cached_tokens, *labels).inc(cached_tokens)
        self._child(self._generation_tokens, *labels).inc(completion_tokens)

    def timings(self, *, model: str, request_s: float, queue_s: float | None, ttft_s: float | None, preemptions: int) -> None:
        """Observe the durations of one settled request; a stage not reached is None."""
        self._child(self._request_s, model).observe(request_s)
        if queue_s is not None:
            self._child(self._queue_s, model).observe(queue_s)
        if ttft_s is not None:
            self._child(self._ttft_s, model).observe(ttft_s)
        if preemptions:
            self._preemptions.labels(model).inc(preemptions)

    def inter_token(self, model: str, intervals_s: list[float]) -> None:
        """Observe the intervals between tokens of one stream."""
        histogram = self._child(self._inter_token_s, model)
        for interval_s in intervals_s:
            histogram.observe(interval_s)

    def engine_step(self, model: str, step_s: float) -> None:
        """Observe the duration of one engine step."""
        self._child(self._step_s, model).observe(step_s)

    def engine_restarted(self, model: str) -> None:
        """Count a restart of an engine process."""
        self._restarts.labels(model).inc()

    def rejected(self, reason: str) -> None:
        """Count a request refused before any work; `reason` is the error code."""
        self._rejected.labels(reason).inc()

    def unpriced(self, model: str) -> None:
        """Count a request that costs nothing because its model has no price."""
        self._unpriced.labels(model).inc()

    def shadow_refused(self, scope: str, kind: str) -> None:
        """Count a served request that a limit in shadow mode would have refused."""
        self._shadow_refusals.labels(f"{scope}_{kind}").inc()

    def wait_ended(self, model: str, outcome: str, waited_s: float) -> None:
        """Count the end of a wait; `outcome` is admitted, refused, abandoned or failed."""
        self._waits.labels(model, outcome).inc()
        self._admission_wait_s.labels(model).observe(waited_s)

    def discarded(self, model: str, tokens: int) -> None:
        """Count tokens that the engine generated after a stop string, before it was told to stop."""
        self._discarded.labels(model).inc(tokens)

    def unrecorded(self, tokens: int) -> None:
        """Count tokens whose ledger record could not be written."""
        self._unrecorded_tokens += tokens

    def compare_usage(self, unexplained: Callable[[], int]) -> None:
        """Call `unexplained` at every scrape: the tokens counted by engines that are in no usage event."""
        self._unexplained = unexplained

    def watch_ledger(self, is_healthy: Callable[[], bool]) -> None:
        """Call `is_healthy` at every scrape: whether the ledger can record usage."""
        self._ledger_up.set_function(is_healthy)

    def alerts_pending(self, count: int) -> None:
        """Set the number of alerts waiting for delivery."""
        self._alerts_pending.set(count)

    def alert_delivered(self) -> None:
        """Count a delivered alert."""
        self._alerts_delivered.inc()

    def alert_failed(self, reason: str) -> None:
        """Count a failed delivery attempt; `reason` is one of a small, fixed set."""
        self._alerts_failed.labels(reason).inc()

    def alert_given_up(self) -> None:
        """Count an alert that will not be retried."""
        self._alerts_given_up.inc()

    def _tenant_label(self, tenant: str) -> str:
        if tenant in self._tenants or len(self._tenants) < TENANTS_MAX:
            self._tenants.add(tenant)
            return tenant
        return OTHER_TENANTS

    def _child(self, metric: M, *labels: str) -> M:
        """Return the cached child metric for these labels: `labels()` locks and validates its arguments at every call."""
        child: M | None = self._children.get((metric, labels))
        if child is None:
            child = self._children[metric, labels] = metric.labels(*labels)
        return child

    def _counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"gatehouse_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"gatehouse_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"gatehouse_{name}", text, ["model"], buckets=buckets, registry=self.registry)


def _codes(kind: type[GatehouseError]) -> set[str]:
    """Return the codes of an error class and all its subclasses."""
    return {kind.code}.union(*(_codes(child) for child in kind.__subclasses__()))


class _SnapshotCollector(Collector):
    """Converts the sampler's latest snapshot into metrics at scrape time."""

    def __init__(self, snapshot: Callable[[], SystemSnapshot], tenant_label: Callable[[str], str]) -> None:
        self._snapshot = snapshot
        self._tenant_label = tenant_label

    def describe(self) -> list[Metric]:
        """Return nothing, so that registration does not read a snapshot."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield one metric family per gauge or counter."""
        snapshot = self._snapshot()
        engines = {engine.model: engine for engine in snapshot.engines}
        statuses = {model: engine.status_or_zeros for model, engine in engines.items()}
        yield from _families(GaugeMetricFamily, ENGINE_GAUGES, "model", engines)
        yield from _families(CounterMetricFamily, ENGINE_COUNTERS, "model", statuses)
        yield from _plain_steps(snapshot)
        yield from _tenant_families(snapshot, self._tenant_label)
        yield from _families(GaugeMetricFamily, GPU_GAUGES, "gpu", {str(gpu.index): gpu for gpu in snapshot.gpus})
        for name, (text, value) in APPLIANCE_GAUGES.items():
            yield GaugeMetricFamily(name, text, value=float(value(snapshot)))


def _families(
    family: type[GaugeMetricFamily | CounterMetricFamily],
    table: Mapping[str, tuple[str, Callable[[R], float]]],
    label: str,
    readings: Mapping[str, R],
) -> Iterator[Metric]:
    """Yield a family for each row of `table`, with a value for each of `readings`, whose keys are values of `label`."""
    for name, (text, value) in table.items():
        metric = family(name, text, labels=[label])
        for label_value, reading in readings.items():
            metric.add_metric([label_value], float(value(reading)))
        yield metric


def _plain_steps(snapshot: SystemSnapshot) -> Iterator[Metric]:
    """Yield every reason from the start, so that its first step appears as an increase."""
    text = "Steps computed on the slow path because a request requires it"
    family = CounterMetricFamily("gatehouse_engine_plain_steps", text, labels=["model", "reason"])
    for engine in snapshot.engines:
        for reason in PlainReason:
            family.add_metric([engine.model, reason.value], engine.status_or_zeros.plain_steps_total.get(reason.value, 0))
    yield family


def _tenant_families(snapshot: SystemSnapshot, label: Callable[[str], str]) -> Iterator[Metric]:
    for name, (text, value) in TENANT_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=["model", "tenant"])
        for engine in snapshot.engines:
            sums: Counts[str] = Counts()
            for tenant in engine.tenants:
                sums[label(tenant.name)] += value(tenant)
            for tenant_label, amount in sums.items():
                family.add_metric([engine.model, tenant_label], amount)
        yield family
