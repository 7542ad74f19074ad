"""`gatehouse invoices discard`: asks on a terminal, needs --yes elsewhere, and never discards a closed invoice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.typed_commands import Run

MONTH = "2026-01"


def made(typed: Run, verb: str = "draft") -> str:
    """Draft or close January of Bob and return the id of the invoice."""
    answer: dict[str, Any] = typed("invoices", verb, "--month", MONTH, "--tenant", "bob", "--json").done()
    return str(answer["data"][0]["id"])


def invoices(typed: Run) -> list[str]:
    return [row["id"] for row in typed("invoices", "list", "--json").done()["data"]]


def test_a_program_must_say_yes_and_the_audit_log_tells_of_it(typed: Run) -> None:
    draft = made(typed)
    refused = typed("invoices", "discard", draft)
    assert refused.status == 2
    assert "type the tenant's name, or add --yes" in refused.err
    assert invoices(typed) == [draft]

    told = typed("invoices", "discard", draft, "--yes", "--json").done()
    tenant_id = typed("tenants", "show", "bob", "--json").done()["id"]
    assert told == {"id": draft, "tenant_id": tenant_id, "tenant": "bob", "month": MONTH, "discarded": True}
    assert invoices(typed) == []
    (entry,) = typed("audit", "list", "--action", "invoice.discard", "--json").done()["data"]
    assert (entry["target"]["id"], entry["tenant_id"], entry["before"]) == (draft, tenant_id, {"month": MONTH})
    assert made(typed) != draft


def test_on_a_terminal_it_is_told_whose_month_it_is_and_the_name_is_asked_for(typed: Run) -> None:
    draft = made(typed)
    answer = typed("invoices", "discard", draft, "--json", at_terminal="bob\n")
    assert answer.done()["discarded"] is True
    assert f"This removes the draft of {MONTH} for bob." in answer.err
    assert "Type the name bob to confirm" in answer.err
    assert invoices(typed) == []


@pytest.mark.parametrize(("typing", "status"), [("yes\n", 1), ("", 130)])
def test_anything_but_the_name_changes_nothing(typed: Run, typing: str, status: int) -> None:
    draft = made(typed)
    assert typed("invoices", "discard", draft, at_terminal=typing).status == status
    assert invoices(typed) == [draft]


@pytest.mark.parametrize("given", [{"at_terminal": ""}, {}], ids=["terminal", "program"])
def test_a_closed_invoice_is_not_asked_about_and_stays(typed: Run, given: dict[str, str]) -> None:
    closed = made(typed, "close")
    answer = typed("invoices", "discard", closed, "--json", *([] if given else ["--yes"]), **given)
    assert (answer.status, answer.json()["error"]["code"]) == (1, "invoice_closed")
    assert "never changes" in answer.json()["error"]["message"]
    assert invoices(typed) == [closed]


@pytest.mark.parametrize("wrong", ["inv_x", "../seller", "2026-0001"])
def test_what_is_no_invoice_is_not_found(typed: Run, wrong: str) -> None:
    answer = typed("invoices", "discard", wrong, "--yes", "--json")
    assert (answer.status, answer.json()["error"]["code"]) == (1, "not_found")
    assert typed("invoices", "discard", "--yes").status == 2
