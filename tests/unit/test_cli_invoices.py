"""`gatehouse invoices` and `gatehouse economics`: drafting, closing and exporting months, and reporting failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from appliance.base.clock import SystemClock
from appliance.base.db import Database
from appliance.cli import invoices, output
from appliance.cli.connection import AdminClient
from appliance.cli.failure import CommandFailed
from appliance.cli.main import main
from appliance.metering.ledger.epochs import begin_epoch
from tests.support.billing import Tokens, add_price, post_event
from tests.support.cast import make_person
from tests.support.tampering import tamper

Run = Callable[..., tuple[int, Any, str]]


async def post_usage(url: str) -> None:
    """Create three tenants and post a priced event of Bob in January and February, and of Charlie in February."""
    database, clock = Database.open(url), SystemClock()
    bob, charlie, _ = [await make_person(database, clock, name) for name in ("bob", "charlie", "dora")]
    price, epoch_id = await add_price(database, prompt=2_000_000), await begin_epoch(database, clock, "test")
    for person, day in ((bob, date(2026, 1, 3)), (bob, date(2026, 2, 3)), (charlie, date(2026, 2, 4))):
        tokens = Tokens(prompt=1_000_000, completion=0)
        await post_event(database, person, day, tokens, epoch_id=epoch_id, price=price)
    await database.close()


@pytest.fixture
def gatehouse(data_dir: Path, own_logging: None, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command with --json; return its status, its parsed output and its standard error."""
    asyncio.run(post_usage(f"sqlite:///{data_dir / 'gatehouse.db'}"))

    def run(*arguments: str) -> tuple[int, Any, str]:
        status = main([*arguments, "--json"])
        written = capsys.readouterr()
        return status, json.loads(written.out), written.err

    return run


def damage_events_of(data_dir: Path, tenant: str) -> None:
    """Change the stored cost of a tenant's events, so that it no longer is their tokens times their prices."""

    async def damage() -> None:
        async with Database.open(f"sqlite:///{data_dir / 'gatehouse.db'}") as database:
            of_tenant = f"tenant_id = (SELECT id FROM tenants WHERE name = '{tenant}')"
            await tamper(database, f"UPDATE usage_events SET cost_picos = cost_picos + 1 WHERE {of_tenant}")

    asyncio.run(damage())


def invoice_rows(answer: Any) -> list[tuple[str, str, str]]:
    return [(row["tenant"], row["state"], row["due"]) for row in answer["data"]]


def test_a_month_is_drafted_closed_and_exported_for_all_tenants(gatehouse: Run, tmp_path: Path) -> None:
    status, drafts, _ = gatehouse("invoices", "draft", "--month", "2026-01", "--all")
    assert (status, invoice_rows(drafts)) == (0, [("bob", "draft", "2.00 EUR")])
    status, closed, _ = gatehouse("invoices", "close", "--month", "2026-01", "--all")
    assert (status, invoice_rows(closed)) == (0, [("bob", "closed", "2.00 EUR")])
    status, closed, _ = gatehouse("invoices", "close", "--month", "2026-02", "--all")
    assert invoice_rows(closed) == [("bob", "closed", "2.00 EUR"), ("charlie", "closed", "2.00 EUR")]
    assert gatehouse("invoices", "close", "--month", "2026-02", "--all")[:2] == (0, {"data": []})  # done already
    forms = ("--format", "pdf", "--format", "csv", "--format", "events")
    arguments = ("invoices", "export", "--month", "2026-02", "--all", *forms)
    status, files, _ = gatehouse(*arguments, "--out", str(tmp_path / "out"))
    year = SystemClock().now().year
    assert sorted(Path(name).name for name in files["files"]) == [
        f"invoice-{year}-000{number}-2026-02{ending}"
        for number in ("2-bob", "3-charlie")
        for ending in ("-events.csv", ".csv", ".pdf")
    ]
    assert all(Path(name).read_bytes().startswith((b"%PDF-", b"number,", b"id,request_id,")) for name in files["files"])
    assert not any(b"False" in Path(name).read_bytes() for name in files["files"] if name.endswith("-events.csv"))
    assert len(gatehouse("invoices", "list")[1]["data"]) == 3
    assert len(gatehouse("invoices", "list", "--tenant", "bob", "--month", "2026-01")[1]["data"]) == 1


