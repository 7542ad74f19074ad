"""Invoices, what is sent to the outside, and who changed what."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
)

from appliance.base.tables.columns import Sequence, UtcDateTime, metadata, optional_json

# What belongs to the box and is changed at run time: `seller` (who writes the invoices), `hardware` (what the box costs).
box_records = Table(
    "box_records",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("value", JSON(none_as_null=True), nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# Money that a tenant need not pay each month, from `first_month` on until a later row takes its place.
free_allowances = Table(
    "free_allowances",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("first_month", String(7), nullable=False),
    Column("monthly_micros", BigInteger, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("tenant_id", "first_month"),
)

# A draft is computed when it is asked for; a closed one never changes: all that it says is stored. It covers the events of its
# month with `posting <= through_posting`, and of earlier months what came after they were closed.
invoices = Table(
    "invoices",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("month", String(7), nullable=False),
    Column("number", String(40), nullable=True, unique=True),
    Column("state", String(20), nullable=False),
    Column("currency", String(3), nullable=False),
    Column("total_micros", BigInteger, nullable=False),
    Column("tax_micros", BigInteger, nullable=False),
    Column("through_posting", BigInteger, nullable=True),
    optional_json("seller"),
    optional_json("buyer"),
    Column("created_at", UtcDateTime, nullable=False),
    Column("closed_at", UtcDateTime, nullable=True),
    UniqueConstraint("tenant_id", "month"),
)

# `kind`: prompt, cached_prompt, completion, rejected_draft, adjustment, free_allowance. `batch`: tokens of batch work. Exact
# costs are decimal texts: they may pass 64 bits, and no database rounds a text.
invoice_lines = Table(
    "invoice_lines",
    metadata,
    Column("invoice_id", ForeignKey("invoices.id"), primary_key=True),
    Column("position", Integer, primary_key=True),
    Column("model", String(200), nullable=True),
    Column("kind", String(20), nullable=False),
    Column("batch", Boolean, nullable=False, server_default=false()),
    Column("month", String(7), nullable=False),
    Column("unit_price", BigInteger, nullable=True),
    Column("tokens", BigInteger, nullable=False),
    Column("requests", BigInteger, nullable=False),
    Column("exact_picos", String(60), nullable=False),
    Column("rounded_micros", BigInteger, nullable=False),
)

# Where alerts go. `tenant_id` NULL hears of every tenant. Secrets are sealed; after a rotation the previous one signs as well
# until `previous_secret_until`. What was sent to a removed one stays readable.
webhooks = Table(
    "webhooks",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=True),
    Column("kind", String(20), nullable=False),
    Column("target", String(2000), nullable=False),
    Column("secret", String(400), nullable=True),
    Column("previous_secret", String(400), nullable=True),
    Column("previous_secret_until", UtcDateTime, nullable=True),
    Column("events", JSON(none_as_null=True), nullable=False),
    Column("disabled_at", UtcDateTime, nullable=True),
    Column("removed_at", UtcDateTime, nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
)

# Written in the transaction of what it tells of, removed never, delivered at least once. `dedupe_key` makes a second telling of
# the same thing impossible. While an attempt runs, `claimed_at` is when it began and `next_attempt_at` when another may begin;
# NULL in both and not delivered: given up.
outbox = Table(
    "outbox",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("webhook_id", ForeignKey("webhooks.id"), nullable=False),
    Column("dedupe_key", String(200), nullable=False, unique=True),
    Column("event", String(60), nullable=False),
    Column("payload", JSON(none_as_null=True), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("next_attempt_at", UtcDateTime, nullable=True),
    Column("claimed_at", UtcDateTime, nullable=True),
    Column("delivered_at", UtcDateTime, nullable=True),
    Column("last_error", String(500), nullable=True),
    Column("created_at", UtcDateTime, nullable=False),
    Index("ix_outbox_next_attempt_at", "next_attempt_at"),
    Index("ix_outbox_webhook_id_id", "webhook_id", "id"),
)

# Append-only and chained: `hash` is over the row and `previous_hash`. `before` and `after` hold no secrets; they are canonical
# JSON as text, so that what was hashed is what is stored. Triggers refuse UPDATE and DELETE.
audit_log = Table(
    "audit_log",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("at", UtcDateTime, nullable=False),
    Column("actor_kind", String(20), nullable=False),
    Column("actor_id", String(40), nullable=True),
    Column("actor_name", String(320), nullable=False),
    Column("action", String(60), nullable=False),
    Column("target_kind", String(40), nullable=False),
    Column("target_id", String(200), nullable=False),
    Column("tenant_id", String(40), nullable=True),
    Column("before", Text, nullable=True),
    Column("after", Text, nullable=True),
    Column("request_id", String(40), nullable=True),
    Column("address", String(64), nullable=True),
    Column("previous_hash", String(64), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
    Index("ix_audit_log_tenant_id_id", "tenant_id", "id"),
    sqlite_autoincrement=True,
)

# One row: how many entries the log has and the hash of the last. Whoever appends locks it, so that the chain cannot fork; a cut
# end shows because it says more.
audit_head = Table(
    "audit_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("entries", BigInteger, nullable=False),
    Column("hash", String(64), nullable=False),
)
