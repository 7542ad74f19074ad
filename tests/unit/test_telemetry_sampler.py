"""System sampling and metrics: subscribers, history, GPU readings, bounded tenant labels, and engine gauges."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from appliance.api.admin.system_shapes import system_shape
from appliance.telemetry import sampler as system_sampler
from appliance.telemetry.gpu import NO_GPU, GpuProbe, GpuReading
from appliance.telemetry.host import HostProbe
from appliance.telemetry.metrics import OTHER_TENANTS, Metrics
from appliance.telemetry.readings import DatabaseReading
from appliance.telemetry.sampler import SystemSampler, TooManySubscribers
from engine.protocol import KernelChoice
from tests.support.clock import FakeClock
from tests.support.console_fixtures import EngineSide, tenant_reading
from tests.support.engine_messages import GIB, engine_info, engine_status


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


async def test_a_slow_subscriber_skips_to_the_newest_sample(sampler: SystemSampler, clock: FakeClock) -> None:
    await sampler.sample()
    snapshots = sampler.subscribe()
    await anext(snapshots)
    for _ in range(3):
        clock.advance(1)
        await sampler.sample()

    assert (await anext(snapshots)).at == clock.now()
    await snapshots.aclose()


async def test_the_number_of_subscribers_is_limited_until_one_leaves(sampler: SystemSampler) -> None:
    await sampler.sample()
    first = sampler.subscribe()
    await anext(first)
    with pytest.raises(TooManySubscribers, match="at most 1 live streams"):
        await anext(sampler.subscribe(at_most=1))
    await first.aclose()
    second = sampler.subscribe(at_most=1)
    await anext(second)
    await second.aclose()


async def test_a_gpu_that_does_not_answer_blocks_no_other_task(sampler: SystemSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    other_has_run = threading.Event()

    def wait_for_the_other() -> list[GpuReading]:
        assert other_has_run.wait(10)
        return []

    monkeypatch.setattr(sampler, "_gpus", wait_for_the_other)
    sampling = asyncio.create_task(sampler.sample())
    await asyncio.sleep(0)
    other_has_run.set()

    assert (await sampling).gpus == []


async def test_snapshots_are_taken_while_the_gpu_driver_does_not_answer(
    sampler: SystemSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()

    def read() -> list[GpuReading]:
        answer.wait(60)
        return []

    monkeypatch.setattr(system_sampler, "GPU_ANSWER_S", 0.0)
    monkeypatch.setattr(sampler, "_gpus", read)

    first, second = await sampler.sample(), await sampler.sample()
    answer.set()
    async with asyncio.timeout(60):
        while (answered := await sampler.sample()).gpu_error != NO_GPU:
            pass

    assert first.gpu_error == second.gpu_error == "the GPU driver does not answer"
    assert answered.gpus == []
    await sampler.stop()


async def test_a_gpu_driver_that_never_answers_does_not_keep_the_process_alive(
    sampler: SystemSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_daemon: list[bool] = []

    def note_thread() -> list[GpuReading]:
        is_daemon.append(threading.current_thread().daemon)
        return []

    monkeypatch.setattr(sampler, "_gpus", note_thread)
    await sampler.sample()

    assert is_daemon == [True]
    await sampler.stop()


async def test_a_sampler_stops_while_the_gpu_driver_does_not_answer(
    sampler: SystemSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, answer = threading.Event(), threading.Event()

    def read() -> list[GpuReading]:
        began.set()
        answer.wait(60)
        return []

    monkeypatch.setattr(system_sampler, "GPU_ANSWER_S", 0.0)
    monkeypatch.setattr(sampler, "_gpus", read)
    await sampler.sample()
    await asyncio.to_thread(began.wait, 60)
    async with asyncio.timeout(30):
        await sampler.stop()

    assert not answer.is_set()
    answer.set()


async def test_history_is_bounded(sampler: SystemSampler) -> None:
    for _ in range(system_sampler.HISTORY_SAMPLES + 5):
        await sampler.sample()

    assert len(sampler.history) == system_sampler.HISTORY_SAMPLES


async def test_host_figures_are_plausible(sampler: SystemSampler) -> None:
    host = (await sampler.sample()).host

    assert 0 < host.memory_used_bytes < host.memory_total_bytes
    assert 0 < host.disk_free_bytes < host.disk_total_bytes
    assert 0 <= host.cpu_percent <= 100


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_library_not_found() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", raise_library_not_found)
    probe = GpuProbe()

    assert probe.read() == []
    assert probe.error == "no NVIDIA GPU"


def test_a_lost_gpu_is_reported_as_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_gpu_is_lost(*_arguments: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", raise_gpu_is_lost)
    probe = GpuProbe()

    assert probe.read() == []
    assert "GPU cannot be read" in (probe.error or "")
    probe.close()


def test_nvml_is_not_shut_down_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    probe = GpuProbe()

    def close_meanwhile() -> int:
        probe.close()
        calls.append("read")
        return 0

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("shut down"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", close_meanwhile)
    probe.read()

    assert calls == ["read"]


def test_nvml_is_shut_down_once_and_not_read_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def count() -> int:
        calls.append("read")
        return 0

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: calls.append("shut down"))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", count)
    probe = GpuProbe()
    probe.read()
    probe.close()
    probe.close()
    probe.read()

    assert calls == ["read", "shut down"]


def test_nvml_is_opened_by_the_first_reading_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def raise_driver_not_loaded() -> None:
        calls.append("open")
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", raise_driver_not_loaded)
    probe = GpuProbe()

    assert (probe.read(), probe.read()) == ([], [])
    assert calls == ["open"]


def test_a_driver_that_works_again_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)]

    def raise_first() -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(pynvml, "nvmlInit", raise_first)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 0)
    probe = GpuProbe()
    probe.read()
    assert "GPU cannot be read" in (probe.error or "")
    probe.read()
    assert probe.error == NO_GPU


def test_values_that_a_gpu_does_not_report_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_not_supported(*_arguments: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 << 30, used=1 << 30),
        "nvmlDeviceGetName": lambda _: "Card",
        "nvmlDeviceGetPowerUsage": lambda _: 250_000,
        "nvmlDeviceGetUtilizationRates": raise_not_supported,
        "nvmlDeviceGetTemperature": raise_not_supported,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    probe = GpuProbe()
    (reading,) = probe.read()
    assert (reading.name, reading.power_w, reading.utilization, reading.temperature_c) == ("Card", 250.0, None, None)


async def test_the_number_of_tenant_labels_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.telemetry.metrics.TENANTS_MAX", 2)
    metrics = Metrics()
    for number in range(4):
        metrics.settled(model="m", tenant=f"t{number}", reason="stop", prompt_tokens=1, cached_tokens=0, completion_tokens=1)
    text = (await metrics.render()).decode()

    assert f'gatehouse_prompt_tokens_total{{model="m",tenant="{OTHER_TENANTS}"}} 2.0' in text
    assert 'tenant="t3"' not in text


async def test_each_scrape_says_whether_the_ledger_can_record_usage() -> None:
    states = iter([True, False])
    metrics = Metrics()
    metrics.watch_ledger(lambda: next(states))

    assert "gatehouse_ledger_up 1.0\n" in (await metrics.render()).decode()
    assert "gatehouse_ledger_up 0.0\n" in (await metrics.render()).decode()


async def test_metrics_are_rendered_outside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    def is_healthy() -> bool:
        threads.append(threading.current_thread())
        return True

    metrics = Metrics()
    metrics.watch_ledger(is_healthy)
    await metrics.render()

    assert [thread is threading.main_thread() for thread in threads] == [False]


async def test_engine_usage_by_tenant_is_exported_with_bounded_labels(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.telemetry.metrics.TENANTS_MAX", 1)
    side = EngineSide(clock, tenants=[tenant_reading("bob", running=3, waiting=2, blocks=40)])
    side.tenants += [tenant_reading("charlie", blocks=5), tenant_reading("dora", blocks=6)]
    text = await exported(side)

    assert 'gatehouse_tenant_kv_blocks{model="demo",tenant="bob"} 40.0' in text
    assert 'gatehouse_tenant_requests_running{model="demo",tenant="bob"} 3.0' in text
    assert 'gatehouse_tenant_requests_waiting{model="demo",tenant="bob"} 2.0' in text
    assert f'gatehouse_tenant_kv_blocks{{model="demo",tenant="{OTHER_TENANTS}"}} 11.0' in text


async def test_requests_that_wait_for_limits_and_for_a_seat_are_exported_apart(clock: FakeClock) -> None:
    side = EngineSide(clock, status=engine_status(num_waiting=3), waiting_for_limits=40)
    text = await exported(side)

    assert 'gatehouse_requests_waiting{model="demo"} 3.0' in text
    assert 'gatehouse_admission_waiting{model="demo"} 40.0' in text


async def test_host_memory_blocks_speculation_and_slow_path_steps_are_exported(clock: FakeClock) -> None:
    totals = {"swapped_in_blocks_total": 3, "swapped_out_blocks_total": 4, "draft_tokens_total": 50, "fallback_steps_total": 6}
    plain = {"prompt_logprobs": 4, "logit_bias": 5}
    status = engine_status(
        host_blocks_total=100, host_blocks_used=7, accepted_draft_tokens_total=30, plain_steps_total=plain, **totals
    )
    text = await exported(EngineSide(clock, status=status))

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


@pytest.mark.parametrize(("note", "value"), [("torch finds no usable GPU.", 1), (None, 0)], ids=["on the CPU", "as expected"])
async def test_an_engine_on_the_cpu_of_a_machine_with_a_gpu_is_exported(clock: FakeClock, note: str | None, value: int) -> None:
    side = EngineSide(clock, info=dataclasses.replace(engine_info(), device_note=note))
    assert f'gatehouse_engine_gpu_unused{{model="demo"}} {value}.0' in await exported(side)


async def test_the_number_of_refused_kernels_is_exported(clock: FakeClock) -> None:
    choices = [
        KernelChoice(name="attention", serves="parts", refused={"cascade": "timeout"}),
        KernelChoice(name="products", serves="tiles", refused={"GEMV": "wrong results", "Hopper kernel": "timeout"}),
    ]
    side = EngineSide(clock, info=dataclasses.replace(engine_info(), kernel_choices=choices))
    assert 'gatehouse_engine_kernels_refused{model="demo"} 3.0' in await exported(side)


@pytest.mark.parametrize(("problem", "value"), [(None, 1), ("engine of demo generated its last token 31 s ago", 0)])
async def test_whether_health_checks_call_a_model_ready_is_exported(clock: FakeClock, problem: str | None, value: int) -> None:
    text = await exported(EngineSide(clock, problem=problem))
    assert f'gatehouse_model_ready{{model="demo"}} {value}.0' in text
    assert 'gatehouse_engine_up{model="demo"} 1.0' in text


@pytest.mark.parametrize(
    ("error", "value"), [(None, 1), (NO_GPU, 1), (system_sampler.GPU_SILENT, 0), ("GPU cannot be read: Driver mismatch", 0)]
)
async def test_a_gpu_driver_that_gives_no_readings_is_exported(clock: FakeClock, error: str | None, value: int) -> None:
    assert f"gatehouse_gpu_driver_up {value}.0" in await exported(EngineSide(clock, gpu_error=error))


async def test_the_memory_of_the_host_is_exported_with_its_total(clock: FakeClock) -> None:
    text = await exported(EngineSide(clock))
    assert f"gatehouse_host_memory_used_bytes {3 * GIB:.9e}\n" in text
    assert f"gatehouse_host_memory_total_bytes {8 * GIB:.9e}\n" in text


async def exported(side: EngineSide) -> str:
    """Return the metrics of these readings."""
    sampler, metrics = side.sampler(3600.0), Metrics()
    metrics.attach(lambda: sampler.latest)
    await sampler.sample()
    return (await metrics.render()).decode()


async def test_the_system_api_reports_engine_usage_by_tenant(clock: FakeClock) -> None:
    status = engine_status(host_blocks_total=100, host_blocks_used=7, draft_tokens_total=50, accepted_draft_tokens_total=30)
    sampler = EngineSide(clock, status=status, tenants=[tenant_reading("bob", running=3, waiting=2, blocks=40)]).sampler(3600.0)
    (engine,) = system_shape(await sampler.sample(), "test").engine
    (bob,) = engine.tenants

    assert (bob.name, bob.requests_running, bob.requests_waiting, bob.kv_blocks) == ("bob", 3, 2, 40)
    assert (engine.host_kv_blocks.total, engine.host_kv_blocks.used) == (100, 7)
    assert (engine.draft_tokens_total, engine.accepted_draft_tokens_total) == (50, 30)
    assert (engine.fallback_steps_total, engine.fallback_reason) == (0, None)


async def test_the_system_api_reports_slow_path_steps_with_their_reason(clock: FakeClock) -> None:
    reason, plain = "a step in flight failed: RuntimeError: boom", {"typical_p": 4}
    status = engine_status(fallback_steps_total=2, fallback_reason=reason, plain_steps_total=plain)
    (engine,) = system_shape(await EngineSide(clock, status=status).sampler(3600.0).sample(), "test").engine

    assert (engine.fallback_steps_total, engine.fallback_reason) == (2, reason)
    assert engine.plain_steps_total == plain
