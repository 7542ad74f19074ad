"""Requests in the console: those in flight, the history with its search, the page of one request, and cancelling."""

from __future__ import annotations

import re
from datetime import timedelta

import msgspec
import pytest

from appliance.api.shapes import past_request_shape
from appliance.base.ids import new_id
from appliance.console import request_bill
from appliance.metering.ledger.corrections import Correction
from appliance.metering.ledger.records import RequestRecord, Usage
from appliance.tenancy.audit import AuditFilter
from tests.support.cast import OWNER, Person
from tests.support.clock import START, FakeClock
from tests.support.console_fixtures import ConsoleApp
from tests.support.factories import pending, posted

RECORD = RequestRecord(queue_s=0.2, ttft_s=0.5, decode_s=4.0, inter_token_p50_s=0.02, kv_blocks=9, preemptions=1)


async def settle(
    console: ConsoleApp,
    person: Person,
    *,
    reason: str = "stop",
    age_s: float = 0,
    model: str = "demo",
    batch: bool = False,
    decode_s: float = 4.0,
    admission_wait_s: float = 0.0,
) -> str:
    """Post a request of `person` that ended 4.5 seconds after its admission; return its id."""
    admitted_at = START - timedelta(seconds=age_s)
    price = await console.services.prices.current("demo", START)
    entry = pending(person, request_id=new_id("req"), admitted_at=admitted_at, model=model, price=price, batch=batch)
    await console.services.ledger.open(entry)
    record = msgspec.structs.replace(
        RECORD,
        decode_s=decode_s,
        admission_wait_s=admission_wait_s,
        awaited_limit="tenant_requests" if admission_wait_s else None,
        first_token_at=admitted_at + timedelta(seconds=0.5),
        finished_at=admitted_at + timedelta(seconds=4.5),
    )
    settlement = posted(entry.request_id, prompt=10, cached=4, completion=100, reason=reason)
    await console.services.ledger.settle(msgspec.structs.replace(settlement, record=record))
    return entry.request_id


async def test_requests_in_flight_show_state_queue_position_and_figures(console: ConsoleApp, clock: FakeClock) -> None:
    bob = console.cast.bob
    console.engine_side.add(bob, "req_waiting", state="queued", queue_position=2)
    console.engine_side.add(bob, "req_running", completion_tokens=321, ttft_s=0.25, decode_s=8.0, kv_blocks=23)
    clock.advance(65)

    page = (await (await console.alice()).get("/requests")).text

    for text in ("queued, 2 ahead", "decode", "321", "250 ms", "40.0", ">23<", "1 m 05 s", bob.key.prefix):
        assert text in page


async def test_a_request_that_waits_for_its_limits_is_queued_and_names_the_limit(console: ConsoleApp) -> None:
    waiting = console.engine_side.add(console.cast.bob, "req_waiting", state="queued", admission_wait_s=65.0)
    waiting.admitted_at, waiting.awaited_limit = None, "tenant_tokens"
    alice = await console.alice()
    row = (await alice.get("/requests")).text.split('id="live-req_waiting"')[1].split("</tr>")[0]
    page = (await alice.get("/requests/req_waiting")).text

    assert "queued" in row
    assert "its tenant&#39;s tokens per minute" in row
    assert "1 m 05 s" in row
    assert "Cancel" in row
    assert "Waiting for room in its tenant&#39;s tokens per minute, 65.0 s so far." in page
    assert "Ledger event" not in page


async def test_the_page_of_an_admitted_request_is_there_before_its_usage_event(console: ConsoleApp) -> None:
    console.engine_side.add(console.cast.bob, "req_admitted", state="queued")
    page = await (await console.alice()).get("/requests/req_admitted")

    assert page.status_code == 200
    assert "Ledger event" not in page.text


async def test_the_page_of_a_request_that_leaves_no_record_becomes_the_list(console: ConsoleApp) -> None:
    alice = await console.alice()
    poll = await alice.fragment("/requests/req_gone")

    assert (poll.headers["hx-redirect"], poll.text) == ("/requests", "")
    assert (await alice.get("/requests/req_gone")).status_code == 404


