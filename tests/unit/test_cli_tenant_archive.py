"""`gatehouse tenants archive`, which cannot be undone: confirmation at a terminal, --yes elsewhere."""

from __future__ import annotations

import pytest

from tests.support.typed_commands import Run


def archived(gatehouse: Run) -> list[bool]:
    return [row["archived"] for row in gatehouse("tenants", "list", "--archived", "--json").done()["data"]]


def test_without_a_terminal_archiving_needs_yes(gatehouse: Run) -> None:
    refused = gatehouse("tenants", "archive", "bob")
    assert refused.status == 2
    assert "--yes" in refused.err
    assert archived(gatehouse) == [False]
    assert gatehouse("tenants", "archive", "bob", "--yes").status == 0
    assert archived(gatehouse) == [True]


def test_at_a_terminal_archiving_needs_the_typed_tenant_name(gatehouse: Run) -> None:
    answer = gatehouse("tenants", "archive", "bob", "--json", at_terminal="bob\n")
    assert answer.status == 0
    assert "are refused" in answer.err
    assert "Type the name bob to confirm" in answer.err
    assert answer.out.startswith("{")
    assert archived(gatehouse) == [True]


@pytest.mark.parametrize(("typing", "status"), [("Bob\n", 1), ("yes\n", 1), ("", 130)])
def test_another_input_than_the_tenant_name_archives_nothing(gatehouse: Run, typing: str, status: int) -> None:
    assert gatehouse("tenants", "archive", "bob", at_terminal=typing).status == status
    assert archived(gatehouse) == [False]


def test_an_archived_tenant_needs_no_confirmation(gatehouse: Run) -> None:
    gatehouse("tenants", "archive", "bob", "--yes")
    answer = gatehouse("tenants", "archive", "bob", at_terminal="")
    assert (answer.status, answer.err) == (0, "")


def test_an_unknown_tenant_fails_without_a_question(gatehouse: Run) -> None:
    answer = gatehouse("tenants", "archive", "nobody", at_terminal="nobody\n")
    assert answer.status == 1
    assert "no tenant 'nobody'" in answer.err
