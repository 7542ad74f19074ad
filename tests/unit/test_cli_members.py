"""`gatehouse members` and `limits`, and the options of tenants and keys."""

from __future__ import annotations

from typing import Any

import pytest

DORA = "dora@example.com"


def test_somebody_is_invited_promoted_and_removed(typed: Any) -> None:
    made = typed("members", "invite", DORA, "--tenant", "bob", "--role", "viewer", "--json").done()

    assert len(made["password"]) > 15
    assert typed("members", "invite", DORA, "--tenant", "bob").err.startswith(
        "gatehouse: this member already belongs to the tenant"
    )
    assert typed("members", "set-role", DORA, "manager", "--tenant", "bob", "--json").done()["role"] == "manager"
    (listed,) = typed("members", "list", "--tenant", "bob", "--json").done()["data"]
    assert (listed["email"], listed["role"]) == (DORA, "manager")
    assert "manager@tn_" in typed("members", "list").out
    assert typed("members", "remove", DORA, "--tenant", "bob").status == 0
    assert typed("members", "list", "--tenant", "bob", "--json").done() == {"data": []}
    assert typed("members", "remove", DORA, "--tenant", "bob").status == 1


def test_a_password_is_said_to_be_shown_once(typed: Any) -> None:
    first = typed("members", "invite", DORA, "--tenant", "bob")
    assert "not shown again" in first.err
    assert typed("tenants", "create", "emil").status == 0
    again = typed("members", "invite", DORA, "--tenant", "emil")

    assert (again.status, again.err) == (0, "")
    assert "unchanged" in again.out


def test_a_role_on_the_appliance_changes_and_the_last_owner_stays(typed: Any) -> None:
    assert typed("admin", "create", "alice@example.com", "--role", "owner").status == 0
    assert typed("admin", "create", DORA, "--role", "viewer").status == 0
    assert typed("members", "set-role", DORA, "billing", "--json").done()["role"] == "billing"
    assert typed("members", "disable", DORA, "--json").done()["disabled"]
    assert not typed("members", "enable", DORA, "--json").done()["disabled"]
    for arguments in (["set-role", "alice@example.com", "viewer"], ["disable", "alice@example.com"]):
        refused = typed("members", *arguments)
        assert (refused.status, "last owner" in refused.err) == (1, True)


def test_a_key_is_rotated_with_a_grace_period(typed: Any) -> None:
    old = typed("keys", "create", "bob", "--scope", "usage", "--model-limit", "m:tokens_per_minute=5", "--json").done()
    assert (old["scopes"], old["model_limits"]["m"]["tokens_per_minute"]) == (["usage"], 5)
    fresh = typed("keys", "rotate", old["prefix"], "--grace-s", "60", "--json").done()
    rows = {row["id"]: row for row in typed("keys", "list", "--json").done()["data"]}

    assert rows[old["id"]]["replaced_by"] == fresh["id"]
    assert rows[old["id"]]["expires_at"] is not None
    refused = typed("keys", "rotate", fresh["id"], "--grace-s", "-1")
    assert (refused.status, "grace_s" in refused.err) == (2, True)


def test_a_key_is_changed(typed: Any) -> None:
    key = typed("keys", "create", "bob", "--json").done()
    changed = typed(
        "keys", "update", key["id"], "--name", "ci", "--tokens-per-minute", "7", "--limit-mode", "shadow", "--json"
    ).done()

    assert (changed["name"], changed["limits"]["tokens_per_minute"], changed["limit_mode"]) == ("ci", 7, "shadow")
    assert typed("keys", "update", key["id"]).status == 2


def test_a_tenant_takes_its_terms(typed: Any) -> None:
    options = [
        "--limit-mode",
        "shadow",
        "--cut-at-budget",
        "--currency",
        "USD",
        "--alert-percent",
        "50",
        "--alert-percent",
        "90",
    ]
    options += ["--billing", "name=Bob GmbH", "--billing", r"address=Gasse 1\n8000 Zürich"]
    options += ["--model-limit", "org/m:v1:tokens_per_minute=9", "--model-limit", "org/m:v1:concurrent_requests=1"]
    bob = typed("tenants", "update", "bob", *options, "--json").done()

    assert (bob["limit_mode"], bob["cut_at_budget"], bob["currency"], bob["alert_percents"]) == (
        "shadow",
        True,
        "USD",
        [50, 90],
    )
    assert bob["billing"] == {"name": "Bob GmbH", "address": "Gasse 1\n8000 Zürich"}
    assert (bob["model_limits"]["org/m:v1"]["tokens_per_minute"], bob["model_limits"]["org/m:v1"]["concurrent_requests"]) == (
        9,
        1,
    )
    assert typed("tenants", "update", "bob", "--model-limit", "none", "--json").done()["model_limits"] == {}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--model-limit", "m"),
        ("--model-limit", "m:speed=1"),
        ("--model-limit", "m:tokens_per_minute=-1"),
        ("--model-limit", "tokens_per_minute=1"),
        ("--billing", "name"),
    ],
)
def test_a_misspelt_option_is_a_usage_error_that_names_it(typed: Any, option: str, value: str) -> None:
    refused = typed("tenants", "update", "bob", option, value)

    assert refused.status == 2
    assert option in refused.err


def test_tiers_and_models_are_limited(typed: Any) -> None:
    assert typed("limits", "tier", "batch", "--admission-wait-ms", "100", "--json").done()["admission_wait_ms"] == 100
    assert [row["admission_wait_ms"] for row in typed("limits", "tiers", "--json").done()["data"]] == [0, 0, 100]
    assert "admission_wait_ms" in typed("limits", "tier", "batch", "--admission-wait-ms", "-1").err
    made = typed("limits", "model", "org/m", "--tokens-per-minute", "5", "--limit-mode", "shadow", "--json").done()
    assert (made["model"], made["limits"]["tokens_per_minute"], made["limit_mode"]) == ("org/m", 5, "shadow")
    assert typed("limits", "models", "--json").done() == {"data": [made]}
    assert typed("limits", "free-model", "org/m").status == 0
    assert typed("limits", "free-model", "org/m").status == 1