async def test_kv_blocks_that_are_not_reported_yet_are_shown_as_unknown(console: ConsoleApp) -> None:
    console.engine_side.add(console.cast.bob, "req_running", completion_tokens=16)
    page = (await (await console.alice()).get("/requests")).text
    assert 'data-label="KV blocks" class="num">–</td>' in page


async def test_the_hint_about_a_first_request_is_hidden_while_one_is_in_flight(console: ConsoleApp) -> None:
    alice = await console.alice()
    assert "No requests yet." in (await alice.get("/requests")).text
    console.engine_side.add(console.cast.bob, "req_first")
    for answer in (await alice.get("/requests"), await alice.fragment("/requests")):
        assert "No request has finished yet." in answer.text
        assert "curl" not in answer.text


async def test_batch_requests_have_a_badge_in_flight_and_in_the_history(console: ConsoleApp) -> None:
    bob = console.cast.bob
    console.engine_side.add(bob, "req_flex", batch=True)
    console.engine_side.add(bob, "req_plain")
    rows = {"live-req_flex": True, "live-req_plain": False}
    rows |= {f"row-{await settle(console, bob, batch=batch)}": batch for batch in (True, False)}

    page = (await (await console.alice()).get("/requests")).text

    marked = {row: ">batch</span>" in page.partition(f'<tr id="{row}">')[2].partition("</tr>")[0] for row in rows}
    assert marked == rows


async def test_page_and_api_explain_a_request_of_a_crashed_process_alike(console: ConsoleApp) -> None:
    entry = pending(console.cast.bob)
    await console.services.ledger.open(entry)

    page = (await (await console.alice()).get(f"/requests/{entry.request_id}")).text
    shape = past_request_shape(await console.services.past_requests.get(entry.request_id, access=OWNER))

    assert shape.explanation == "Ended before its first token (error)."
    assert shape.explanation in page


@pytest.mark.parametrize(
    ("decode_s", "phases"),
    [
        (4.0, ["queue|200 ms", "prefill|300 ms", "decode|4.00 s"]),
        (3.8, ["queue|200 ms", "prefill|300 ms", "decode|3.80 s", "after the last token|200 ms"]),
    ],
)
async def test_the_phases_of_a_request_add_up_to_its_total(console: ConsoleApp, decode_s: float, phases: list[str]) -> None:
    request_id = await settle(console, console.cast.bob, reason="disconnected", decode_s=decode_s)

    page = (await (await console.alice()).get(f"/requests/{request_id}")).text

    legend = page.partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert re.findall(r"</span>(.*? <b>.*?)</b>", legend) == [phase.replace("|", " <b>") for phase in phases]


async def test_the_wait_for_limits_is_the_first_phase_and_part_of_the_total(console: ConsoleApp) -> None:
    request_id = await settle(console, console.cast.bob, admission_wait_s=6.0)

    page = (await (await console.alice()).get(f"/requests/{request_id}")).text

    legend = page.partition('<ul class="legend">')[2].partition("</ul>")[0]
    assert re.findall(r"</span>(.*?) <b>(.*?)</b>", legend)[:2] == [("waiting for limits", "6.00 s"), ("queue", "200 ms")]
    assert re.findall(r'rect class="fill-(\w+)"', page) == ["limits", "queue", "prefill", "decode"]
    assert "<dt>Total</dt><dd>10.5 s</dd>" in page
    assert "<dt>Time to first token</dt><dd>500 ms after admission</dd>" in re.sub(r"</?span[^>]*>", "", page)
    assert "Mostly waited for room in its tenant&#39;s requests per minute: 6.0 s of 10.5 s;" in page


