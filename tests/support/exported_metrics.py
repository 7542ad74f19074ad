"""Every metric that the appliance exports, with its type, labels and help text: as Prometheus reads them from `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from appliance.telemetry.gpu import GpuReading
from appliance.telemetry.metrics import Metrics
from tests.support.clock import FakeClock
from tests.support.console_fixtures import EngineSide, tenant_reading

CREATED = "_created"  # the client library adds to each counter and histogram a gauge with the time when its series began
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count")}


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    """`name` is that of the series; a histogram has three, with the SUFFIXES."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def series(self) -> dict[str, set[str]]:
        """Return the names of its series with their labels."""
        labels = set(self.labels)
        if self.kind != "histogram":
            return {self.name: labels}
        return {f"{self.name}{suffix}": labels | ({"le"} if suffix == "_bucket" else set()) for suffix in SUFFIXES[self.kind]}


async def exported_metrics() -> dict[str, ExportedMetric]:
    """Return all metrics by name. Everything that is counted is counted once, so that each metric has a series."""
    gpu = GpuReading(
        index=0, name="Card", memory_total_bytes=80, memory_used_bytes=1, utilization=None, power_w=None, temperature_c=None
    )
    sampler, metrics = EngineSide(FakeClock(), gpus=[gpu], tenants=[tenant_reading("bob")]).sampler(3600.0), Metrics()
    metrics.attach(lambda: sampler.latest)
    await sampler.sample()
    _count_everything(metrics)
    found = {}
    for family in text_string_to_metric_families((await metrics.render()).decode()):
        if not family.name.endswith(CREATED):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = tuple(label for label in family.samples[0].labels if label != "le") if family.samples else ("(no series)",)
            found[name] = ExportedMetric(name, family.type, labels, family.documentation)
    return found


def _count_everything(metrics: Metrics) -> None:
    metrics.add_model("m")
    metrics.settled(model="m", tenant="bob", reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    metrics.timings(model="m", request_s=1.0, queue_s=0.1, ttft_s=0.2, preemptions=1)
    metrics.inter_token("m", [0.1])
    metrics.engine_step("m", 0.1)
    metrics.shadow_refused("tenant", "tokens")
    metrics.wait_ended("m", "admitted", 0.1)
    metrics.alert_failed("timeout")
