"""The overview page, its live stream, and error pages of the console."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from sqlalchemy.exc import TimeoutError as PoolTimeout

from appliance.api.admin.system_shapes import system_shape
from appliance.console import error_pages, live_stream
from appliance.console.context import Console
from appliance.console.overview_view import prompt_history
from appliance.metering.prices import PriceBook
from appliance.telemetry.gpu import GpuReading
from appliance.tenancy.access import Access
from engine.protocol import MemoryPart
from tests.support.clock import FakeClock
from tests.support.console_fixtures import ConsoleApp, tenant_reading
from tests.support.engine_messages import GIB, engine_info, engine_status
from tests.support.factories import pending, posted

GPU = GpuReading(
    index=0,
    name="NVIDIA Test 9",
    memory_total_bytes=16 * GIB,
    memory_used_bytes=4 * GIB,
    utilization=87,
    power_w=512.3,
    temperature_c=61,
)


async def overview(console: ConsoleApp) -> str:
    """Return Alice's overview of a fresh sample."""
    await console.services.sampler.sample()
    return (await (await console.alice()).get("/")).text


async def test_without_a_gpu_the_overview_names_the_cpu(console: ConsoleApp) -> None:
    page = await overview(console)

    assert "No NVIDIA GPU" in page
    assert "The engine runs on the CPU (A processor)" in page


async def test_a_device_name_that_begins_with_cpu_is_not_shown_twice(console: ConsoleApp) -> None:
    console.engine_side.info = engine_info(device_name="CPU, 3 threads")

    assert "The engine runs on the CPU (3 threads)" in await overview(console)


@pytest.mark.parametrize(("threads", "words"), [(3, " (3 threads)"), (2, "")])
async def test_several_engines_on_the_cpu_show_the_device_only_if_it_is_the_same(
    console: ConsoleApp, threads: int, words: str
) -> None:
    console.engine_side.info = engine_info(device_name="CPU, 3 threads")
    (first,) = console.engine_side.engines()
    info = engine_info(device_name=f"CPU, {threads} threads")
    console.engine_side.others = [dataclasses.replace(first, model="second", info=info)]

    assert f"No NVIDIA GPU. The engines run on the CPU{words}</dd>" in await overview(console)


async def test_the_default_of_max_tokens_is_shown_with_its_model(console: ConsoleApp) -> None:
    console.engine_side.default_max_tokens = 4096

    assert "max_tokens 4,096 by default" in await overview(console)


async def test_a_restarting_engine_has_no_uptime_but_a_start_time_and_its_error(console: ConsoleApp) -> None:
    console.engine_side.state, console.engine_side.error = "restarting", "the process ended with signal 9"

    page = await overview(console)

    assert re.search(r"started \d+ s ago", page)
    assert "up " not in page.partition('class="facts muted"')[2].partition("</p>")[0]
    assert '<p class="notice warn">The process ended with signal 9.</p>' in page


@pytest.mark.parametrize(("for_limits", "tile"), [(0, "<dd>3</dd>"), (40, "<dd>43 <small>40 for limits</small></dd>")])
async def test_requests_that_wait_for_their_limits_are_waiting_too(console: ConsoleApp, for_limits: int, tile: str) -> None:
    console.engine_side.status = engine_status(num_waiting=3)
    console.engine_side.waiting_for_limits = for_limits

    page = await overview(console)

    assert f'<dt><a href="/requests">Waiting</a></dt>{tile}' in page


async def test_an_engine_shows_which_of_its_waiting_requests_wait_for_limits(console: ConsoleApp) -> None:
    console.engine_side.waiting_for_limits = 40

    assert "0 running, 0 waiting for a seat, 40 for limits</span>" in await overview(console)


async def test_an_unreadable_gpu_is_an_error_and_not_a_missing_gpu(console: ConsoleApp) -> None:
    console.engine_side.gpu_error = "GPU cannot be read: driver gone"

    page = await overview(console)

    assert "GPU cannot be read: driver gone" in page
    assert "No NVIDIA GPU" not in page