async def test_the_total_of_a_request_whose_gateway_died_is_not_known(console: ConsoleApp) -> None:
    entry = pending(console.cast.bob)
    await console.services.ledger.open(entry)
    settlement = posted(entry.request_id, prompt=10, cached=4, completion=100, reason="error")
    record = RequestRecord(finished_at=entry.admitted_at + timedelta(hours=1))
    await console.services.ledger.settle(msgspec.structs.replace(settlement, record=record))

    page = (await (await console.alice()).get(f"/requests/{entry.request_id}")).text

    assert "its times are not known" in page
    assert "<dt>Total</dt><dd>–</dd>" in page


async def test_a_request_in_flight_counts_its_wait_for_limits(console: ConsoleApp, clock: FakeClock) -> None:
    console.engine_side.add(console.cast.bob, "req_waited", admission_wait_s=6.0, awaited_limit="key_tokens", state="queued")
    clock.advance(3.0)
    assert "9.00 s" in (await (await console.alice()).get("/requests")).text


async def test_without_requests_the_page_shows_how_to_send_one(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get("/requests")).text

    assert "No requests in flight" in page
    assert "No requests yet" in page
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in page


async def test_the_history_can_be_filtered_by_tenant_end_state_and_text(console: ConsoleApp) -> None:
    of_bob = await settle(console, console.cast.bob, reason="length")
    of_charlie = await settle(console, console.cast.charlie, model="other-model")
    alice = await console.alice()
    queries = {
        f"tenant={console.cast.bob.tenant.id}": {of_bob},
        "state=length": {of_bob},
        "state=stop": {of_charlie},
        "q=OTHER-mod": {of_charlie},
        f"q={of_bob}": {of_bob},
        f"q={console.cast.charlie.key.prefix}": {of_charlie},
        "q=charlie%27s": {of_charlie},
        "q=%25": set(),
        "state=length&q=other": set(),
        "state=nonsense": {of_bob, of_charlie},
    }

    for query, expected in queries.items():
        rows = (await alice.fragment(f"/requests?{query}")).text
        assert {request_id for request_id in (of_bob, of_charlie) if request_id in rows} == expected, query


async def test_the_form_keeps_its_filters(console: ConsoleApp) -> None:
    page = (await (await console.alice()).get(f"/requests?q=%22x&state=error&tenant={console.cast.bob.tenant.id}")).text

    assert 'value="&#34;x"' in page
    assert "<option selected>error</option>" in page
    assert f'<option value="{console.cast.bob.tenant.id}" selected>' in page
    assert "No request matches" in page


