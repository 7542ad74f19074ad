"""Tables of billing: invoices, allowances, alerts, and the audit log."""

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

# Appliance-wide records that change at run time: `seller` (the issuer of invoices) and `hardware` (the cost of the hardware).
appliance_records = Table(
    "appliance_records",
    metadata,
    Column("name", String(40), primary_key=True),
    Column("value", JSON(none_as_null=True), nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
)

# A tenant's free monthly amount, valid from `first_month` until a later row replaces it.
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

# A draft is computed on demand; a closed invoice is immutable and stored completely. It covers the events of its month with
# `posting <= through_posting`, and events of earlier months that were posted after those were closed.
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
# costs are stored as decimal text: they may exceed 64 bits, and text is never rounded. `reasons`: of an adjustment, the notes
# of its corrections, {"texts": [...], "left_out": number of others}; NULL without corrections.
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
    optional_json("reasons"),
)

# Targets of alerts. `tenant_id` NULL receives alerts of every tenant. Secrets are sealed; after a rotation the previous secret
# also signs until `previous_secret_until`. Rows are kept after removal, so that past deliveries stay readable.
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

# Transactional outbox of alerts: written with the change that causes them, never removed, delivered at least once. `dedupe_key`
# prevents a second alert for the same cause. During an attempt `claimed_at` is its start and `next_attempt_at` the earliest
# start of another one. Both NULL and not delivered: abandoned.
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

# Append-only hash chain: `hash` covers the row and `previous_hash`. `before` and `after` contain no secrets; they are canonical
# JSON stored as text, so that the stored bytes are those hashed. Triggers refuse UPDATE and DELETE.
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

# One row: the number of entries and the hash of the last one. Appending locks it, so that the chain cannot fork. It reveals a
# truncated log, which has fewer entries.
audit_head = Table(
    "audit_head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("entries", BigInteger, nullable=False),
    Column("hash", String(64), nullable=False),
)
