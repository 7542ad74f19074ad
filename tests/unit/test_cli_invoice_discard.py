"""`gatehouse invoices discard`: confirmation at a terminal, --yes elsewhere, and refusal of closed invoices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.typed_commands import Run

MONTH = "2026-01"


def create_invoice(gatehouse: Run, verb: str = "draft") -> str:
    """Draft or close Bob's invoice of January; return its id."""
    answer: dict[str, Any] = gatehouse("invoices", verb, "--month", MONTH, "--tenant", "bob", "--json").done()
    return str(answer["data"][0]["id"])


def invoice_ids(gatehouse: Run) -> list[str]:
    return [row["id"] for row in gatehouse("invoices", "list", "--json").done()["data"]]


def test_without_a_terminal_discarding_needs_yes_and_is_logged(gatehouse: Run) -> None:
    draft = create_invoice(gatehouse)
    refused = gatehouse("invoices", "discard", draft)
    assert refused.status == 2
    assert "type the tenant's name, or add --yes" in refused.err
    assert invoice_ids(gatehouse) == [draft]

    discarded = gatehouse("invoices", "discard", draft, "--yes", "--json").done()
    tenant_id = gatehouse("tenants", "show", "bob", "--json").done()["id"]
    assert discarded == {"id": draft, "tenant_id": tenant_id, "tenant": "bob", "month": MONTH, "discarded": True}
    assert invoice_ids(gatehouse) == []
    (entry,) = gatehouse("audit", "list", "--action", "invoice.discard", "--json").done()["data"]
    assert (entry["target"]["id"], entry["tenant_id"], entry["before"]) == (draft, tenant_id, {"month": MONTH})
    assert create_invoice(gatehouse) != draft


def test_at_a_terminal_discarding_needs_the_typed_tenant_name(gatehouse: Run) -> None:
    draft = create_invoice(gatehouse)
    answer = gatehouse("invoices", "discard", draft, "--json", at_terminal="bob\n")
    assert answer.done()["discarded"] is True
    assert f"This removes the draft of {MONTH} for bob." in answer.err
    assert "Type the name bob to confirm" in answer.err
    assert invoice_ids(gatehouse) == []


@pytest.mark.parametrize(("typing", "status"), [("yes\n", 1), ("", 130)])
def test_another_input_than_the_tenant_name_discards_nothing(gatehouse: Run, typing: str, status: int) -> None:
    draft = create_invoice(gatehouse)
    assert gatehouse("invoices", "discard", draft, at_terminal=typing).status == status
    assert invoice_ids(gatehouse) == [draft]


@pytest.mark.parametrize("stdin", [{"at_terminal": ""}, {}], ids=["terminal", "program"])
def test_a_closed_invoice_is_refused_without_a_question(gatehouse: Run, stdin: dict[str, str]) -> None:
    closed = create_invoice(gatehouse, "close")
    answer = gatehouse("invoices", "discard", closed, "--json", *([] if stdin else ["--yes"]), **stdin)
    assert (answer.status, answer.json()["error"]["code"]) == (1, "invoice_closed")
    assert "never changes" in answer.json()["error"]["message"]
    assert invoice_ids(gatehouse) == [closed]


@pytest.mark.parametrize("wrong", ["inv_x", "../seller", "2026-0001"])
def test_an_unknown_invoice_is_not_found(gatehouse: Run, wrong: str) -> None:
    answer = gatehouse("invoices", "discard", wrong, "--yes", "--json")
    assert (answer.status, answer.json()["error"]["code"]) == (1, "not_found")
    assert gatehouse("invoices", "discard", "--yes").status == 2