async def test_pages_of_the_history_keep_its_filters(console: ConsoleApp, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.console.history.PAGE_ROWS", 2)
    ids = [await settle(console, console.cast.bob, age_s=age) for age in (1, 2, 3)]
    alice = await console.alice()

    first = (await alice.fragment("/requests?state=stop")).text
    older = next_address(first)
    second = (await alice.fragment(older)).text

    assert [request_id in first for request_id in ids] == [True, True, False]
    assert "state=stop" in older
    assert [request_id in second for request_id in ids] == [False, False, True]
    assert 'href="/requests?state=stop">Newest' in second


async def test_a_search_covers_a_limited_number_of_requests_per_page_and_can_be_continued(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("metering.past_requests", "console.history"):
        monkeypatch.setattr(f"appliance.{module}.SEARCHED_MAX", 2)
    models = ["demo", "rare", "demo", "demo", "rare"]
    ids = [await settle(console, console.cast.bob, age_s=age, model=model) for age, model in enumerate(models)]
    alice, address, pages = await console.alice(), "/requests?q=rare", []

    while address:
        pages.append((await alice.fragment(address)).text)
        address = next_address(pages[-1])

    assert [[request_id in page for request_id in ids] for page in pages] == [
        [False, True, False, False, False],
        [False, False, False, False, False],
        [False, False, False, False, True],
    ]
    assert ["2 requests searched." in page for page in pages] == [True, True, False]
    assert ["No match among the requests" in page for page in pages] == [False, True, False]
    whole_id = (await alice.fragment(f"/requests?q={ids[4]}")).text
    assert ids[4] in whole_id
    assert next_address(whole_id) == ""


def next_address(page: str) -> str:
    """Return the address of the next page of the history; empty on the last one."""
    return page.partition('" rel="next"')[0].rpartition('href="')[2].replace("&amp;", "&") if 'rel="next"' in page else ""


async def test_htmx_gets_only_the_history_but_a_whole_page_on_history_restore(console: ConsoleApp) -> None:
    alice = await console.alice()

    assert "<html" not in (await alice.fragment("/requests")).text
    restored = await alice.get("/requests", **{"HX-Request": "true", "HX-History-Restore-Request": "true"})
    assert "<html" in restored.text


async def test_the_page_of_a_request_explains_its_time_and_its_cost(console: ConsoleApp) -> None:
    await console.services.prices.add(
        model="demo", currency="EUR", prompt=1_000_000, cached_prompt=100_000, completion=3_000_000, effective_from=START
    )
    request_id = await settle(console, console.cast.bob)

    page = (await (await console.alice()).get(f"/requests/{request_id}")).text

    assert "Mostly generated: 4.0 s of 4.5 s for 100 tokens at 24.8 per second; preempted once" in page
    for text in ("queue <b>200 ms</b>", "prefill <b>300 ms</b>", "decode <b>4.00 s</b>", "posted", "bob", "stop"):
        assert text in page
    # 6 computed at 1, 4 cached at 0.1 and 100 generated at 3 micro-units each
    for cost in ("0.000006 EUR", "&lt; 0.000001 EUR", "0.000300 EUR", "0.000306 EUR"):
        assert cost in page


async def test_a_live_request_can_be_cancelled_without_scripts(console: ConsoleApp) -> None:
    entry = pending(console.cast.bob, request_id="req_live")
    await console.services.ledger.open(entry)
    console.engine_side.add(console.cast.bob, "req_live")
    alice = await console.alice()

    page = (await alice.get("/requests/req_live")).text
    assert "pending" in page
    assert 'action="/requests/cancel"' in page
    answer = await alice.post("/requests/cancel", request_id="req_live")

    assert answer.headers["location"] == "/requests"
    assert console.engine_side.aborted == ["req_live"]
    assert "Cancelled." in (await alice.get("/requests")).text


async def test_cancelling_by_htmx_shows_a_toast(console: ConsoleApp) -> None:
    console.engine_side.add(console.cast.bob, "req_live")

    answer = await (await console.alice()).post_htmx("/requests/cancel", request_id="req_live")

    assert answer.status_code == 200
    assert "Cancelled." in answer.headers["hx-trigger"]


async def test_cancelling_an_ended_request_is_not_found(console: ConsoleApp) -> None:
    alice = await console.alice()

    assert (await alice.post("/requests/cancel", request_id="req_gone")).status_code == 404
    answer = await alice.post_htmx("/requests/cancel", request_id="req_gone")
    assert (answer.status_code, "gatehouse:toast" in answer.headers["hx-trigger"]) == (404, True)


async def test_a_request_being_settled_has_no_active_cancel_button(console: ConsoleApp) -> None:
    entry = pending(console.cast.bob, request_id="req_ended")
    await console.services.ledger.open(entry)
    console.engine_side.add(console.cast.bob, "req_ended", state="finished", finish_reason="stop")
    alice = await console.alice()

    assert '<button class="small" disabled form="cancel"' in (await alice.get("/requests")).text
    assert "Cancel</button>" not in (await alice.get("/requests/req_ended")).text


async def test_cancelling_a_request_being_settled_is_refused_and_not_logged(console: ConsoleApp) -> None:
    console.engine_side.add(console.cast.bob, "req_ended", state="finished", finish_reason="stop")

    answer = await (await console.alice()).post_htmx("/requests/cancel", request_id="req_ended")

    assert (answer.status_code, console.engine_side.aborted) == (404, [])
    assert "has already finished" in answer.headers["hx-trigger"]
    noted = await console.services.audit.page(filters=AuditFilter(actions=["request.abort"]), access=OWNER)
    assert noted.data == []


async def test_an_unknown_request_is_not_found(console: ConsoleApp) -> None:
    assert (await (await console.alice()).get("/requests/req_nothing")).status_code == 404


async def test_a_request_in_flight_is_not_listed_in_the_history(console: ConsoleApp) -> None:
    request_id = await settle(console, console.cast.bob)
    console.engine_side.add(console.cast.bob, request_id, state="finished")

    rows = (await (await console.alice()).fragment("/requests")).text

    assert request_id not in rows


async def test_of_many_requests_in_flight_the_first_100_are_shown_and_the_rest_counted(console: ConsoleApp) -> None:
    for number in range(130):
        console.engine_side.add(console.cast.bob, f"req_{number:08d}", state="queued", queue_position=number)

    page = (await (await console.alice()).get("/requests")).text

    assert "req_00000099" in page
    assert "req_00000100" not in page
    assert 'In flight <span class="muted">130' in page
    assert "30 more are in flight" in page


async def test_a_bill_shows_discounted_prices_per_million_and_the_cause_of_the_end(console: ConsoleApp) -> None:
    await console.services.prices.add(
        model="demo", currency="EUR", prompt=1_000_000, cached_prompt=100_000, completion=3_000_000, rejected_draft=500_000
    )
    price = await console.services.prices.current("demo", START)
    entry = pending(console.cast.bob, price=price, price_basis_points=2500, batch=True)
    await console.services.ledger.open(entry)
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=100, rejected_tokens=8)
    ended = posted(entry.request_id, reason="aborted")
    await console.services.ledger.settle(msgspec.structs.replace(ended, usage=usage, cause="key_revoked", record=RECORD))

    page = (await (await console.alice()).get(f"/requests/{entry.request_id}")).text

    for text in (
        "Cause: the key was revoked.",
        "25 % of the list price, as above (batch)",
        "flex (batch)",
        "at 0.25 per million",
        "at 0.75 per million",
        "Rejected drafts",
    ):
        assert text in page, text
    assert "0.000075 EUR" in page, "100 tokens of output at a quarter of the price"


async def test_corrections_are_shown_with_the_cost_before_and_after(console: ConsoleApp) -> None:
    await console.services.prices.add(model="demo", currency="EUR", prompt=1_000_000, cached_prompt=0, completion=3_000_000)
    request_id = await settle(console, console.cast.bob)
    alice = await console.alice()
    assert "Corrections" not in (await alice.get(f"/requests/{request_id}")).text
    event = await console.services.reports.event(request_id, access=OWNER)
    await console.services.corrections.add(event.id, Correction(note="we were slow", completion_tokens=-50))

    page = (await alice.get(f"/requests/{request_id}")).text

    for text in ("Corrections", "we were slow", "-50", "-0.000150 EUR", "0.000306 EUR", "0.000156 EUR"):
        assert text in page, text


async def test_the_corrected_cost_includes_corrections_that_are_not_shown(
    console: ConsoleApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_bill, "CORRECTIONS_SHOWN_MAX", 2)
    await console.services.prices.add(model="demo", currency="EUR", prompt=1_000_000, cached_prompt=0, completion=3_000_000)
    request_id = await settle(console, console.cast.bob)
    event = await console.services.reports.event(request_id, access=OWNER)
    for note in ("the first", "the second", "the third"):
        await console.services.corrections.add(event.id, Correction(note=note, cost_picos=-100_000_000))

    page = (await (await console.alice()).get(f"/requests/{request_id}")).text

    assert "the third" not in page
    assert "1 more is in the ledger" in page
    assert "0.000006 EUR" in page, "0.000306 less three times 0.000100"


@pytest.mark.parametrize(("basis_points", "words"), [(10_000, None), (5_000, "50 %"), (5_050, "50.5 %"), (3_333, "33.33 %")])
async def test_a_discount_is_formatted_as_on_the_invoice(console: ConsoleApp, basis_points: int, words: str | None) -> None:
    request_id = await settle(console, console.cast.bob)
    event = await console.services.reports.event(request_id, access=OWNER)
    assert request_bill.discount(msgspec.structs.replace(event, price_basis_points=basis_points)) == words
