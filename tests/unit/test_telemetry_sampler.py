"""One sampler serves every live page: the newest reading at once, never a stale one, without delays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from appliance.api.admin.system_shapes import system_shape
from appliance.telemetry import sampler as system_sampler
from appliance.telemetry.gpu import NO_GPU, GpuProbe
from appliance.telemetry.host import HostProbe
from appliance.telemetry.metrics import OTHER_TENANTS, Metrics
from appliance.telemetry.readings import DatabaseReading
from appliance.telemetry.sampler import SystemSampler, TooManySubscribers
from tests.support.clock import FakeClock
from tests.support.console_fixtures import EngineSide, engine_status, tenant_reading


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
        started_at=clock.now(),
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


async def test_subscribers_are_limited_and_leave_room_when_they_go(sampler: SystemSampler) -> None:
    await sampler.sample()
    first = sampler.subscribe()
    await anext(first)
    with pytest.raises(TooManySubscribers, match="at most 1 live streams"):
        await anext(sampler.subscribe(at_most=1))
    await first.aclose()
    second = sampler.subscribe(at_most=1)
    await anext(second)
    await second.aclose()


async def test_history_is_bounded(sampler: SystemSampler) -> None:
    for _ in range(system_sampler.HISTORY_SAMPLES + 5):
        await sampler.sample()

    assert len(sampler.history) == system_sampler.HISTORY_SAMPLES


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


def test_a_gpu_is_read_with_what_it_reports_and_none_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_arguments: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 << 30, used=1 << 30),
        "nvmlDeviceGetName": lambda _: "Card",
        "nvmlDeviceGetPowerUsage": lambda _: 250_000,
        "nvmlDeviceGetUtilizationRates": unsupported,
        "nvmlDeviceGetTemperature": unsupported,
        "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    probe = GpuProbe()
    probe.open()
    (reading,) = probe.read()
    assert (reading.name, reading.power_w, reading.utilization, reading.temperature_c) == ("Card", 250.0, None, None)
    assert reading.compute_capability == (9, 0)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", unsupported)
    assert probe.read()[0].compute_capability is None


def test_labels_of_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.telemetry.metrics.TENANTS_MAX", 2)
    metrics = Metrics()
    for number in range(4):
        metrics.settled(model="m", tenant=f"t{number}", reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    text = metrics.render().decode()

    assert f'gatehouse_prompt_tokens_total{{model="m",tenant="{OTHER_TENANTS}"}} 2.0' in text
    assert 'tenant="t3"' not in text


async def test_who_holds_seats_and_blocks_is_measured_with_bounded_labels(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.telemetry.metrics.TENANTS_MAX", 1)
    side = EngineSide(clock, tenants=[tenant_reading("bob", running=3, waiting=2, blocks=40)])
    side.tenants += [tenant_reading("charlie", blocks=5), tenant_reading("dora", blocks=6)]
    sampler, metrics = side.sampler(3600.0), Metrics()
    metrics.attach(lambda: sampler.latest)
    await sampler.sample()
    text = metrics.render().decode()

    assert 'gatehouse_tenant_kv_blocks{model="demo",tenant="bob"} 40.0' in text
    assert 'gatehouse_tenant_requests_running{model="demo",tenant="bob"} 3.0' in text
    assert 'gatehouse_tenant_requests_waiting{model="demo",tenant="bob"} 2.0' in text
    assert f'gatehouse_tenant_kv_blocks{{model="demo",tenant="{OTHER_TENANTS}"}} 11.0' in text


async def test_the_host_tier_and_speculation_are_measured(clock: FakeClock) -> None:
    totals = {"swapped_in_blocks_total": 3, "swapped_out_blocks_total": 4, "draft_tokens_total": 50, "fallback_steps_total": 6}
    plain = {"prompt_logprobs": 4, "logit_bias": 5}
    status = engine_status(
        host_blocks_total=100, host_blocks_used=7, accepted_draft_tokens_total=30, plain_steps_total=plain, **totals
    )
    sampler, metrics = EngineSide(clock, status=status).sampler(3600.0), Metrics()
    metrics.attach(lambda: sampler.latest)
    await sampler.sample()
    text = metrics.render().decode()

    for line in (
        'gatehouse_host_kv_blocks{model="demo"} 100.0',
        'gatehouse_host_kv_blocks_used{model="demo"} 7.0',
        'gatehouse_swapped_in_kv_blocks_total{model="demo"} 3.0',
        'gatehouse_swapped_out_kv_blocks_total{model="demo"} 4.0',
        'gatehouse_draft_tokens_total{model="demo"} 50.0',
        'gatehouse_accepted_draft_tokens_total{model="demo"} 30.0',
        'gatehouse_engine_steps_total{model="demo"} 10.0',
        'gatehouse_engine_fallback_steps_total{model="demo"} 6.0',
        'gatehouse_engine_plain_steps_total{model="demo",reason="prompt_logprobs"} 4.0',
        'gatehouse_engine_plain_steps_total{model="demo",reason="logit_bias"} 5.0',
    ):
        assert line in text


async def test_the_system_says_who_holds_what(clock: FakeClock) -> None:
    status = engine_status(host_blocks_total=100, host_blocks_used=7, draft_tokens_total=50, accepted_draft_tokens_total=30)
    sampler = EngineSide(clock, status=status, tenants=[tenant_reading("bob", running=3, waiting=2, blocks=40)]).sampler(3600.0)
    (engine,) = system_shape(await sampler.sample(), "test").engine
    (bob,) = engine.tenants

    assert (bob.name, bob.requests_running, bob.requests_waiting, bob.kv_blocks) == ("bob", 3, 2, 40)
    assert (engine.host_kv_blocks.total, engine.host_kv_blocks.used) == (100, 7)
    assert (engine.draft_tokens_total, engine.accepted_draft_tokens_total) == (50, 30)
    assert (engine.fallback_steps_total, engine.fallback_reason) == (0, None)


async def test_the_system_says_why_an_engine_fell_back_to_its_plain_way(clock: FakeClock) -> None:
    reason, plain = "a step in flight failed: RuntimeError: boom", {"typical_p": 4}
    status = engine_status(fallback_steps_total=2, fallback_reason=reason, plain_steps_total=plain)
    (engine,) = system_shape(await EngineSide(clock, status=status).sampler(3600.0).sample(), "test").engine

    assert (engine.fallback_steps_total, engine.fallback_reason) == (2, reason)
    assert engine.plain_steps_total == plain
