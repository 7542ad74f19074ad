"""`gatehouse members` and `gatehouse limits`, and options of tenants and keys."""

from __future__ import annotations

from typing import Any

import pytest

DORA = "dora@example.com"


def test_a_member_is_invited_to_a_tenant_promoted_and_removed(gatehouse: Any) -> None:
    made = gatehouse("members", "invite", DORA, "--tenant", "bob", "--role", "viewer", "--json").done()

    assert len(made["password"]) > 15
    assert gatehouse("members", "invite", DORA, "--tenant", "bob").err.startswith(
        "gatehouse: this member already belongs to the tenant"
    )
    assert gatehouse("members", "set-role", DORA, "manager", "--tenant", "bob", "--json").done()["role"] == "manager"
    (listed,) = gatehouse("members", "list", "--tenant", "bob", "--json").done()["data"]
    assert (listed["email"], listed["role"]) == (DORA, "manager")
    assert "manager@tn_" in gatehouse("members", "list").out
    removed = gatehouse("members", "remove", DORA, "--tenant", "bob")
    assert (removed.status, removed.err) == (0, f"{DORA} was removed from bob; the account remains.\n")
    assert gatehouse("members", "list", "--tenant", "bob", "--json").done() == {"data": []}
    again = gatehouse("members", "remove", DORA, "--tenant", "bob")
    assert (again.status, again.err) == (1, f"gatehouse: bob has no member with the e-mail address {DORA!r}\n")


def test_a_new_password_is_printed_once_and_kept_by_later_invitations(gatehouse: Any) -> None:
    first = gatehouse("members", "invite", DORA, "--tenant", "bob")
    assert "not shown again" in first.err
    assert gatehouse("tenants", "create", "emil").status == 0
    again = gatehouse("members", "invite", DORA, "--tenant", "emil")

    assert (again.status, again.err) == (0, "")
    assert "unchanged" in again.out


def test_a_mistyped_tenant_or_address_is_answered_with_the_one_that_was_meant(gatehouse: Any) -> None:
    gatehouse("members", "invite", DORA, "--tenant", "bob")
    tenant = gatehouse("members", "remove", DORA, "--tenant", "bobb")
    member = gatehouse("members", "disable", "dora@exmaple.com")

    assert tenant.err == "gatehouse: there is no tenant 'bobb'; did you mean 'bob'?\n"
    assert member.err.endswith(f"has no member with the e-mail address 'dora@exmaple.com'; did you mean {DORA!r}?\n")


def test_appliance_roles_can_be_changed_except_that_of_the_last_owner(gatehouse: Any) -> None:
    assert gatehouse("admin", "create", "alice@example.com", "--role", "owner").status == 0
    assert gatehouse("admin", "create", DORA, "--role", "viewer").status == 0
    assert gatehouse("members", "set-role", DORA, "billing", "--json").done()["role"] == "billing"
    assert gatehouse("members", "disable", DORA, "--json").done()["disabled"]
    assert not gatehouse("members", "enable", DORA, "--json").done()["disabled"]
    for arguments in (["set-role", "alice@example.com", "viewer"], ["disable", "alice@example.com"]):
        refused = gatehouse("members", *arguments)
        assert (refused.status, "last owner" in refused.err) == (1, True)


def test_a_key_can_be_rotated_with_a_grace_period(gatehouse: Any) -> None:
    old = gatehouse("keys", "create", "bob", "--scope", "usage", "--model-limit", "m:tokens_per_minute=5", "--json").done()
    assert (old["scopes"], old["model_limits"]["m"]["tokens_per_minute"]) == (["usage"], 5)
    fresh = gatehouse("keys", "rotate", old["prefix"], "--grace-s", "60", "--json").done()
    rows = {row["id"]: row for row in gatehouse("keys", "list", "--json").done()["data"]}

    assert rows[old["id"]]["replaced_by"] == fresh["id"]
    assert rows[old["id"]]["expires_at"] is not None
    refused = gatehouse("keys", "rotate", fresh["id"], "--grace-s", "-1")
    assert (refused.status, "grace_s" in refused.err) == (2, True)


def test_a_key_can_be_updated(gatehouse: Any) -> None:
    key = gatehouse("keys", "create", "bob", "--json").done()
    changed = gatehouse(
        "keys", "update", key["id"], "--name", "ci", "--tokens-per-minute", "7", "--limit-mode", "shadow", "--json"
    ).done()

    assert (changed["name"], changed["limits"]["tokens_per_minute"], changed["limit_mode"]) == ("ci", 7, "shadow")
    assert gatehouse("keys", "update", key["id"]).status == 2


def test_terms_of_a_tenant_can_be_updated(gatehouse: Any) -> None:
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
    bob = gatehouse("tenants", "update", "bob", *options, "--json").done()

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
    assert gatehouse("tenants", "update", "bob", "--model-limit", "none", "--json").done()["model_limits"] == {}


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
def test_an_invalid_option_value_is_a_usage_error_that_names_the_option(gatehouse: Any, option: str, value: str) -> None:
    refused = gatehouse("tenants", "update", "bob", option, value)

    assert refused.status == 2
    assert option in refused.err


def test_limits_of_tiers_and_models_can_be_set_and_removed(gatehouse: Any) -> None:
    assert gatehouse("limits", "tier", "batch", "--admission-wait-ms", "100", "--json").done()["admission_wait_ms"] == 100
    assert [row["admission_wait_ms"] for row in gatehouse("limits", "tiers", "--json").done()["data"]] == [0, 0, 100]
    assert gatehouse("limits", "tiers").out == "name\tadmission_wait_ms\ninteractive\t0\nstandard\t0\nbatch\t100\n"
    assert "admission_wait_ms" in gatehouse("limits", "tier", "batch", "--admission-wait-ms", "-1").err
    made = gatehouse("limits", "model", "org/m", "--tokens-per-minute", "5", "--limit-mode", "shadow", "--json").done()
    assert (made["model"], made["limits"]["tokens_per_minute"], made["limit_mode"]) == ("org/m", 5, "shadow")
    assert gatehouse("limits", "models", "--json").done() == {"data": [made]}
    assert gatehouse("limits", "free-model", "org/m").err == "These limits were removed.\n"
    assert gatehouse("limits", "free-model", "org/m").status == 1


def test_limits_of_a_model_that_no_engine_serves_are_set_with_a_note(gatehouse: Any) -> None:
    limits = ("--tokens-per-minute", "5", "--json")
    assert gatehouse("limits", "model", "gatehouse-demo", *limits).err == ""
    made = gatehouse("limits", "model", "gatehouse-dem", *limits)
    assert made.done()["model"] == "gatehouse-dem"
    assert made.err == (
        "gatehouse: no engine serves a model named 'gatehouse-dem'; its limits apply when one does; did you mean "
        "'gatehouse-demo'?\n"
    )


def test_removing_limits_of_a_model_without_any_names_the_closest_one_that_has_some(gatehouse: Any) -> None:
    gatehouse("limits", "model", "gatehouse-demo", "--tokens-per-minute", "5")
    refused = gatehouse("limits", "free-model", "gatehouse-dem", "--json")
    message = "'gatehouse-dem' has no limits; did you mean 'gatehouse-demo'?"
    assert (refused.status, refused.json()) == (1, {"error": {"message": message, "code": "not_found"}})