async def test_the_memory_of_one_gpu_is_split_into_weights_kv_other_and_free(console: ConsoleApp) -> None:
    console.engine_side.gpus, console.engine_side.gpu_error = [GPU], None
    console.engine_side.info = engine_info(device="cuda")

    page = await overview(console)

    for text in (
        "NVIDIA Test 9",
        "weights <b>1.0 GiB",
        "KV <b>2.0 GiB",
        "other <b>1.0 GiB",
        "free <b>12.0 GiB",
        "512 W",
        "61 °C",
    ):
        assert text in page
    assert "4.0 GiB of 16.0 GiB" in page


async def test_with_several_gpus_only_the_used_memory_of_each_is_shown(console: ConsoleApp) -> None:
    console.engine_side.gpus = [GPU, dataclasses.replace(GPU, index=1, power_w=None, utilization=None, temperature_c=None)]
    console.engine_side.gpu_error = None
    console.engine_side.info = engine_info(device="cuda")

    page = await overview(console)

    assert "used <b>4.0 GiB" in page
    assert "weights <b>" not in page
    assert "None" not in page


@pytest.mark.parametrize(
    ("quantization", "shown"),
    [
        ("none", "weights 1.0 GiB"),
        ("awq", "weights 1.0 GiB in awq"),
        ("int8 (stored as fp8 in blocks of 128 x 128)", "weights 1.0 GiB in int8 (stored as fp8 in blocks of 128 x 128)"),
        ("none (stored as int8 in groups of 128)", "weights 1.0 GiB (stored as int8 in groups of 128)"),
    ],
)
async def test_the_weight_format_and_the_format_of_a_decoded_checkpoint_are_shown(
    quantization: str, shown: str, console: ConsoleApp
) -> None:
    console.engine_side.info = engine_info(quantization=quantization)
    facts = (await overview(console)).partition('class="facts muted"')[2].partition("</p>")[0]
    assert shown in [fact.strip() for fact in re.split(r"[·>\n]", facts)]


async def test_measured_and_predicted_memory_are_shown_part_by_part(console: ConsoleApp) -> None:
    console.engine_side.info = engine_info(memory_note="the context is 512 tokens: it needs more")

    page = " ".join((await overview(console)).split())

    assert '<dt>Weights</dt><dd>1.0 GiB <small class="muted">1.0 GiB</small></dd>' in page
    assert '<dt>Activations</dt><dd>– <small class="muted">768 MiB</small></dd>' in page
    assert '<dt>KV cache</dt><dd>2.0 GiB <small class="muted">2.0 GiB</small></dd>' in page
    assert "Graphs" not in page
    assert "the context is 512 tokens: it needs more" in page


async def test_console_and_system_api_say_that_a_gpu_is_not_used(console: ConsoleApp) -> None:
    console.engine_side.info = engine_info(device_note="torch finds no usable GPU. Too old.")
    assert "On the CPU although an NVIDIA driver is loaded: torch finds no usable GPU. Too old." in await overview(console)
    (engine,) = system_shape(await console.services.sampler.sample(), "1").engine
    assert engine.device_note == "torch finds no usable GPU. Too old."


async def test_the_system_api_reports_the_same_memory(console: ConsoleApp) -> None:
    (engine,) = system_shape(await console.services.sampler.sample(), "1").engine

    assert [(part.name, part.predicted_bytes, part.measured_bytes) for part in engine.memory] == [
        ("weights", GIB, GIB),
        ("activations", 768 << 20, None),
        ("graphs", 0, None),
        ("kv_cache", 2 * GIB, 2 * GIB - (1 << 20)),
    ]
    assert engine.memory_note is None


async def test_the_memory_of_captured_graphs_is_shown_with_their_number(console: ConsoleApp) -> None:
    graphs = MemoryPart(name="graphs", predicted_bytes=GIB, measured_bytes=64 << 20, num_predicted=91, num_measured=9)
    console.engine_side.info = engine_info(memory=[graphs])

    (engine,) = system_shape(await console.services.sampler.sample(), "1").engine

    assert [(part.num_predicted, part.num_measured) for part in engine.memory] == [(91, 9)]
    assert '<dt>Graphs</dt><dd>64.0 MiB of 9 <small class="muted">1.0 GiB of 91</small></dd>' in await overview(console)


