"""`gatehouse tenants archive`, which cannot be undone: asks on a terminal, needs --yes elsewhere."""

from __future__ import annotations

import pytest

from tests.support.typed_commands import Run


def archived(typed: Run) -> list[bool]:
    return [row["archived"] for row in typed("tenants", "list", "--archived", "--json").done()["data"]]


def test_a_program_must_say_yes(typed: Run) -> None:
    refused = typed("tenants", "archive", "bob")
    assert refused.status == 2
    assert "--yes" in refused.err
    assert archived(typed) == [False]
    assert typed("tenants", "archive", "bob", "--yes").status == 0
    assert archived(typed) == [True]


def test_on_a_terminal_it_is_told_what_happens_and_the_name_is_asked_for(typed: Run) -> None:
    answer = typed("tenants", "archive", "bob", "--json", at_terminal="bob\n")
    assert answer.status == 0
    assert "are refused" in answer.err
    assert "Type the name bob to confirm" in answer.err
    assert answer.out.startswith("{")
    assert archived(typed) == [True]


@pytest.mark.parametrize(("typing", "status"), [("Bob\n", 1), ("yes\n", 1), ("", 130)])
def test_anything_but_the_name_changes_nothing(typed: Run, typing: str, status: int) -> None:
    assert typed("tenants", "archive", "bob", at_terminal=typing).status == status
    assert archived(typed) == [False]


def test_a_tenant_that_is_archived_already_is_not_asked_about(typed: Run) -> None:
    typed("tenants", "archive", "bob", "--yes")
    answer = typed("tenants", "archive", "bob", at_terminal="")
    assert (answer.status, answer.err) == (0, "")


def test_a_tenant_that_is_not_there_is_not_asked_about(typed: Run) -> None:
    answer = typed("tenants", "archive", "nobody", at_terminal="nobody\n")
    assert answer.status == 1
    assert "no tenant 'nobody'" in answer.err
