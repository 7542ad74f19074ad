"""Money and people: limits per model, tiers, memberships, second factors, postings, sums, invoices, alerts, the audit log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_NEW_TABLES = (
    "tiers", "model_policies", "memberships", "recovery_codes", "counters", "usage_rollups", "limit_levels", "box_records",
    "free_allowances", "invoices", "invoice_lines", "webhooks", "outbox", "audit_log", "audit_head",
)  # fmt: skip


def upgrade() -> None:
    """Upgrade the schema."""
    _extend_tenants_and_keys()
    _extend_people()
    _extend_prices()
    _extend_usage_events()
    _create_people()
    _create_sums()
    _create_billing()
    _create_outbox_and_audit()
    _fill_sums()


def downgrade() -> None:
    """Downgrade the schema."""
    for table in reversed(_NEW_TABLES):
        op.drop_table(table)
    op.execute("DELETE FROM usage_events WHERE kind = 'adjustment'")
    _drop_columns(
        "usage_events",
        ("cause", "rejected_tokens", *_shares_unless_needed(), "billing_day", "posting", "corrects_id", "note"),
        constraints=("uq_usage_events_posting", "fk_usage_events_corrects_id"),
        indexes=("ix_usage_events_tenant_id_billing_day",),
    )
    _keep_one_currency()
    with op.batch_alter_table("prices") as batch:
        batch.drop_constraint("uq_prices_model_currency_effective_from", type_="unique")
        batch.create_unique_constraint("uq_prices_model_effective_from", ["model", "effective_from"])
        for name in ("rejected_draft", "tier_percents"):
            batch.drop_column(name)
    _drop_columns("sessions", ("id", "method"), constraints=("uq_sessions_id",))
    op.execute("DELETE FROM sessions WHERE member_id IN (SELECT id FROM members WHERE role = 'member')")
    op.execute("DELETE FROM members WHERE role = 'member'")
    _drop_columns(
        "members",
        ("password_temporary", "totp_secret", "totp_confirmed_at", "totp_last_step", "oidc_issuer", "oidc_subject"),
        constraints=("uq_members_oidc_issuer_oidc_subject",),
    )
    _drop_columns("api_keys", ("model_limits", "limit_mode", "replaced_by"))
    _drop_columns("tenants", ("model_limits", "limit_mode", "cut_at_budget", "currency", "billing", "alert_percents"))


def _drop_columns(name: str, columns: Sequence[str], *, constraints: Sequence[str] = (), indexes: Sequence[str] = ()) -> None:
    with op.batch_alter_table(name) as batch:
        for index in indexes:
            batch.drop_index(index)
        for constraint in constraints:
            batch.drop_constraint(constraint, type_="foreignkey" if constraint.startswith("fk_") else "unique")
        for column in columns:
            batch.drop_column(column)


def _shares_unless_needed() -> tuple[str, ...]:
    """Return the column to drop, or none if an event was charged below the full price: it is then kept for the next upgrade."""
    discounted = sa.text("SELECT 1 FROM usage_events WHERE price_basis_points <> 10000 LIMIT 1")
    return () if op.get_bind().execute(discounted).first() else ("price_basis_points",)


def _keep_one_currency() -> None:
    """Rename the models of prices in additional currencies: the older schema has one price per model and time.

    Usage charged at them keeps its price; no new usage is charged at them.
    """
    connection = op.get_bind()
    rows = connection.execute(
        sa.text("SELECT id, model, effective_from FROM prices ORDER BY model, effective_from, created_at, id")
    ).all()
    seen: set[tuple[str, Any]] = set()
    for price_id, model, moment in rows:
        if (model, moment) in seen:
            connection.execute(
                sa.text(
                    "UPDATE prices SET model = substr(model, 1, 150) || ' (' || currency || ' ' || id || ')' WHERE id = :id"
                ),
                {"id": price_id},
            )
        seen.add((model, moment))


def _id(name: str = "id", *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.String(40), nullable=nullable)


def _text(name: str, chars: int, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.String(chars), nullable=nullable)


def _time(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.DateTime(timezone=True), nullable=nullable)


def _count(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=nullable)


def _json(name: str, *, nullable: bool = True) -> sa.Column[Any]:
    return sa.Column(name, sa.JSON(none_as_null=True), nullable=nullable)


def _mode() -> sa.Column[Any]:
    return sa.Column("limit_mode", sa.String(20), nullable=False, server_default="enforce")


def _sequence() -> sa.Column[Any]:
    return sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False)


def _limits() -> list[sa.Column[Any]]:
    names = ("tokens_per_minute", "requests_per_minute", "concurrent_requests", "tokens_per_day", "monthly_budget_micros")
    return [_count(name, nullable=True) for name in names]


def _primary(table: str, *columns: str) -> sa.PrimaryKeyConstraint:
    return sa.PrimaryKeyConstraint(*(columns or ("id",)), name=f"pk_{table}")


def _refers(table: str, column: str, target: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([column], [f"{target}.id"], name=f"fk_{table}_{column}")


def _extend_tenants_and_keys() -> None:
    for column in (
        _json("model_limits"),
        _mode(),
        sa.Column("cut_at_budget", sa.Boolean(), nullable=False, server_default=sa.false()),
        _text("currency", 3, nullable=True),
        _json("billing"),
        _json("alert_percents"),
    ):
        op.add_column("tenants", column)
    for column in (_json("model_limits"), _mode(), _id("replaced_by", nullable=True)):
        op.add_column("api_keys", column)


def _extend_people() -> None:
    with op.batch_alter_table("members") as table:
        table.add_column(sa.Column("password_temporary", sa.Boolean, nullable=False, server_default=sa.false()))
        table.add_column(_text("totp_secret", 400, nullable=True))
        table.add_column(_time("totp_confirmed_at", nullable=True))
        table.add_column(_count("totp_last_step", nullable=True))
        table.add_column(_text("oidc_issuer", 400, nullable=True))
        table.add_column(_text("oidc_subject", 400, nullable=True))
        table.create_unique_constraint("uq_members_oidc_issuer_oidc_subject", ["oidc_issuer", "oidc_subject"])
    op.add_column("sessions", _id(nullable=True))
    op.add_column("sessions", sa.Column("method", sa.String(20), nullable=False, server_default="password"))
    op.execute("UPDATE sessions SET id = 'ses_' || substr(token_hash, 1, 26)")
    with op.batch_alter_table("sessions") as table:
        table.alter_column("id", existing_type=sa.String(40), nullable=False)
        table.create_unique_constraint("uq_sessions_id", ["id"])


def _extend_prices() -> None:
    with op.batch_alter_table("prices") as table:
        table.add_column(sa.Column("rejected_draft", sa.BigInteger(), nullable=False, server_default="0"))
        table.add_column(_json("tier_percents"))
        table.drop_constraint("uq_prices_model_effective_from", type_="unique")
        table.create_unique_constraint("uq_prices_model_currency_effective_from", ["model", "currency", "effective_from"])


def _extend_usage_events() -> None:
    there = {column["name"] for column in sa.inspect(op.get_bind()).get_columns("usage_events")}
    for column in (
        _text("cause", 40, nullable=True),
        sa.Column("rejected_tokens", sa.BigInteger(), nullable=False, server_default="0"),
        sa.Column("price_basis_points", sa.Integer(), nullable=False, server_default="10000"),
        sa.Column("billing_day", sa.Date(), nullable=True),
        _count("posting", nullable=True),
        sa.Column("corrects_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        _text("note", 500, nullable=True),
    ):
        if column.name not in there:
            op.add_column("usage_events", column)
    day = "date(admitted_at)" if _is_sqlite() else "(admitted_at AT TIME ZONE 'UTC')::date"
    op.execute(f"UPDATE usage_events SET billing_day = {day}")  # noqa: S608 - our own text
    op.execute(
        "UPDATE usage_events SET posting = ranked.place FROM (SELECT id, row_number() OVER (ORDER BY id) AS place "
        "FROM usage_events WHERE status <> 'pending') AS ranked WHERE ranked.id = usage_events.id"
    )
    with op.batch_alter_table("usage_events") as table:
        table.alter_column("billing_day", existing_type=sa.Date(), nullable=False)
        table.create_unique_constraint("uq_usage_events_posting", ["posting"])
        table.create_foreign_key("fk_usage_events_corrects_id", "usage_events", ["corrects_id"], ["id"])
        table.create_index("ix_usage_events_tenant_id_billing_day", ["tenant_id", "billing_day"])


def _create_people() -> None:
    wait = sa.Column("admission_wait_ms", sa.Integer(), nullable=False)
    op.create_table("tiers", _text("name", 20), wait, _time("updated_at"), _primary("tiers", "name"))
    op.create_table(
        "model_policies", _text("model", 200), *_limits(), _mode(), _time("updated_at"), _primary("model_policies", "model")
    )
    op.create_table(
        "memberships",
        _id("member_id"),
        _id("tenant_id"),
        _text("role", 20),
        _time("created_at"),
        _refers("memberships", "member_id", "members"),
        _refers("memberships", "tenant_id", "tenants"),
        _primary("memberships", "member_id", "tenant_id"),
    )
    op.create_index("ix_memberships_tenant_id", "memberships", ["tenant_id"])
    op.create_table(
        "recovery_codes",
        _id("member_id"),
        _text("digest", 64),
        _time("used_at", nullable=True),
        _refers("recovery_codes", "member_id", "members"),
        _primary("recovery_codes", "member_id", "digest"),
    )


def _create_sums() -> None:
    op.create_table("counters", _text("name", 80), _count("value"), _primary("counters", "name"))
    keys = ("bucket", "start_at", "tenant_id", "key_id", "model", "currency")
    counts = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "rejected_tokens", "cost_high", "cost_low")
    op.create_table(
        "usage_rollups",
        _text("bucket", 10),
        _time("start_at"),
        _id("tenant_id"),
        _id("key_id"),
        _text("model", 200),
        _text("currency", 3),
        *(_count(name) for name in counts),
        _primary("usage_rollups", *keys),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "limit_levels",
        _id("owner"),
        _text("model", 200),
        _text("kind", 20),
        _count("capacity"),
        _text("level_units", 40),
        _time("saved_at"),
        _primary("limit_levels", "owner", "model", "kind"),
    )


def _create_billing() -> None:
    op.create_table(
        "box_records", _text("name", 40), _json("value", nullable=False), _time("updated_at"), _primary("box_records", "name")
    )
    op.create_table(
        "free_allowances",
        _id(),
        _id("tenant_id"),
        _text("first_month", 7),
        _count("monthly_micros"),
        _time("created_at"),
        sa.UniqueConstraint("tenant_id", "first_month", name="uq_free_allowances_tenant_id_first_month"),
        _refers("free_allowances", "tenant_id", "tenants"),
        _primary("free_allowances"),
    )
    op.create_table(
        "invoices",
        _id(),
        _id("tenant_id"),
        _text("month", 7),
        _text("number", 40, nullable=True),
        _text("state", 20),
        _text("currency", 3),
        _count("total_micros"),
        _count("tax_micros"),
        _count("through_posting", nullable=True),
        _json("seller"),
        _json("buyer"),
        _time("created_at"),
        _time("closed_at", nullable=True),
        sa.UniqueConstraint("number", name="uq_invoices_number"),
        sa.UniqueConstraint("tenant_id", "month", name="uq_invoices_tenant_id_month"),
        _refers("invoices", "tenant_id", "tenants"),
        _primary("invoices"),
    )
    op.create_table(
        "invoice_lines",
        _id("invoice_id"),
        sa.Column("position", sa.Integer(), nullable=False),
        _text("model", 200, nullable=True),
        _text("kind", 20),
        _text("month", 7),
        _count("unit_price", nullable=True),
        _count("tokens"),
        _count("requests"),
        _text("exact_picos", 60),
        _count("rounded_micros"),
        _refers("invoice_lines", "invoice_id", "invoices"),
        _primary("invoice_lines", "invoice_id", "position"),
    )


def _create_outbox_and_audit() -> None:
    op.create_table(
        "webhooks",
        _id(),
        _id("tenant_id", nullable=True),
        _text("kind", 20),
        _text("target", 2000),
        _text("secret", 400, nullable=True),
        _text("previous_secret", 400, nullable=True),
        _time("previous_secret_until", nullable=True),
        _json("events", nullable=False),
        _time("disabled_at", nullable=True),
        _time("removed_at", nullable=True),
        _time("created_at"),
        _refers("webhooks", "tenant_id", "tenants"),
        _primary("webhooks"),
    )
    op.create_table(
        "outbox",
        _id(),
        _id("webhook_id"),
        _text("dedupe_key", 200),
        _text("event", 60),
        _json("payload", nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        _time("next_attempt_at", nullable=True),
        _time("claimed_at", nullable=True),
        _time("delivered_at", nullable=True),
        _text("last_error", 500, nullable=True),
        _time("created_at"),
        sa.UniqueConstraint("dedupe_key", name="uq_outbox_dedupe_key"),
        _refers("outbox", "webhook_id", "webhooks"),
        _primary("outbox"),
    )
    op.create_index("ix_outbox_next_attempt_at", "outbox", ["next_attempt_at"])
    op.create_index("ix_outbox_webhook_id_id", "outbox", ["webhook_id", "id"])
    op.create_table(
        "audit_log",
        _sequence(),
        _time("at"),
        _text("actor_kind", 20),
        _id("actor_id", nullable=True),
        _text("actor_name", 320),
        _text("action", 60),
        _text("target_kind", 40),
        _text("target_id", 200),
        _id("tenant_id", nullable=True),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        _id("request_id", nullable=True),
        _text("address", 64, nullable=True),
        _text("previous_hash", 64),
        _text("hash", 64),
        sa.UniqueConstraint("hash", name="uq_audit_log_hash"),
        _primary("audit_log"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_log_tenant_id_id", "audit_log", ["tenant_id", "id"])
    op.create_table(
        "audit_head",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        _count("entries"),
        _text("hash", 64),
        _primary("audit_head"),
    )


def _fill_sums() -> None:
    """Set the posting counter and add up the usage settled so far, by minute, hour and day in UTC."""
    op.execute("INSERT INTO counters (name, value) SELECT 'posting', coalesce(max(posting), 0) FROM usage_events")
    for bucket, chars in (("minute", 16), ("hour", 13), ("day", 10)):
        if _is_sqlite():
            rest = "0000-01-01 00:00:00.000000"[chars:].replace(":", r"\:")  # an unescaped colon would begin a parameter
            start = f"substr(admitted_at, 1, {chars}) || '{rest}'"
        else:
            start = f"date_trunc('{bucket}', admitted_at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'"
        op.execute(
            "INSERT INTO usage_rollups (bucket, start_at, tenant_id, key_id, model, currency, requests, prompt_tokens, "  # noqa: S608
            "cached_tokens, completion_tokens, rejected_tokens, cost_high, cost_low) "
            f"SELECT '{bucket}', {start}, tenant_id, key_id, model, currency, sum(CASE kind WHEN 'usage' THEN 1 ELSE 0 END), "
            "sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(rejected_tokens), "
            "sum(cost_picos / 1000000000), sum(cost_picos % 1000000000) FROM usage_events "
            "WHERE status IN ('posted', 'recovered') GROUP BY 2, 3, 4, 5, 6"
        )


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"