async def test_an_engine_without_facts_has_no_memory_section(console: ConsoleApp) -> None:
    console.engine_side.info = None

    assert "Device memory" not in await overview(console)


async def test_the_overview_shows_kv_blocks_latencies_and_the_host(console: ConsoleApp) -> None:
    page = await overview(console)

    for text in (
        "used <b>250",
        "cached <b>100",
        "free <b>650",
        "12 ms",
        "213 ms",
        "927 ms",
        "37 %",
        "60.0 GiB free of 100 GiB",
    ):
        assert text in page


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [("failed", "no such file: model.safetensors", "model.safetensors"), ("loading", None, "loading")],
)
async def test_an_engine_that_is_not_ready_shows_its_state_or_error(
    console: ConsoleApp, state: str, error: str | None, text: str
) -> None:
    console.engine_side.state, console.engine_side.error = state, error
    console.engine_side.info = console.engine_side.status = None

    page = await overview(console)

    assert text in page


async def test_an_engine_that_has_stopped_answering_is_not_shown_as_ready(console: ConsoleApp) -> None:
    console.engine_side.problem = "engine of demo generated its last token 31 s ago"
    page = await overview(console)
    assert '<span class="badge warn">not ready</span>' in page
    assert '<p class="notice warn">Engine of demo generated its last token 31 s ago.</p>' in page


async def test_a_database_that_refuses_writes_is_reported_at_the_top(console: ConsoleApp) -> None:
    console.engine_side.database_ok = False

    assert "The database accepts no writes" in await overview(console)


async def test_today_s_totals_come_from_the_ledger(console: ConsoleApp, clock: FakeClock) -> None:
    await console.services.prices.add(model="demo", currency="EUR", prompt=10**6, cached_prompt=0, completion=10**6)
    price = await console.services.prices.current("demo", clock.now())
    entry = pending(console.cast.bob, price=price, admitted_at=clock.now())
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id, prompt=1000, completion=500))
    clock.advance(5)

    page = await overview(console)

    assert ">0.001500<" in page
    assert "1,500" in page
    assert entry.request_id in page


async def test_costs_in_another_currency_are_shown_separately(console: ConsoleApp, clock: FakeClock) -> None:
    dollar_prices = PriceBook(console.services.db, clock, currency="USD")  # the price was added under another setting
    price = await dollar_prices.add(model="demo", currency="USD", prompt=10**12, cached_prompt=0, completion=0)
    entry = pending(console.cast.bob, price=price, admitted_at=clock.now())
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id, prompt=3, completion=1))
    clock.advance(5)

    page = await overview(console)

    assert ">0.000000 <small>" in page
    assert "3.00 USD" in page


async def test_the_prompt_token_rate_is_never_negative_after_an_engine_restart(console: ConsoleApp, clock: FakeClock) -> None:
    side, sampler = console.engine_side, console.services.sampler
    sampler.history.clear()
    for total in (0, 100, 400, 50):
        side.status = engine_status(prompt_tokens_total=total)
        await sampler.sample()
        clock.advance(2)

    assert prompt_history("demo", list(sampler.history)) == [50.0, 150.0, 0.0]


async def open_stream(console: ConsoleApp, view: str, *, token: str) -> Any:
    """Return the frames of the live stream of `view`, for the session of `token`."""
    return live_stream._frames(Console(console.services), view, token=token)


async def test_the_stream_sends_the_current_state_and_then_every_new_sample(console: ConsoleApp, clock: FakeClock) -> None:
    token = (await console.alice()).http.cookies["gatehouse_session"]
    stream = await open_stream(console, "overview", token=token)

    first = (await anext(stream)).decode()
    console.engine_side.tokens_per_second = 77.7
    clock.advance(1)
    await console.services.sampler.sample()
    second = (await anext(stream)).decode()
    await stream.aclose()

    assert first.startswith("data: ")
    assert first.endswith("\n\n")
    assert "\r" not in first
    assert all(line.startswith("data: ") for line in first.strip().splitlines())
    assert "77.7" not in first
    assert "77.7" in second


