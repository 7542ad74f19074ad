"""Renders an invoice as an A4 PDF. Deterministic: the same closed invoice always gives the same bytes.

Contains the page layout; texts come from `wording`, text drawing from `pdf_text`. The document is laid out twice, first to
count the pages.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from appliance.base.money import format_micros, minor_unit_decimals
from appliance.metering.calendar import first_day, last_day
from appliance.metering.invoicing import wording as words
from appliance.metering.invoicing.lines import ADJUSTMENT, FREE_ALLOWANCE, InvoiceLine
from appliance.metering.invoicing.pdf_text import Align, draw, text_width, wrap
from appliance.metering.invoicing.rows import TIME_ZONE, Invoice

if TYPE_CHECKING:
    from reportlab.pdfgen.canvas import Canvas

WIDTH, HEIGHT = 595.28, 841.89  # A4 in points
LEFT, RIGHT, TOP, BOTTOM = 56.0, 539.0, 786.0, 92.0
TOKENS_X, PRICE_X = 338.0, 436.0  # right edges of the columns, further left if amounts need it; that of the amount is RIGHT
GAP = 10.0
FACTS_X, VALUES_X = 326.0, 387.0
SIZE, SMALL, LEADING = 9.0, 7.5, 13.0
REASON_LEADING = 10.0
INK, GREY, RULE, PALE = 0.10, 0.42, 0.75, 0.88
_lock = threading.Lock()  # reportlab shares its fonts between threads


def render_pdf(invoice: Invoice) -> bytes:
    """Return the PDF; drafts have a watermark on every page. Takes tens of milliseconds of CPU time: call it in a thread."""
    with _lock:
        pages = _Layout(invoice, pages=0).write()[1]
        return _Layout(invoice, pages=pages).write()[0]


class _Layout:
    """One layout pass over an invoice. `_y` is the current position, moving down the page."""

    def __init__(self, invoice: Invoice, *, pages: int) -> None:
        from reportlab.pdfgen.canvas import Canvas

        self._invoice = invoice
        self._pages = pages
        self._buffer = io.BytesIO()
        self._canvas: Canvas = Canvas(self._buffer, pagesize=(WIDTH, HEIGHT), invariant=1, lang="en")
        self._page = 1
        self._y = TOP
        amounts = [line.rounded_micros for line in invoice.lines] + [invoice.totals.subtotal_micros]
        self._decimals = max(words.decimals_for(amounts), minor_unit_decimals(invoice.currency))
        self._price_decimals = words.decimals_for([line.unit_price for line in invoice.lines if line.unit_price is not None])
        self._price_x = min(PRICE_X, RIGHT - GAP - _widest(self._amount(micros) for micros in amounts))
        prices = _widest([self._price_title, *(self._price(line) for line in invoice.lines)])
        self._tokens_x = min(TOKENS_X, self._price_x - GAP - prices)
        tokens = _widest(f"{line.tokens:,}" for line in invoice.lines)
        self._names_width = min(TOKENS_X - LEFT - 80, self._tokens_x - LEFT - 2 * GAP - tokens)

    def write(self) -> tuple[bytes, int]:
        """Return the PDF and its number of pages."""
        head, buyer = self._invoice.head, self._invoice.buyer
        self._canvas.setTitle(f"{self._title} {head.number or head.month}")
        self._canvas.setAuthor(self._invoice.seller.get("name", ""))
        self._canvas.setSubject(f"{words.month_name(head.month)}, {buyer['name']}")
        self._begin_page()
        self._write_seller()
        self._write_buyer_and_facts()
        self._write_lines()
        self._write_totals()
        self._write_terms()
        self._end_page()
        self._canvas.save()
        return self._buffer.getvalue(), self._page

    @property
    def _title(self) -> str:
        if self._invoice.is_draft:
            return "Draft invoice"
        return "Credit note" if self._invoice.totals.due_micros < 0 else "Invoice"

    def _write_seller(self) -> None:
        seller = self._invoice.seller
        self._draw_text(RIGHT, self._title, 20, bold=True, align="right")
        top = self._y
        unnamed = "Seller not set" if self._invoice.is_draft else ""  # closed without a seller: printed on letterhead
        for line in wrap(seller.get("name") or unnamed, 13, 260, bold=True):
            self._draw_text(LEFT, line, 13, bold=True)
            self._y -= 17
        for line in _seller_lines(seller):
            self._draw_paragraph(line, 260, SMALL + 0.5, grey=GREY, leading=11)
        self._y = min(self._y, top - 40) - 14

    def _write_buyer_and_facts(self) -> None:
        top = self._y
        self._draw_text(LEFT, "Billed to", SMALL, grey=GREY)
        self._y -= LEADING
        self._draw_paragraph(self._invoice.buyer["name"], 250, SIZE + 1, bold=True)
        for line in _buyer_lines(self._invoice.buyer):
            self._draw_paragraph(line, 250, SIZE)
        bottom, self._y = self._y, top
        for name, value in self._facts():
            self._draw_text(FACTS_X, name, SMALL, grey=GREY)
            size = SIZE if text_width(value, SIZE) <= RIGHT - VALUES_X else SMALL
            for line in wrap(value, size, RIGHT - VALUES_X):
                self._draw_text(VALUES_X, line, size)
                self._y -= LEADING
        self._y = min(bottom, self._y) - 18

    def _facts(self) -> Iterator[tuple[str, str]]:
        invoice = self._invoice
        first, last = first_day(invoice.head.month), last_day(invoice.head.month)
        yield "Number", invoice.head.number or "none yet"
        yield "Month", words.month_name(invoice.head.month)
        yield "Period", f"{first.day} – {words.format_day(last)} ({invoice.seller.get(TIME_ZONE, 'UTC')})"
        if invoice.issued_on is not None:
            yield "Date", words.format_day(invoice.issued_on)
        if invoice.due_on is not None:
            yield "Due", words.format_day(invoice.due_on)
        yield "Customer", invoice.head.tenant_id
        if invoice.buyer.get("reference"):
            yield "Your reference", invoice.buyer["reference"]

    def _write_lines(self) -> None:
        self._write_table_head()
        if not self._invoice.lines:
            self._draw_text(LEFT, "Nothing was used in this month.", SIZE, grey=GREY)
            self._y -= LEADING + 4
        for title, lines in groupby(self._invoice.lines, key=_group_title):
            self._write_group(title, list(lines))

    def _write_group(self, title: str, lines: Sequence[InvoiceLine]) -> None:
        names = wrap(title, SIZE, RIGHT - LEFT, bold=True)
        self._ensure_room(LEADING * (len(names) + 1), in_table=True)
        for name in names:
            self._draw_text(LEFT, name, SIZE, bold=True)
            self._y -= LEADING
        for line in lines:
            self._ensure_room(LEADING, in_table=True)
            self._write_row(line)
        self._y -= 5

    def _write_row(self, line: InvoiceLine) -> None:
        first, *more = wrap(words.line_name(line), SIZE, self._names_width)
        self._draw_text(LEFT + GAP, first, SIZE)
        if line.kind != FREE_ALLOWANCE:
            self._draw_text(self._tokens_x, f"{line.tokens:,}", SIZE, align="right")
        self._draw_text(self._price_x, self._price(line), SIZE, align="right")
        self._draw_text(RIGHT, self._amount(line.rounded_micros), SIZE, align="right")
        self._y -= LEADING
        for name in more:
            self._ensure_room(LEADING, in_table=True)
            self._draw_text(LEFT + GAP, name, SIZE)
            self._y -= LEADING
        for reason in words.reasons_of(line):
            for text in wrap(f"Reason: {reason}", SMALL, TOKENS_X - LEFT - 20):
                self._ensure_room(REASON_LEADING, in_table=True)
                self._draw_text(LEFT + GAP, text, SMALL, grey=GREY)
                self._y -= REASON_LEADING
        self._y -= 3 if line.reasons else 0

    @property
    def _price_title(self) -> str:
        return f"{self._invoice.currency} per 1M tokens"

    def _price(self, line: InvoiceLine) -> str:
        return "" if line.unit_price is None else format_micros(line.unit_price, decimals=self._price_decimals)

    def _amount(self, micros: int) -> str:
        return format_micros(micros, decimals=self._decimals)

    def _write_table_head(self) -> None:
        self._canvas.setFillGray(PALE + 0.06)
        self._canvas.rect(LEFT - 6, self._y - 6, RIGHT - LEFT + 12, 19, stroke=0, fill=1)
        self._draw_text(LEFT, "Model and kind", SMALL, grey=GREY)
        self._draw_text(self._tokens_x, "Tokens", SMALL, grey=GREY, align="right")
        self._draw_text(self._price_x, self._price_title, SMALL, grey=GREY, align="right")
        self._draw_text(RIGHT, f"Amount in {self._invoice.currency}", SMALL, grey=GREY, align="right")
        self._y -= 22

    def _write_totals(self) -> None:
        rows = list(self._totals())
        self._ensure_room(LEADING * (len(rows) + 2) + 14)
        self._draw_rule(LEFT - 6)
        self._y -= 8
        for name, amount in rows:
            self._draw_text(self._price_x, name, SIZE, align="right")
            self._draw_text(RIGHT, amount, SIZE, align="right")
            self._y -= LEADING + 1
        self._draw_rule(300)
        self._y -= 10
        due = self._invoice.totals.due_micros
        name = "Amount in your favour" if due < 0 else "Amount due"
        amount = words.format_payment(abs(due), self._invoice.currency)
        name_x = min(self._price_x, RIGHT - GAP - text_width(amount, SIZE + 2, bold=True))
        self._draw_text(name_x, name, SIZE + 2, bold=True, align="right")
        self._draw_text(RIGHT, amount, SIZE + 2, bold=True, align="right")
        self._y -= 30

    def _totals(self) -> Iterator[tuple[str, str]]:
        totals, currency, seller = self._invoice.totals, self._invoice.currency, self._invoice.seller
        coins = minor_unit_decimals(currency)
        yield "Sum of the lines", self._amount(totals.subtotal_micros)
        if totals.rounding_micros:
            smallest = format_micros(10 ** (6 - coins), decimals=coins)
            yield f"Rounding to {smallest}", self._amount(totals.rounding_micros)
            yield "Net amount", format_micros(totals.due_micros - totals.tax_micros, decimals=coins)
        if seller.get("tax_basis_points") or totals.tax_micros:
            yield words.tax_name(seller), format_micros(totals.tax_micros, decimals=coins)

    def _write_terms(self) -> None:
        for text in _terms(self._invoice):
            self._draw_paragraph(text, RIGHT - LEFT, SIZE)
        self._y -= 8
        for text in (words.ABORT_POLICY, words.ROUNDING_POLICY):
            self._draw_paragraph(text, RIGHT - LEFT, SMALL, grey=GREY, leading=10)
            self._y -= 3

    def _begin_page(self) -> None:
        self._y = TOP
        if self._invoice.is_draft:
            self._draw_watermark()

    def _draw_watermark(self) -> None:
        canvas = self._canvas
        canvas.saveState()
        canvas.setFillGray(PALE + 0.04)
        canvas.translate(WIDTH / 2, HEIGHT / 2)
        canvas.rotate(52)
        draw(canvas, 0, -50, "DRAFT", 150, bold=True, align="center")
        canvas.restoreState()

    def _end_page(self) -> None:
        head, seller = self._invoice.head, self._invoice.seller
        self._y = 56
        self._draw_rule(LEFT)
        self._y -= 5
        contact = " · ".join(seller[name] for name in ("registration", "email", "phone", "website") if seller.get(name))
        self._draw_text(RIGHT, f"Page {self._page} of {self._pages}", SMALL, grey=GREY, align="right")
        name = head.number or f"draft of {words.month_name(head.month)}, may still change"
        for line in wrap(" · ".join(part for part in (name, contact) if part), SMALL, RIGHT - LEFT - 70)[:2]:
            self._draw_text(LEFT, line, SMALL, grey=GREY)
            self._y -= 10

    def _ensure_room(self, height: float, *, in_table: bool = False) -> None:
        """Begin a new page unless this one has room for `height` points."""
        if self._y - height >= BOTTOM:
            return
        self._end_page()
        self._canvas.showPage()
        self._page += 1
        self._begin_page()
        if in_table:
            self._write_table_head()

    def _draw_paragraph(
        self, text: str, width: float, size: float, *, bold: bool = False, grey: float = INK, leading: float = LEADING
    ) -> None:
        for line in wrap(text, size, width, bold=bold):
            self._ensure_room(leading)
            self._draw_text(LEFT, line, size, bold=bold, grey=grey)
            self._y -= leading

    def _draw_text(
        self, x: float, text: str, size: float, *, bold: bool = False, grey: float = INK, align: Align = "left"
    ) -> None:
        self._canvas.setFillGray(grey)
        draw(self._canvas, x, self._y, text, size, bold=bold, align=align)

    def _draw_rule(self, left: float) -> None:
        self._canvas.setStrokeGray(RULE)
        self._canvas.setLineWidth(0.6)
        self._canvas.line(left, self._y + LEADING - 3, RIGHT + 6, self._y + LEADING - 3)


def _widest(texts: Iterable[str]) -> float:
    """Return the width of the widest text in points."""
    return max((text_width(text, SIZE) for text in texts), default=0.0)


def _seller_lines(seller: Any) -> Iterator[str]:
    yield from seller.get("address", ())
    if seller.get("tax_id"):
        yield f"Tax ID {seller['tax_id']}"


def _buyer_lines(buyer: Any) -> Iterator[str]:
    yield from buyer.get("address", "").splitlines()
    if buyer.get("country"):
        yield buyer["country"]
    if buyer.get("tax_id"):
        yield f"Tax ID {buyer['tax_id']}"
    if buyer.get("email"):
        yield buyer["email"]


def _group_title(line: InvoiceLine) -> str:
    """Return the heading of the line's group; adjustments and allowances have groups of their own, after those of models."""
    return {ADJUSTMENT: "Adjustments", FREE_ALLOWANCE: "Allowances"}.get(line.kind) or line.model or ""


def _terms(invoice: Invoice) -> Iterator[str]:
    """Yield the terms of payment."""
    seller, due, currency = invoice.seller, invoice.totals.due_micros, invoice.currency
    if invoice.is_draft:
        yield "This is a draft. Nothing is due yet: its figures can change until the month is closed."
    elif invoice.due_on is not None:
        amount, last_day_to_pay = words.format_payment(due, currency), words.format_day(invoice.due_on)
        yield f"Please pay {amount} by {last_day_to_pay}, naming {invoice.head.number}."
        yield from seller.get("bank", ())
    elif due < 0:
        yield "This amount is in your favour. It will be paid out or set against your next invoice."
    else:
        yield "Nothing is to be paid."
    if due > 0 and not invoice.is_draft and seller.get("payment_note"):
        yield seller["payment_note"]
    if seller.get("tax_note"):
        yield seller["tax_note"]
