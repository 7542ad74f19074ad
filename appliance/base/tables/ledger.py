"""Tables of the ledger: prices, epochs, usage events and their sums, and the history of requests."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Date,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    UniqueConstraint,
    false,
    text,
)

from appliance.base.tables.columns import Sequence, UtcDateTime, metadata, optional_json, sum_columns

# Never changed, and never removed once in force. `tier_percents` maps a tier to the percentage of the price that it pays,
# 100 for tiers not listed. `rejected_draft` is the price of speculative tokens that were computed and discarded.
prices = Table(
    "prices",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("model", String(200), nullable=False),
    Column("effective_from", UtcDateTime, nullable=False),
    Column("currency", String(3), nullable=False),
    Column("prompt", BigInteger, nullable=False),
    Column("cached_prompt", BigInteger, nullable=False),
    Column("completion", BigInteger, nullable=False),
    Column("rejected_draft", BigInteger, nullable=False, server_default="0"),
    Column("batch_percent", Integer, nullable=False),
    optional_json("tier_percents"),
    Column("created_at", UtcDateTime, nullable=False),
    UniqueConstraint("model", "currency", "effective_from"),
)

# One row per start of the gateway. A pending event of any epoch but the current one belongs to a dead process. An epoch ends
# with an orderly shutdown or when the next one begins; from then on it can write no new events.
epochs = Table(
    "epochs",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("version", String(40), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at", UtcDateTime, nullable=False),
    Column("ended_at", UtcDateTime, nullable=True),
)

# Gapless counters: a number is taken inside the transaction that uses it, which locks the row until it ends.
counters = Table(
    "counters",
    metadata,
    Column("name", String(80), primary_key=True),
    Column("value", BigInteger, nullable=False),
)

# pending -> posted | voided | recovered, once, by a conditional UPDATE on status. Money columns change only in that update;
# while pending, the token columns are checkpoints of the engine's counts so far.
#   posting            order in which events reached their final state, from 1 without gaps; NULL while pending
#   billing_day        day of admission in the billing time zone, which decides the month of the invoice
#   batch              requested with service tier flex: batch priority and batch price
#   price_basis_points fraction of the price that is charged, by tier and batch; 10000 is the full price
#   rejected_tokens    speculative tokens that were computed and discarded
#   cause              why it ended early, where finish_reason is not specific enough
#   corrects_id        of an adjustment: the corrected event; an adjustment has signed counts and cost
#   idempotency_key    of an adjustment: the key of the request for it, unique for the corrected event; NULL if none was sent
usage_events = Table(
    "usage_events",
    metadata,
    Column("id", Sequence, primary_key=True, autoincrement=True),
    Column("request_id", String(40), nullable=False),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("key_id", ForeignKey("api_keys.id"), nullable=False),
    Column("epoch_id", ForeignKey("epochs.id"), nullable=False),
    Column("model", String(200), nullable=False),
    Column("endpoint", String(80), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("status", String(20), nullable=False),
    Column("finish_reason", String(20), nullable=True),
    Column("cause", String(40), nullable=True),
    Column("reserved_tokens", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("rejected_tokens", BigInteger, nullable=False, server_default="0"),
    Column("estimated", Boolean, nullable=False),
    Column("batch", Boolean, nullable=False, server_default=false()),
    Column("price_id", ForeignKey("prices.id"), nullable=True),
    Column("price_basis_points", Integer, nullable=False, server_default="10000"),
    Column("cost_picos", BigInteger, nullable=False),
    Column("currency", String(3), nullable=False),
    Column("billing_day", Date, nullable=False),
    Column("posting", BigInteger, nullable=True, unique=True),
    Column("corrects_id", ForeignKey("usage_events.id"), nullable=True),
    Column("note", String(500), nullable=True),
    Column("idempotency_key", String(255), nullable=True),
    Column("admitted_at", UtcDateTime, nullable=False),
    Column("settled_at", UtcDateTime, nullable=True),
    Index(
        "uq_usage_events_request_id",
        "request_id",
        unique=True,
        sqlite_where=text("kind = 'usage'"),
        postgresql_where=text("kind = 'usage'"),
    ),
    Index("ix_usage_events_tenant_id_admitted_at", "tenant_id", "admitted_at"),
    Index("ix_usage_events_key_id_admitted_at", "key_id", "admitted_at"),
    Index("ix_usage_events_tenant_id_billing_day", "tenant_id", "billing_day"),
    Index("ix_usage_events_admitted_at", "admitted_at"),
    # For a tenant's invoice: events of closed months that were posted after the close.
    Index(
        "ix_usage_events_tenant_id_posting",
        "tenant_id",
        "posting",
        "billing_day",
        sqlite_where=text("posting IS NOT NULL"),
        postgresql_where=text("posting IS NOT NULL"),
    ),
    Index(
        "ix_usage_events_pending",
        "epoch_id",
        sqlite_where=text("status = 'pending'"),
        postgresql_where=text("status = 'pending'"),
    ),
    # The corrections of a request; its usage event is in uq_usage_events_request_id.
    Index(
        "ix_usage_events_adjustments",
        "request_id",
        sqlite_where=text("kind = 'adjustment'"),
        postgresql_where=text("kind = 'adjustment'"),
    ),
    sqlite_autoincrement=True,
)

# Sums of billed events, updated in the transaction that settles them; they can be rebuilt from the events. `bucket` is
# minute, hour or day (in the billing time zone); `start_at` is its start in UTC.
usage_rollups = Table(
    "usage_rollups",
    metadata,
    Column("bucket", String(10), primary_key=True),
    Column("start_at", UtcDateTime, primary_key=True),
    Column("tenant_id", String(40), primary_key=True),
    Column("key_id", String(40), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("currency", String(3), primary_key=True),
    *sum_columns(),
    # For reports on one tenant or key: in the primary key's order its rows lie between those of all others.
    Index("ix_usage_rollups_tenant_id_bucket_start_at_key_id", "tenant_id", "bucket", "start_at", "key_id"),
    sqlite_with_rowid=False,  # clustered by primary key: a report reads adjacent rows
)

# usage_rollups added up over tenants and keys, and updated with it: a busy hour has hundreds of rows there, but only one per
# model here.
usage_appliance_rollups = Table(
    "usage_appliance_rollups",
    metadata,
    Column("bucket", String(10), primary_key=True),
    Column("start_at", UtcDateTime, primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("currency", String(3), primary_key=True),
    *sum_columns(),
    sqlite_with_rowid=False,
)

# Levels of the limits' token buckets, so that they survive a restart. `owner` is the id of a tenant or key, or `model`; `model`
# is empty for limits across all models. Levels are in the bucket's own units (1/60 000 000 token).
limit_levels = Table(
    "limit_levels",
    metadata,
    Column("owner", String(40), primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("kind", String(20), primary_key=True),
    Column("capacity", BigInteger, nullable=False),
    Column("level_units", String(40), nullable=False),
    Column("saved_at", UtcDateTime, nullable=False),
)

# Past requests as shown in the console. May be pruned: billing does not use it.
requests = Table(
    "requests",
    metadata,
    Column("id", String(40), primary_key=True),
    Column("tenant_id", ForeignKey("tenants.id"), nullable=False),
    Column("key_id", ForeignKey("api_keys.id"), nullable=False),
    Column("model", String(200), nullable=False),
    Column("endpoint", String(80), nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("batch", Boolean, nullable=False, server_default=false()),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("kv_blocks", Integer, nullable=False),
    Column("preemptions", Integer, nullable=False),
    Column("tenant_open", Integer, nullable=True),
    Column("awaited_limit", String(40), nullable=True),
    Column("batch_size_mean", Float, nullable=True),
    Column("finish_reason", String(20), nullable=True),
    Column("error", String(500), nullable=True),
    Column("admission_wait_us", BigInteger, nullable=True),
    Column("queue_us", BigInteger, nullable=True),
    Column("ttft_us", BigInteger, nullable=True),
    Column("inter_token_p50_us", BigInteger, nullable=True),
    Column("decode_us", BigInteger, nullable=True),
    Column("admitted_at", UtcDateTime, nullable=False),
    Column("first_token_at", UtcDateTime, nullable=True),
    Column("finished_at", UtcDateTime, nullable=True),
    Index("ix_requests_admitted_at", "admitted_at"),
    Index("ix_requests_tenant_id_admitted_at", "tenant_id", "admitted_at"),
    # For rarely used models: a page of a common model is filled by the newest requests anyway.
    Index("ix_requests_model_admitted_at", "model", "admitted_at"),
)
