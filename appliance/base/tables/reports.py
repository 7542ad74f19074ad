"""What stands in the database for reports alone: sums of the whole box, and ways into the tables of the ledger."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Index, String, Table, text

from appliance.base.tables.columns import UtcDateTime, metadata
from appliance.base.tables.ledger import requests, usage_events, usage_rollups

# The rows of usage_rollups added up over tenants and keys, and written with them: a busy hour has hundreds of those, and of
# these as many as models were used in it. The columns mean the same.
usage_box_rollups = Table(
    "usage_box_rollups",
    metadata,
    Column("bucket", String(10), primary_key=True),
    Column("start_at", UtcDateTime, primary_key=True),
    Column("model", String(200), primary_key=True),
    Column("currency", String(3), primary_key=True),
    Column("requests", BigInteger, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("rejected_tokens", BigInteger, nullable=False),
    Column("cost_high", BigInteger, nullable=False),
    Column("cost_low", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

# Of one tenant, or one key of it: the sums of all others lie between its own.
Index(
    "ix_usage_rollups_tenant_id_bucket_start_at_key_id",
    usage_rollups.c.tenant_id,
    usage_rollups.c.bucket,
    usage_rollups.c.start_at,
    usage_rollups.c.key_id,
)
# The corrections of a request; the request itself has an index of its own.
Index(
    "ix_usage_events_adjustments",
    usage_events.c.request_id,
    sqlite_where=text("kind = 'adjustment'"),
    postgresql_where=text("kind = 'adjustment'"),
)
# Of a model that few ask for: with a page full of a common one, the newest requests are enough.
Index("ix_requests_model_admitted_at", requests.c.model, requests.c.admitted_at)
