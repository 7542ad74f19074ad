"""One sampler serves every live page: the newest reading at once, never an old one, and nobody is held up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pynvml
import pytest

from appliance.telemetry import events
from appliance.telemetry.events import DatabaseReading, ProcessReading, SystemSampler, TooManySubscribers
from appliance.telemetry.gpu import NO_GPU, GpuProbe
from appliance.telemetry.host import HostProbe
from appliance.telemetry.metrics import OTHER_TENANTS, Metrics
from tests.support.clock import FakeClock


@pytest.fixture
def sampler(clock: FakeClock, tmp_path: Path) -> SystemSampler:
    async def database() -> DatabaseReading:
        return DatabaseReading(kind="sqlite", ok=True)

    return SystemSampler(
        clock=clock,
        host=HostProbe(tmp_path).read,
        gpus=list,
        gpu_error=lambda: NO_GPU,
        engines=list,
        gateway=lambda: ProcessReading(role="gateway", pid=1, model=None, started_at=clock.now(), restarts=0),
        database=database,
    )


async def test_a_slow_subscriber_gets_the_newest_reading(sampler: SystemSampler, clock: FakeClock) -> None:
    await sampler.sample()
    snapshots = sampler.subscribe()
    await anext(snapshots)
    for _ in range(3):
        clock.advance(1)
        await sampler.sample()

    assert (await anext(snapshots)).at == clock.now()
    await snapshots.aclose()


async def test_subscribers_are_limited_and_leave_room_when_they_go(
    sampler: SystemSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "SUBSCRIBERS_MAX", 1)
    await sampler.sample()
    first = sampler.subscribe()
    await anext(first)
    with pytest.raises(TooManySubscribers):
        await anext(sampler.subscribe())
    await first.aclose()
    second = sampler.subscribe()
    await anext(second)
    await second.aclose()


async def test_history_is_bounded(sampler: SystemSampler) -> None:
    for _ in range(events.HISTORY_SAMPLES + 5):
        await sampler.sample()

    assert len(sampler.history) == events.HISTORY_SAMPLES


async def test_host_figures_are_plausible(sampler: SystemSampler) -> None:
    host = (await sampler.sample()).host

    assert 0 < host.memory_used_bytes < host.memory_total_bytes
    assert 0 < host.disk_free_bytes < host.disk_total_bytes
    assert 0 <= host.cpu_percent <= 100


def test_a_machine_without_a_driver_says_so_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    probe = GpuProbe()
    probe.open()

    assert probe.read() == []
    assert probe.error == "no NVIDIA GPU"


def test_a_lost_gpu_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_arguments: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lost)
    probe = GpuProbe()
    probe.open()

    assert probe.read() == []
    assert "GPU cannot be read" in (probe.error or "")
    probe.close()


def test_labels_of_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.telemetry.metrics.TENANTS_MAX", 2)
    metrics = Metrics()
    for number in range(4):
        metrics.settled(model="m", tenant=f"t{number}", reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    text = metrics.render().decode()

    assert f'gatehouse_prompt_tokens_total{{model="m",tenant="{OTHER_TENANTS}"}} 2.0' in text
    assert 'tenant="t3"' not in text