def test_invoices_are_listed_with_the_newest_month_first(gatehouse: Run) -> None:
    for month in ("2026-01", "2026-02"):
        gatehouse("invoices", "close", "--month", month, "--tenant", "bob")
    assert [row["month"] for row in gatehouse("invoices", "list")[1]["data"]] == ["2026-02", "2026-01"]


def test_an_export_to_a_folder_that_cannot_be_made_names_the_file(gatehouse: Run, tmp_path: Path) -> None:
    gatehouse("invoices", "close", "--month", "2026-01", "--tenant", "bob")
    (tmp_path / "taken").touch()
    export = ("invoices", "export", "--month", "2026-01", "--all", "--out", str(tmp_path / "taken"))
    status, answer, _ = gatehouse(*export)
    assert (status, answer["error"]["code"]) == (1, "file")
    assert answer["error"]["message"].startswith(f"cannot write {tmp_path / 'taken' / 'invoice-'}")


@pytest.mark.parametrize("verb", ["draft", "close"])
def test_the_progress_of_billing_a_month_reaches_the_end(gatehouse: Run, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    fractions: list[float] = []
    monkeypatch.setattr(output, "progress", lambda title, *, quiet: nullcontext(fractions.append))
    monkeypatch.setattr(invoices, "CALL_TENANTS", 1)
    gatehouse("invoices", verb, "--month", "2026-01", "--all")

    assert fractions == [pytest.approx((done + 1) / 3) for done in range(3)]


def test_an_invoice_is_closed_only_with_the_expected_total(gatehouse: Run) -> None:
    close = ("invoices", "close", "--month", "2026-01", "--tenant", "bob", "--expected-total-micros")
    status, refused, _ = gatehouse(*close, "1999999")
    assert (status, refused["error"]["code"]) == (1, "total_changed")
    assert "is 2.000000 EUR, not 1.999999 EUR" in refused["error"]["message"]
    for option in (("--expected-total-micros", "1"), ("--expected-currency", "EUR")):
        assert gatehouse("invoices", "close", "--month", "2026-01", "--all", *option)[0] == 2
    status, refused, _ = gatehouse(*close, "2000000", "--expected-currency", "CHF")
    assert (status, "is 2.000000 EUR, not 2.000000 CHF" in refused["error"]["message"]) == (1, True)
    status, closed, _ = gatehouse(*close, "2000000", "--expected-currency", "EUR")
    assert (status, invoice_rows(closed)) == (0, [("bob", "closed", "2.00 EUR")])


def test_an_export_without_closed_invoices_mentions_the_drafts(
    gatehouse: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(*arguments: str) -> str:
        assert main(["invoices", "export", "--month", "2026-01", "--all", "--out", str(tmp_path), *arguments]) == 0
        return capsys.readouterr().out

    assert "There are no invoices for 2026-01. To create and close them: gatehouse invoices close" in export()
    gatehouse("invoices", "draft", "--month", "2026-01", "--all")
    printed = export()
    assert "There are no closed invoices for 2026-01, only drafts (1): close them, or export them with --drafts" in printed
    assert gatehouse("invoices", "export", "--month", "2026-01", "--all", "--out", str(tmp_path))[1:] == (
        {"files": []},
        printed,
    )
    assert "draft-2026-01-bob-" in export("--drafts")


def test_a_tenant_that_cannot_be_closed_is_named_and_the_others_are_closed(gatehouse: Run) -> None:
    status, answer, _ = gatehouse("invoices", "close", "--month", "2026-02", "--all")
    assert status == 1
    assert invoice_rows(answer) == [("charlie", "closed", "2.00 EUR")]
    assert "bob: 2026-01 must be closed before 2026-02" in answer["error"]["message"]
    assert invoice_rows(gatehouse("invoices", "close", "--month", "2026-01", "--all")[1]) == [("bob", "closed", "2.00 EUR")]


def test_a_tenant_whose_events_contradict_their_costs_is_named_and_the_others_are_closed(
    gatehouse: Run, data_dir: Path
) -> None:
    damage_events_of(data_dir, "charlie")
    gatehouse("invoices", "close", "--month", "2026-01", "--all")
    status, answer, _ = gatehouse("invoices", "close", "--month", "2026-02", "--all")

    assert (status, invoice_rows(answer)) == (1, [("bob", "closed", "2.00 EUR")])
    message = answer["error"]["message"]
    assert message.startswith("charlie: the ledger contradicts itself: events of demo in 2026-02 cost 2.000000000001 EUR")
    assert "gatehouse db check" in message


def test_a_draft_that_cannot_be_computed_is_listed_with_the_reason_and_the_others_are_exported(
    gatehouse: Run, data_dir: Path, tmp_path: Path
) -> None:
    gatehouse("invoices", "draft", "--month", "2026-02", "--all")
    damage_events_of(data_dir, "charlie")
    rows = {row["tenant"]: row["due"] for row in gatehouse("invoices", "list")[1]["data"]}
    export = ("invoices", "export", "--month", "2026-02", "--all", "--drafts", "--out", str(tmp_path / "out"))
    status, answer, _ = gatehouse(*export)

    assert rows["bob"] == "2.00 EUR"
    assert "contradicts itself" in rows["charlie"]
    assert (status, len(answer["files"])) == (1, 1)
    assert answer["error"]["message"].startswith("charlie: the ledger contradicts itself")


def test_an_export_lists_the_files_that_were_written_before_a_format_that_cannot_be_computed(
    gatehouse: Run, data_dir: Path, tmp_path: Path
) -> None:
    gatehouse("invoices", "draft", "--month", "2026-02", "--tenant", "charlie")
    damage_events_of(data_dir, "charlie")
    export = ("invoices", "export", "--month", "2026-02", "--all", "--drafts", "--out", str(tmp_path))
    _status, answer, _ = gatehouse(*export, "--format", "events", "--format", "pdf")
    assert answer["files"] == [str(path) for path in tmp_path.glob("draft-*")] != []


def test_closing_a_month_without_usage_names_the_tenants_whose_earlier_months_are_not_billed_yet(gatehouse: Run) -> None:
    gatehouse("invoices", "close", "--month", "2026-01", "--all")
    status, answer, _ = gatehouse("invoices", "close", "--month", "2026-03", "--all")
    message = "2026-02 must be closed before 2026-03: it has usage on no invoice yet"
    error = {"message": f"bob: {message}\ncharlie: {message}", "code": "invoices"}
    assert (status, answer) == (1, {"data": [], "error": error})
    assert gatehouse("invoices", "list", "--month", "2026-03")[1] == {"data": []}


def test_tenants_that_cannot_be_closed_are_named_on_a_line_each(gatehouse: Run, capsys: pytest.CaptureFixture[str]) -> None:
    gatehouse("invoices", "close", "--month", "2026-01", "--all")
    assert main(["invoices", "close", "--month", "2026-03", "--all"]) == 1
    written = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[:2] for line in written[-2:]] == [["gatehouse", "bob"], ["gatehouse", "charlie"]]


def test_a_month_with_nothing_to_close_prints_why_and_logs_nothing(gatehouse: Run) -> None:
    def entries() -> int:
        return len(gatehouse("audit", "list")[1]["data"])

    before = entries()
    status, answer, note = gatehouse("invoices", "draft", "--month", "2025-12", "--all")
    assert (status, answer, entries()) == (0, {"data": []}, before)
    assert note.endswith("\nDrafted nothing for 2025-12: 3 tenants with nothing to bill.\n")

    gatehouse("invoices", "close", "--month", "2026-01", "--all")
    before = entries()
    assert gatehouse("invoices", "close", "--month", "2026-01", "--all")[2].endswith(
        "\nClosed nothing for 2026-01: 1 tenant already closed, 2 tenants with nothing to bill.\n"
    )
    assert entries() == before


def test_a_month_ends_with_what_was_done_what_was_skipped_and_what_failed(gatehouse: Run) -> None:
    close = ("invoices", "close", "--month", "2026-02", "--all")
    for expected in (
        "Closed 1 invoice for 2026-02: 1 tenant with nothing to bill, 1 tenant failed.",
        "Closed nothing for 2026-02: 1 tenant already closed, 1 tenant with nothing to bill, 1 tenant failed.",
    ):
        assert gatehouse(*close)[2].splitlines()[1:] == [expected]
    assert gatehouse("invoices", "draft", "--month", "2026-01", "--all")[2].endswith(
        "\nDrafted 1 invoice for 2026-01: 1 tenant skipped because a later month is closed, 1 tenant with nothing to bill.\n"
    )


def test_a_month_is_closed_for_more_tenants_than_one_call_takes(gatehouse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invoices, "CALL_TENANTS", 1)
    gatehouse("invoices", "close", "--month", "2026-01", "--all")
    status, closed, note = gatehouse("invoices", "close", "--month", "2026-02", "--all")
    assert (status, [row["tenant"] for row in closed["data"]]) == (0, ["bob", "charlie"])
    assert note.endswith("\nClosed 2 invoices for 2026-02: 1 tenant with nothing to bill.\n")


def test_a_month_whose_closing_breaks_off_lists_the_invoices_that_were_closed(
    gatehouse: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gatehouse("invoices", "close", "--month", "2026-01", "--all")
    monkeypatch.setattr(invoices, "CALL_TENANTS", 1)
    call, calls = AdminClient.call, []

    async def call_twice(client: AdminClient, method: str, path: str, **options: Any) -> dict[str, Any]:
        if path.startswith("/invoices/months"):
            calls.append(path)
            if len(calls) == 2:
                raise CommandFailed("the appliance does not respond: ReadTimeout", code="unreachable")
        return await call(client, method, path, **options)

    monkeypatch.setattr(AdminClient, "call", call_twice)
    status, answer, note = gatehouse("invoices", "close", "--month", "2026-02", "--all")
    assert (status, [row["tenant"] for row in answer["data"]]) == (1, ["bob"])
    assert note.endswith("\nClosed 1 invoice for 2026-02.\n")
    expected = "the last 2 tenants, from charlie on, may not be billed: the appliance does not respond: ReadTimeout"
    assert answer["error"]["message"] == expected


def test_the_progress_of_a_month_is_the_share_of_tenants_that_are_done(gatehouse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []
    monkeypatch.setattr(invoices, "CALL_TENANTS", 2)
    monkeypatch.setattr(output, "progress", lambda _title, quiet: nullcontext(shown.append))
    gatehouse("invoices", "draft", "--month", "2026-02", "--all")
    assert shown == [2 / 3, 1.0]


@pytest.mark.parametrize("is_drafted", [False, True])
@pytest.mark.parametrize("who", ["--tenant bob", "--all"])
def test_a_refused_closing_leaves_only_drafts_that_were_there(gatehouse: Run, who: str, is_drafted: bool) -> None:
    if is_drafted:
        gatehouse("invoices", "draft", "--month", "2026-02", "--tenant", "bob")
    status, answer, _ = gatehouse("invoices", "close", "--month", "2026-02", *who.split())

    assert (status, "2026-01 must be closed before 2026-02" in answer["error"]["message"]) == (1, True)
    rows = invoice_rows(gatehouse("invoices", "list", "--tenant", "bob")[1])
    assert rows == ([("bob", "draft", "2.00 EUR")] if is_drafted else [])


def test_a_running_month_of_one_tenant_is_not_drafted_by_closing_it(gatehouse: Run) -> None:
    month = f"{SystemClock().now():%Y-%m}"
    status, refused, _ = gatehouse("invoices", "close", "--month", month, "--tenant", "bob")
    assert (status, refused["error"]["code"]) == (1, "month_not_over")
    assert invoice_rows(gatehouse("invoices", "list", "--month", month)[1]) == []


def test_closing_a_running_month_fails_once_and_drafts_nothing(gatehouse: Run) -> None:
    month = f"{SystemClock().now():%Y-%m}"
    status, answer, _ = gatehouse("invoices", "close", "--month", month, "--all")
    assert status == 1
    assert answer["error"]["message"].count("is not over before") == 1
    assert invoice_rows(gatehouse("invoices", "list", "--month", month)[1]) == []


def test_an_empty_list_prints_a_header_to_stdout_and_a_note_to_stderr(
    gatehouse: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["invoices", "list"]) == 0
    written = capsys.readouterr()
    assert (written.out.count("\n"), written.err) == (1, "There are no invoices.\n")


def test_an_empty_month_of_one_named_tenant_is_closed(gatehouse: Run) -> None:
    status, closed, _ = gatehouse("invoices", "close", "--month", "2026-01", "--tenant", "dora")
    assert (status, invoice_rows(closed)) == (0, [("dora", "closed", "0.00 EUR")])


@pytest.mark.parametrize("who", ["--tenant bob", "--all"])
def test_a_missing_seller_is_named_before_an_invoice_is_closed(
    gatehouse: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    call, written = AdminClient.call, []

    async def call_and_read_warnings(client: AdminClient, method: str, path: str, **options: Any) -> dict[str, Any]:
        if path.endswith("/close"):
            written.append(capsys.readouterr().err)
        return await call(client, method, path, **options)

    monkeypatch.setattr(AdminClient, "call", call_and_read_warnings)
    gatehouse("invoices", "close", "--month", "2026-01", *who.split())
    assert written == [
        "gatehouse: the seller has not been entered; closed invoices without a seller never get one, and have no tax. "
        "Enter it before closing: gatehouse invoices seller --file FILE\n"
    ]


@pytest.mark.parametrize("verb", ["draft", "close"])
def test_an_appliance_with_a_seller_bills_a_month_without_a_warning(gatehouse: Run, tmp_path: Path, verb: str) -> None:
    seller = tmp_path / "seller.json"
    seller.write_text('{"name": "Seller AG"}')
    gatehouse("invoices", "seller", "--file", str(seller))
    assert gatehouse("invoices", verb, "--month", "2026-01", "--tenant", "bob")[2] == ""


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (("close", "--month", "2026-01"), 2, "--tenant TENANT or --all"),
        (("close", "--month", "2026-01", "--all", "--tenant", "bob"), 2, "--tenant TENANT or --all"),
        (("close", "--month", "2026-02", "--tenant", "bob"), 1, "2026-01 must be closed"),
        (("export", "--month", "2026-01", "--all", "--format", "docx"), 2, "pdf, csv, json, events"),
        (("export", "--month", "January", "--all"), 2, "--month must be YYYY-MM"),
        (("draft", "--month", "2026-13", "--all"), 2, "--month must be YYYY-MM, not '2026-13'"),
        (("close", "--month", "2026-13", "--tenant", "bob"), 2, "--month must be YYYY-MM"),
        (("list", "--month", "2026-13"), 2, "--month must be YYYY-MM"),
        (("draft", "--month", "2999-01", "--all"), 2, "2999-01 has not begun"),
        (("seller",), 1, "has not been entered"),
        (("seller", "--file", "nowhere.json"), 1, "cannot read nowhere.json as JSON"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_errors_name_the_argument_or_the_cause(gatehouse: Run, arguments: tuple[str, ...], status: int, part: str) -> None:
    answer = gatehouse("invoices", *arguments)
    assert answer[0] == status
    assert part in answer[1]["error"]["message"]


def test_seller_allowance_and_economics_are_set_and_shown(gatehouse: Run, tmp_path: Path) -> None:
    seller, hardware = tmp_path / "seller.json", tmp_path / "hardware.json"
    seller.write_text(json.dumps({"name": "Seller AG", "tax_basis_points": 1900}))
    hardware.write_text(json.dumps({"cost_micros": 36_000_000, "months": 36, "kwh_price_micros": 0, "power_w": 1}))

    assert gatehouse("invoices", "seller", "--file", str(seller))[1]["name"] == "Seller AG"
    assert gatehouse("invoices", "seller")[1]["tax_basis_points"] == 1900
    allowance = gatehouse("invoices", "allowance", "bob", "--month", "2026-01", "--micros", "500000")[1]
    assert (allowance["first_month"], allowance["monthly_micros"]) == ("2026-01", 500_000)
    assert invoice_rows(gatehouse("invoices", "draft", "--month", "2026-01", "--tenant", "bob")[1]) == [
        ("bob", "draft", "1.79 EUR")
    ]
    status, refusal, _ = gatehouse("economics")
    assert (status, refusal["error"]["code"]) == (1, "not_found")
    assert "gatehouse economics --file JSON" in refusal["error"]["message"]
    gatehouse("economics", "--file", str(hardware))
    figures = {figure["name"]: figure["value"] for figure in gatehouse("economics")[1]["figures"]}
    assert figures["hardware_month"] == 1_000_000


def test_economics_are_printed_in_currency_units(gatehouse: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hardware = tmp_path / "hardware.json"
    hosted = [{"name": "hosted", "prompt": 150_000, "completion": 600_000}]
    hardware.write_text(
        json.dumps({"cost_micros": 36_000_000, "months": 36, "kwh_price_micros": 0, "power_w": 1, "hosted": hosted})
    )
    assert main(["economics", "--file", str(hardware)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hardware_month\t1.000000\tEUR a month\thardware_cost / months" in lines
    assert any(line.startswith("hosted\t") for line in lines)
