"""A model is ready if it has recently generated a token, for a request or for an unbilled probe."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import structlog

from appliance.base.clock import SystemClock
from appliance.base.consecutive_failures import LOG_INTERVAL_S
from appliance.base.errors import EngineUnavailable
from appliance.serving.engine_readings import engine_reading
from appliance.serving.model_registry import ModelRegistry, ServedModel
from appliance.serving.readiness import Readiness
from appliance.serving.supervisor import Supervisor
from appliance.serving.tokenizer import ModelTokenizer
from tests.support.clock import FakeClock
from tests.support.engine_messages import engine_status
from tests.support.fake_engine import FAIL, command
from tests.support.polling import poll_until
from tests.support.served_model import make_hollow_model

INTERVAL_S = 30.0


@pytest.fixture
async def model(tmp_path: Path, clock: FakeClock) -> AsyncIterator[ServedModel]:
    """A served model whose engine is started, with a fake clock."""
    folder = make_hollow_model(tmp_path / "tiny")
    engine = Supervisor(name="tiny", command=command, clock=clock)
    served = ServedModel(
        name="tiny",
        path=folder,
        engine=engine,
        tokenizer=ModelTokenizer.load(folder),
        context_len=None,
        sampling_defaults={},
        default_max_tokens=None,
        created=SystemClock().now(),
    )
    engine.start()
    yield served
    await engine.stop()


async def test_a_loading_engine_is_named(model: ServedModel, clock: FakeClock) -> None:
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S)

    assert readiness.problem(model) == "engine of tiny is loading"


async def test_the_error_of_a_dead_engine_is_not_public(model: ServedModel, clock: FakeClock) -> None:
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S)
    model.engine.state, model.engine.error = "failed", "no tensor in /home/alice/models/tiny"

    assert readiness.problem(model) == "engine of tiny is failed"


async def test_the_first_probe_makes_a_model_ready_and_silence_makes_it_stale(model: ServedModel, clock: FakeClock) -> None:
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S)
    await model.engine.wait_for_state("ready")
    assert readiness.problem(model) == "engine of tiny has not generated a token yet"
    readiness.start()
    await poll_until(lambda: readiness.problem(model) is None)
    await readiness.stop()

    clock.advance(INTERVAL_S + 1)
    assert "last token 31 s ago" in (readiness.problem(model) or "")


async def test_a_reading_of_the_engine_says_why_its_model_is_not_ready(model: ServedModel, clock: FakeClock) -> None:
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S)
    await model.engine.wait_for_state("ready")
    model.engine.last_token_monotonic_s = clock.monotonic_s()
    assert engine_reading(model, clock, readiness, tenant_names={}, waiting_for_limits=0).problem is None

    clock.advance(INTERVAL_S + 1)
    reading = engine_reading(model, clock, readiness, tenant_names={}, waiting_for_limits=0)
    assert (reading.state, reading.problem) == ("ready", "engine of tiny generated its last token 31 s ago")


async def test_probes_are_left_out_of_all_statistics(model: ServedModel, clock: FakeClock) -> None:
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S)
    await model.engine.wait_for_state("ready")
    await poll_until(lambda: model.engine.status is not None)
    readiness.start()
    await poll_until(lambda: readiness.problem(model) is None)
    await poll_until(lambda: (model.engine.status or engine_status()).generation_tokens_total == 1)
    clock.advance(1.0)
    await poll_until(lambda: len(model.engine.stats._totals) > 1)
    await readiness.stop()

    assert model.engine.stats.tokens_per_second(clock.monotonic_s()) == 0.0
    assert model.engine.stats.probe_prompt_tokens == 1


async def test_a_probe_runs_before_the_interval_is_over(model: ServedModel, clock: FakeClock) -> None:
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S)
    readiness.start()
    await poll_until(lambda: readiness.problem(model) is None)
    before = model.engine.last_token_monotonic_s
    clock.advance(INTERVAL_S / 2)
    await poll_until(lambda: model.engine.last_token_monotonic_s != before)
    await readiness.stop()

    assert readiness.problem(model) is None


async def test_a_probe_that_fails_again_and_again_is_logged_once_a_minute(
    model: ServedModel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.serving.readiness.POLL_S", 0.0)
    await model.engine.wait_for_state("ready")
    client, submit = model.engine._client, Mock(wraps=model.engine.submit)
    assert client is not None
    assert client.info is not None
    client.info.eos_token_ids[:] = [FAIL]
    monkeypatch.setattr(model.engine, "submit", submit)
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S)
    with structlog.testing.capture_logs() as logs:
        readiness.start()
        await poll_until(lambda: submit.call_count > 5)
        clock.advance(LOG_INTERVAL_S)
        await poll_until(lambda: len(logs) > 1)
        await readiness.stop()
    assert [(line["event"], line["model"]) for line in logs] == [("probe failed", "tiny")] * 2
    assert (logs[0]["failures"], logs[1]["failures"] > 5) == (1, True)
    assert logs[0]["reason"]


async def test_a_failed_probe_is_logged_and_probing_continues(
    model: ServedModel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    readiness = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S)

    async def fail(_model: ServedModel) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(readiness, "_keep_fresh", fail)
    with structlog.testing.capture_logs() as logs:
        readiness.start()
        await poll_until(lambda: bool(logs))
        await readiness.stop()
    assert [(line["task"], repr(line["exc_info"])) for line in logs if "task" in line] == [
        ("probe tiny", "ValueError('a bug')")
    ]


async def test_the_end_of_a_probe_that_nobody_awaits_any_more_is_no_error(
    model: ServedModel, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    readiness, receivers = Readiness(ModelRegistry([model]), clock, interval_s=INTERVAL_S), []
    await model.engine.wait_for_state("ready")
    monkeypatch.setattr(model.engine, "submit", lambda _request, receiver: receivers.append(receiver))
    readiness.start()
    await poll_until(lambda: bool(receivers))
    await readiness.stop()

    receivers[0].fail(EngineUnavailable("the engine process ended"))
