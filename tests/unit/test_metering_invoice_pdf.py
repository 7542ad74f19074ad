"""The PDF of an invoice: complete in any script, on as many pages as needed, and identical each time."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pypdf import PdfReader

from appliance.metering.invoicing import pdf, pdf_text
from appliance.metering.invoicing.lines import ADJUSTMENT, FREE_ALLOWANCE, InvoiceLine, totals_of
from appliance.metering.invoicing.pdf import render_pdf
from appliance.metering.invoicing.pdf_bidi import to_visual_order
from appliance.metering.invoicing.rows import Invoice, InvoiceHead
from appliance.metering.invoicing.seller import Seller

FONTS = Path(pdf_text.__file__).parent / "fonts"
SELLER = Seller(
    name="Example Rechenzentrum AG",
    address=("Musterweg 12", "8001 Zürich"),
    bank=("IBAN CH93 0076 2011 6238 5295 7",),
    tax_id="CHE-123.456.789",
    tax_basis_points=810,
    tax_label="VAT",
    email="billing@example.com",
)


def line(model: str | None = "demo", kind: str = "prompt", micros: int = 18_518_518, tokens: int = 123_456_789) -> InvoiceLine:
    price = 150_000 if kind == "prompt" else None
    return InvoiceLine(
        model=model, kind=kind, month="2026-10", unit_price=price, tokens=tokens, requests=7, exact_picos=micros * 10**6,
        rounded_micros=micros,
    )  # fmt: skip


def invoice(*lines: InvoiceLine, draft: bool = False, currency: str = "EUR", **buyer: str) -> Invoice:
    seller = SELLER.to_record() | {"time_zone": "Europe/Zurich"}
    totals = totals_of(lines, tax_basis_points=810, currency=currency)
    head = InvoiceHead(
        id="inv_x",
        tenant_id="tn_01m7z4pyktza52ppqn0vgj4rkz",
        month="2026-10",
        number=None if draft else "2026-0001",
        state="draft" if draft else "closed",
        currency=currency,
        total_micros=totals.total_micros,
        tax_micros=totals.tax_micros,
        through_posting=None if draft else 7,
        seller=seller,
        buyer=None,
        created_at=datetime(2026, 11, 1, tzinfo=UTC),
        closed_at=None if draft else datetime(2026, 11, 1, 23, 30, tzinfo=UTC),
    )
    named = {"name": "Bob & Söhne GmbH", "address": "Hauptstraße 5\n10115 Berlin", **buyer}
    return Invoice(head=head, currency=currency, lines=lines, totals=totals, seller=seller, buyer=named)


def texts(drawn: Invoice) -> list[str]:
    return [page.extract_text() for page in PdfReader(io.BytesIO(render_pdf(drawn))).pages]


def test_an_invoice_shows_seller_buyer_lines_totals_and_due_date() -> None:
    free = line(None, FREE_ALLOWANCE, -5_000_000, 0)
    (page,) = texts(invoice(line(), line(kind=ADJUSTMENT, micros=-7_220, tokens=-12_034), free, reference="PO 4711"))

    for part in (
        "Invoice", "Example Rechenzentrum AG", "8001 Zürich", "Tax ID CHE-123.456.789", "Bob & Söhne GmbH", "10115 Berlin",
        "2026-0001", "October 2026", "1 – 31 October 2026 (Europe/Zurich)", "2 November 2026", "2 December 2026", "PO 4711",
        "Prompt tokens", "123,456,789", "0.15", "18.518518", "demo: corrections and late usage", "-12,034", "-0.007220",
        "Free allowance for October 2026", "-5.000000", "Sum of the lines", "13.511298", "Rounding to 0.01", "-0.001298",
        "Net amount", "13.51", "VAT 8.1 %", "1.09", "14.60 EUR", "IBAN CH93 0076 2011 6238 5295 7", "Page 1 of 1",
        "How usage is counted: the prompt of a request is billed once it has been read", "billing@example.com",
    ):  # fmt: skip
        assert part in page, part
    assert "DRAFT" not in page


def test_the_reasons_of_corrections_are_shown_below_their_line_as_they_are() -> None:
    markup = "<b>cut & off</b> by <para>our restart"
    corrected = dataclasses.replace(line(kind=ADJUSTMENT), reasons=(markup, "w" * 500), reasons_left_out=1_234)
    page = texts(invoice(line(), corrected))[0]

    assert f"Reason: {markup}" in page
    assert page.count("w") > 500
    assert "Reason: 1,234 others" in page


def test_the_reasons_of_a_line_may_fill_pages() -> None:
    reasons = tuple(f"{number} " + "long reason " * 40 for number in range(60))
    pages = texts(invoice(dataclasses.replace(line(kind=ADJUSTMENT), reasons=reasons), line(kind=ADJUSTMENT, micros=7_000_007)))
    assert len(pages) > 2
    assert all(f"Reason: {number} long" in "".join(pages) for number in range(60))
    assert "7.000007" in pages[-1]


def test_figures_are_right_aligned_in_their_columns() -> None:
    ends: dict[float, list[str]] = {}

    def note(text: str, _cm: Any, tm: Any, _font: Any, size: float) -> None:
        for shown in re.findall(r"^[-\d,.]{4,}$", text.strip(), re.MULTILINE):
            ends.setdefault(round(tm[4] + pdf_text.text_width(shown, size)), []).append(shown)

    page = PdfReader(io.BytesIO(render_pdf(invoice(line(), line("z", micros=5, tokens=1_000))))).pages[0]
    page.extract_text(visitor_text=note)
    assert {"18.518518", "0.000005"} <= set(ends[539])
    assert {"123,456,789", "1,000"} <= set(ends[338])


def test_a_draft_is_marked_on_every_page_and_shows_no_number_or_payment_terms() -> None:
    pages = texts(invoice(*(line(f"model {index}") for index in range(60)), draft=True))
    assert len(pages) > 2
    for number, page in enumerate(pages, 1):
        assert "DRAFT" in page
        assert f"Page {number} of {len(pages)}" in page
        assert "EUR per 1M tokens" in page or number == len(pages)
    assert "none yet" in pages[0]
    assert "Nothing is due yet" in pages[-1]
    assert "Please pay" not in pages[-1]


def test_a_closed_invoice_renders_to_the_same_bytes_each_time() -> None:
    assert render_pdf(invoice(line())) == render_pdf(invoice(line()))


def test_an_empty_invoice_and_a_credit_note_are_labelled() -> None:
    assert "Nothing was used in this month." in texts(invoice())[0]
    (page,) = texts(invoice(line(kind=ADJUSTMENT, micros=-7_000_400_000), currency="JPY"))
    assert "Credit note" in page
    assert "7,567 JPY" in page
    assert "in your favour" in page


NOTES = {"payment_note": "By transfer only.", "tax_note": "Reverse charge."}
ON_TIME, IBAN = "2 December 2026", "IBAN CH93 0076 2011 6238 5295 7"


@pytest.mark.parametrize(
    ("micros", "draft", "shown", "hidden"),
    [
        (
            18_518_518,
            False,
            ("Please pay 20.02 EUR by 2 December 2026, naming 2026-0001.", "Due", IBAN, *NOTES.values()),
            ("Nothing is", "favour"),
        ),
        (
            0,
            False,
            ("Nothing is to be paid.", NOTES["tax_note"]),
            ("Please pay", ON_TIME, IBAN, NOTES["payment_note"], "favour"),
        ),
        (
            -18_518_518,
            False,
            ("Amount in your favour", "20.02 EUR", NOTES["tax_note"]),
            ("Please pay", ON_TIME, IBAN, NOTES["payment_note"]),
        ),
        (
            18_518_518,
            True,
            ("Amount due", "20.02 EUR", NOTES["tax_note"]),
            ("Please pay", ON_TIME, IBAN, NOTES["payment_note"], "Date"),
        ),
    ],
)
def test_terms_of_payment_are_those_of_the_amount_due(
    micros: int, draft: bool, shown: tuple[str, ...], hidden: tuple[str, ...]
) -> None:
    drawn = invoice(line(micros=micros), draft=draft)
    (page,) = texts(dataclasses.replace(drawn, seller={**drawn.seller, **NOTES}))
    assert [part for part in shown if part not in page] == []
    assert [part for part in hidden if part in page] == []


def test_rounding_and_tax_are_shown_only_where_there_are_any() -> None:
    whole = invoice(line(micros=10_000_000))
    (page,) = texts(whole)
    assert "Rounding" not in page
    assert "Net amount" not in page
    assert "VAT 8.1 %\n0.81" in page
    (free,) = texts(invoice(line(micros=0)))
    assert "VAT 8.1 %\n0.00" in free
    untaxed = dataclasses.replace(
        whole,
        seller={"name": "Small AG"},
        totals=totals_of(whole.lines, tax_basis_points=0, currency="EUR"),
    )
    (page,) = texts(untaxed)
    assert "%" not in page


def test_the_file_carries_number_seller_month_and_buyer() -> None:
    found = PdfReader(io.BytesIO(render_pdf(invoice(line())))).metadata
    assert found is not None
    assert (found.title, found.author) == ("Invoice 2026-0001", "Example Rechenzentrum AG")
    assert found.subject == "October 2026, Bob & Söhne GmbH"
    draft = PdfReader(io.BytesIO(render_pdf(invoice(line(), draft=True)))).metadata
    assert draft is not None
    assert draft.title == "Draft invoice 2026-10"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Пример ООО", "Пример ООО"),
        ("Παράδειγμα Α.Ε.", "Παράδειγμα Α.Ε."),
        ("Łódź Ünïcode Şirketi ðþß", "Łódź Ünïcode Şirketi ðþß"),
        ("株式会社サンプル", "株式会社サンプル"),
        ("北京示例科技有限公司", "北京示例科技有限公司"),
        ("주식회사 예시", "주식회사"),
        ("Acme 😀", "Acme \ufffd"),
        ("ไทย", "\ufffd\ufffd\ufffd"),
        ("e\u0301te\u0301", "été"),
        ("zero\u200bwidth\u200d", "zerowidth"),
        ("\U00020000 and \U000e0041 and \uffff", "\ufffd and and \ufffd"),
    ],
)
def test_a_name_is_drawn_or_shown_as_replacement_characters(name: str, shown: str) -> None:
    assert shown in re.sub(r"[ \xa0]+", " ", texts(invoice(line(), name=name))[0])


def test_right_to_left_scripts_are_shaped_and_reordered() -> None:
    assert to_visual_order("שלום 12-34 Acme (א)") == "(א) Acme 12-34 םולש"
    assert to_visual_order("Acme שלום עולם ok") == "Acme םלוע םולש ok"
    assert to_visual_order("سلام") == "\ufee1\ufefc\ufeb3"  # seen from the left: meem alone, lam with alef, seen that begins
    assert "\ufffd" not in texts(invoice(line(), name="شركة النور للتقنية"))[0]


def test_the_id_of_a_tenant_stays_on_one_line_with_wide_letters_too() -> None:
    drawn = invoice(line())
    wide = "tn_01m8q3amhw25caq6m9w0mqmxwb"
    (page,) = texts(dataclasses.replace(drawn, head=dataclasses.replace(drawn.head, tenant_id=wide)))

    assert wide in page


@pytest.mark.parametrize(
    ("word", "lines"),
    [
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8-Dynamic:", ["Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8-", "Dynamic:"]),
        ("organization/" + "m" * 20, ["organization/", "m" * 20]),
        ("organization/" + "m" * 30, ["organization/", "m" * 25, "m" * 5]),
        ("m" * 25 + "-x", ["m" * 25, "-x"]),
    ],
)
def test_a_word_longer_than_a_line_is_broken_after_a_hyphen_or_a_slash_if_it_has_one(word: str, lines: list[str]) -> None:
    width = pdf_text.text_width("m" * 25, 9)
    assert pdf_text.wrap(word, 9, width) == lines


@pytest.mark.parametrize("word", ["-" + "a" * 19 + "W" * 9, "a/" + "i" * 60 + "W", "-iW" * 30, "/" + "l" * 200])
def test_no_piece_of_a_broken_word_is_wider_than_the_line(word: str) -> None:
    width = pdf_text.text_width("a" * 20, 9)
    assert max(pdf_text.text_width(line, 9) for line in pdf_text.wrap(word, 9, width)) <= width


def test_the_longest_names_are_wrapped() -> None:
    pages = texts(invoice(line("m" * 200), name="W" * 200, address="\n".join("x" * 199 for _ in range(5))))
    assert pages[0].count("W") == 200
    assert "".join(pages).count("m" * 20) > 5


def test_every_character_of_the_basic_multilingual_plane_can_be_drawn() -> None:
    for start in range(0, 0x10000, 0x400):
        text = "".join(chr(code) for code in range(start, start + 0x400) if not 0xD800 <= code < 0xE000)
        pdf_text.font_runs(text, bold=True)
    names = ["".join(chr(code) for code in range(start, start + 150)) for start in range(0x20, 0xD700, 0x1900)]
    assert all(texts(invoice(line(), name=name.replace("\x7f", "").strip() or "x")) for name in names)


def test_the_fonts_match_the_recorded_hashes() -> None:
    readme = (FONTS / "README.md").read_text("utf-8")
    for path in FONTS.glob("*.ttf"):
        assert f"`{path.name}` 2.37" in readme
        assert hashlib.sha256(path.read_bytes()).hexdigest() in readme
    assert sum(path.stat().st_size for path in FONTS.glob("*.ttf")) <= 300 * 1024


def test_a_closed_invoice_shows_the_seller_at_the_time_of_closing() -> None:
    drawn = invoice(line())
    old = {"name": "Old name", "time_zone": "UTC"}
    moved = dataclasses.replace(drawn, head=dataclasses.replace(drawn.head, seller=old), seller=old)
    (page,) = texts(moved)
    assert "Old name" in page
    unnamed = {"time_zone": "UTC"}
    assert "Seller not set" not in texts(dataclasses.replace(drawn, seller=unnamed))[0]
    assert "Seller not set" in texts(dataclasses.replace(invoice(line(), draft=True), seller=unnamed))[0]
    assert "1 November 2026" in page


@pytest.mark.parametrize("currency", ["EUR", "JPY", "KWD"])
@pytest.mark.parametrize("micros", [1, 18_518_518, 1_234_567_891_234, -9_007_199_254_740_991_123])
def test_no_text_covers_another(monkeypatch: pytest.MonkeyPatch, currency: str, micros: int) -> None:
    drawn: dict[float, set[tuple[float, float]]] = {}  # a set, because the page is laid out twice

    def record(_canvas: Any, x: float, y: float, text: str, size: float, *, bold: bool = False, align: str = "left") -> None:
        width = pdf_text.text_width(text, size, bold=bold)
        left = {"left": x, "right": x - width, "center": x - width / 2}[align]
        drawn.setdefault(round(y, 2), set()).add((left, left + width))

    monkeypatch.setattr(pdf, "draw", record)
    usage = line("a-model/with-a-name-as-long-as-those-of-quantised-files-Q4_K_M.gguf", micros=micros, tokens=9 * 10**15)
    adjusted = line("another/model-with-a-long-name-that-needs-two-lines", ADJUSTMENT, micros, tokens=-(10**12))
    render_pdf(invoice(dataclasses.replace(usage, unit_price=10**12), adjusted, currency=currency))

    for texts in map(sorted, drawn.values()):
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(texts))
        assert texts[-1][1] <= pdf.RIGHT + 0.01