async def test_the_stream_of_requests_has_buttons_only_for_members_who_may_cancel(console: ConsoleApp) -> None:
    console.engine_side.add(console.cast.bob, "req_live")

    for browser, changing in ((await console.alice(), True), (await console.vera(), False)):
        stream = await open_stream(console, "requests", token=browser.http.cookies["gatehouse_session"])
        frame = (await anext(stream)).decode()
        await stream.aclose()

        assert "req_live" in frame
        assert ("Cancel" in frame) is changing


async def test_one_sample_is_rendered_once_for_all_streams(console: ConsoleApp, monkeypatch: pytest.MonkeyPatch) -> None:
    token = (await console.alice()).http.cookies["gatehouse_session"]
    console_state, rendered = Console(console.services), 0

    async def fragment(console_state: Console, access: Access) -> str:
        nonlocal rendered
        rendered += 1
        return "x"

    monkeypatch.setitem(live_stream.VIEWS, "overview", fragment)
    for _ in range(5):
        stream = live_stream._frames(console_state, "overview", token=token)
        await anext(stream)
        await stream.aclose()

    assert rendered == 1


async def test_the_stream_of_an_ended_session_sends_signed_out_and_ends(console: ConsoleApp) -> None:
    token = (await console.alice()).http.cookies["gatehouse_session"]
    await console.services.sessions.close(token)

    sent = [frame async for frame in await open_stream(console, "overview", token=token)]

    assert sent == [b"event: signed-out\ndata: sign in again\n\n"]


async def test_an_unknown_view_is_a_bad_request(console: ConsoleApp) -> None:
    assert (await (await console.alice()).get("/console/events?view=secrets")).status_code == 400


async def test_streams_beyond_the_limit_get_503_with_retry_after(console: ConsoleApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_stream, "STREAMS_MAX", 0)

    answer = await (await console.alice()).get("/console/events")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")


