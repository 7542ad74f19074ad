"""Protects immutable rows on SQLite from OR REPLACE, which removes rows without calling DELETE triggers.

PostgreSQL has no OR REPLACE, so there is nothing to do.
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"

# By table: the condition under which the row `kept` is immutable, and its unique keys; a new row must not reuse
# these nor its rowid.
_IN_CLOSED_INVOICE = "EXISTS (SELECT 1 FROM invoices WHERE id = kept.invoice_id AND state = 'closed')"
_MONTH_CLOSED = (
    "EXISTS (SELECT 1 FROM invoices WHERE tenant_id = kept.tenant_id AND month >= kept.first_month AND state = 'closed')"
)
_BEGUN = "kept.effective_from <= strftime('%Y-%m-%d %H:%M:%f', 'now')"
_KEPT = {
    "audit_log": ("1 = 1", ["kept.hash = NEW.hash"]),
    "usage_events": (
        "1 = 1",
        [
            "kept.posting = NEW.posting",
            "kept.request_id = NEW.request_id AND kept.kind = 'usage' AND NEW.kind = 'usage'",
        ],
    ),
    "invoices": (
        "kept.state = 'closed'",
        ["kept.id = NEW.id", "kept.number = NEW.number", "kept.tenant_id = NEW.tenant_id AND kept.month = NEW.month"],
    ),
    "invoice_lines": (_IN_CLOSED_INVOICE, ["kept.invoice_id = NEW.invoice_id AND kept.position = NEW.position"]),
    "prices": (
        _BEGUN,
        [
            "kept.id = NEW.id",
            "kept.model = NEW.model AND kept.currency = NEW.currency AND kept.effective_from = NEW.effective_from",
        ],
    ),
    "free_allowances": (
        _MONTH_CLOSED,
        ["kept.id = NEW.id", "kept.tenant_id = NEW.tenant_id AND kept.first_month = NEW.first_month"],
    ),
}


def upgrade() -> None:
    """Upgrade the schema."""
    if not _is_sqlite():
        return
    for table, (condition, keys) in _KEPT.items():
        for event, another in (("INSERT", "1 = 1"), ("UPDATE", "kept.rowid <> OLD.rowid")):
            taken = " OR ".join(
                f"EXISTS (SELECT 1 FROM {table} AS kept WHERE {key} AND {another} AND {condition})"  # noqa: S608 - our own names
                for key in ["kept.rowid = NEW.rowid", *keys]
            )
            op.execute(
                f"CREATE TRIGGER {table}_no_{event.lower()}_over BEFORE {event} ON {table} WHEN {taken} "
                f"BEGIN SELECT RAISE(ABORT, 'a row of {table} that was written for good stays as it is'); END"
            )


def downgrade() -> None:
    """Downgrade the schema."""
    if not _is_sqlite():
        return
    for table in _KEPT:
        for event in ("insert", "update"):
            op.execute(f"DROP TRIGGER {table}_no_{event}_over")


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"
