"""The form for the invoice issuer (seller). `Seller` validates its fields."""

from __future__ import annotations

from typing import Any

from litestar import get, post

from appliance.base.money import BASIS_POINTS, MICROS_PER_UNIT
from appliance.console.context import Context, ContextDependency
from appliance.console.forms import Form
from appliance.console.rendering import Html
from appliance.console.security import needs
from appliance.metering.invoicing.seller import TERMS_DAYS_DEFAULT, TERMS_DAYS_MAX, Seller, read_seller, store_seller
from appliance.tenancy.roles import Action

TEXTS = {
    "email": "E-mail",
    "phone": "Telephone",
    "website": "Website",
    "tax_id": "Tax number",
    "registration": "Company registration",
    "tax_label": "Name of the tax, like VAT",
    "tax_note": "Note if no tax is charged",
    "payment_note": "Payment note",
}
FIELDS = ("name", "address", "bank", "payment_terms_days", "tax_basis_points", *TEXTS)
_MICROS_PER_BASIS_POINT = MICROS_PER_UNIT * 100 // BASIS_POINTS


@get("/settings/seller", guards=[needs(Action.BILLING)])
async def show_seller(context: ContextDependency) -> Html:
    """The form with the issuer's details on invoices."""
    return await _form(context, None)


@post("/settings/seller", guards=[needs(Action.BILLING)], status_code=200)
async def save_seller(context: ContextDependency) -> Html:
    """Save the issuer for invoices closed from now on, or show the form again with the errors."""
    form = await context.form()
    values = _read(form)
    if not form.errors:
        with form.refusals(FIELDS):
            await store_seller(context.services.appliance_records, Seller(**values))
            return context.redirect("/settings", done="seller-saved")
    return await _form(context, form)


def _read(form: Form) -> dict[str, Any]:
    days = form.whole_number("payment_terms_days", most=TERMS_DAYS_MAX)
    return {
        "name": form.text("name"),
        "address": _lines(form, "address"),
        "bank": _lines(form, "bank"),
        "payment_terms_days": TERMS_DAYS_DEFAULT if days is None else days,
        "tax_basis_points": _read_tax(form),
        **{name: form.raw(name) or None for name in TEXTS},
    }


def _lines(form: Form, field: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in form.raw(field).splitlines() if line.strip())


def _read_tax(form: Form) -> int:
    """Parse a percentage with at most two decimals into basis points; an empty field means no tax."""
    micros = form.amount_micros("tax_basis_points") or 0
    basis_points, rest = divmod(micros, _MICROS_PER_BASIS_POINT)
    if rest or basis_points > BASIS_POINTS:
        form.fail("tax_basis_points", "Enter a percentage from 0 to 100 with at most two decimals.")
    return basis_points


async def _form(context: Context, form: Form | None) -> Html:
    seller = await read_seller(context.services.appliance_records)
    return context.sheet(
        "fragments/seller.html",
        title="Invoice issuer",
        form=form,
        seller=seller,
        texts=TEXTS,
        tax_micros=0 if seller is None else seller.tax_basis_points * _MICROS_PER_BASIS_POINT,
        days=TERMS_DAYS_DEFAULT,
    )