async def test_without_scripts_a_page_says_that_it_shows_the_state_at_load(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/")).text
    assert "<span data-live-text>As of page load</span>" in page


async def test_an_internal_error_shows_only_a_reference_to_the_log(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raise_internal_error(*_: object, **__: object) -> None:
        raise RuntimeError("the secret inner detail")

    alice = await console.alice()
    monkeypatch.setattr(type(console.services.past_requests), "page", raise_internal_error)

    page, fragment = await alice.get("/requests"), await alice.fragment("/requests")

    assert (page.status_code, fragment.status_code) == (500, 500)
    assert "err_" in page.text
    assert "<html" not in fragment.text
    assert "secret inner detail" not in page.text + fragment.text + str(fragment.headers)


async def test_an_internal_error_after_a_commit_does_not_claim_that_nothing_changed(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, revoke = await console.alice(), console.services.keys.revoke

    async def revoke_then_raise(key_id: str, **options: Any) -> None:
        await revoke(key_id, **options)
        raise RuntimeError("after COMMIT")

    monkeypatch.setattr(console.services.keys, "revoke", revoke_then_raise)
    answer = await alice.post(f"/keys/{console.cast.bob.key.id}/revoke")

    assert answer.status_code == 500
    assert "Check whether the change was made before you send it again." in answer.text


async def test_an_unknown_path_is_a_page_for_browsers_and_an_error_object_for_api_clients(console: ConsoleApp) -> None:
    visitor = console.visitor()

    page = await visitor.get("/nothing/here", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    program = await visitor.get("/nothing/here", Accept="*/*")

    assert (page.status_code, program.status_code) == (404, 404)
    assert "This page does not exist" in page.text
    assert page.headers["x-frame-options"] == "DENY"
    assert program.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize(("path", "status"), [("/nothing/here", 404), ("/tenants/tn_x/nothing", 404), ("/logout", 405)])
async def test_error_pages_keep_the_menu_for_signed_in_members(console: ConsoleApp, path: str, status: int) -> None:
    browser = "text/html,application/xhtml+xml,*/*;q=0.8"
    page = await (await console.alice()).get(path, Accept=browser)
    visitor = await console.visitor().get(path, Accept=browser)

    assert (page.status_code, visitor.status_code) == (status, status)
    assert 'href="/tenants"' in page.text
    assert "alice" in page.text
    assert 'href="/tenants"' not in visitor.text
    assert (error_pages.NOT_FOUND if status == 404 else error_pages.WRONG_METHOD) in page.text


async def test_a_wrong_method_gets_405_with_allow_and_api_paths_have_no_error_pages(console: ConsoleApp) -> None:
    alice = await console.alice()
    page = await alice.get("/logout", Accept="text/html")
    readable = await alice.http.post("/usage", headers={"accept": "text/html"})
    program = await alice.get("/v1/nothing/here", Accept="text/html")

    assert (page.status_code, page.headers["allow"]) == (405, "OPTIONS, POST")
    assert (readable.status_code, readable.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert program.json()["error"]["code"] == "not_found"


async def test_an_unknown_path_gets_503_while_the_database_is_unreachable(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = await console.alice()

    async def raise_pool_timeout(_token: str) -> None:
        raise PoolTimeout

    monkeypatch.setattr(console.services.sessions, "resolve", raise_pool_timeout)
    page = await alice.get("/nothing/here", Accept="text/html")

    assert page.status_code == 503
    assert "err_" in page.text
    assert '<a class="button primary" href="">Try again</a>' in page.text


async def test_the_stream_ends_when_the_appliance_shuts_down(console: ConsoleApp) -> None:
    token = (await console.alice()).http.cookies["gatehouse_session"]
    stream = await open_stream(console, "overview", token=token)
    await anext(stream)

    console.engine_side.draining = True
    await console.services.sampler.sample()

    assert [frame async for frame in stream] == []


async def test_the_overview_shows_running_waiting_and_kv_blocks_by_tenant(console: ConsoleApp) -> None:
    console.engine_side.tenants = [
        tenant_reading(f"team {number}", waiting=number, blocks=100 - number) for number in range(10)
    ]
    page = await overview(console)

    assert "10 running, 45 waiting" in page
    assert 'href="/tenants/tn_team 0"' in page
    assert "team 5: 95 of 1000 blocks" in page
    assert "team 6" not in page
    assert "4 more" in page
    assert "all others: 370 of 1000 blocks" in page


async def test_without_requests_the_overview_omits_all_optional_figures(console: ConsoleApp) -> None:
    page = await overview(console)

    assert "No requests run or wait for a seat." in page
    assert "KV blocks in host memory" not in page
    assert "Draft tokens accepted" not in page
    assert "slow path" not in page


async def test_steps_that_fell_back_to_the_slow_path_are_shown_with_the_reason(console: ConsoleApp) -> None:
    console.engine_side.status = engine_status(fallback_steps_total=1200, fallback_reason="a step in flight failed: <boom>")
    page = await overview(console)

    assert "1,200 steps fell back to the slow path; the last because a step in flight failed: &lt;boom&gt;" in page


@pytest.mark.parametrize(("scored", "text"), [(0, "3 logit_bias"), (1200, "1,200 prompt_logprobs, 3 logit_bias")])
async def test_slow_path_steps_because_of_a_request_are_counted_by_reason(console: ConsoleApp, scored: int, text: str) -> None:
    console.engine_side.status = engine_status(plain_steps_total={"prompt_logprobs": scored, "logit_bias": 3})
    page = await overview(console)

    assert f"Steps on the slow path because of a request in them: {text}</p>" in page


async def test_host_memory_blocks_and_draft_acceptance_are_shown_when_in_use(console: ConsoleApp) -> None:
    console.engine_side.status = engine_status(
        host_blocks_total=4000, host_blocks_used=1200, draft_tokens_total=200, accepted_draft_tokens_total=150
    )
    page = await overview(console)

    assert "1,200 of 4,000" in page
    assert "75 %" in page
