"""Immutable rows: triggers refuse to change or remove them, whichever program tries.

SQLite drops the triggers of a table that a later migration rebuilds (batch mode): such a migration must recreate them.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"

# By table: the condition under which the row `OLD` is immutable, in SQL for both databases.
_IN_CLOSED_INVOICE = "EXISTS (SELECT 1 FROM invoices WHERE id = OLD.invoice_id AND state = 'closed')"
_MONTH_CLOSED = (
    "EXISTS (SELECT 1 FROM invoices WHERE tenant_id = OLD.tenant_id AND month >= OLD.first_month AND state = 'closed')"
)
_STAYS_UNCHANGED = {
    "audit_log": "1 = 1",
    "usage_events": "OLD.status <> 'pending'",
    "invoices": "OLD.state = 'closed'",
    "invoice_lines": _IN_CLOSED_INVOICE,
    "prices": "1 = 1",
    "free_allowances": _MONTH_CLOSED,
}
_BEGUN = "OLD.effective_from <= {now}"  # a future price may be withdrawn, since nothing was charged at it


def upgrade() -> None:
    """Upgrade the schema."""
    for event, conditions in (("UPDATE", _STAYS_UNCHANGED), ("DELETE", _stays_there())):
        for table, condition in conditions.items():
            _refuse(event, table, condition)
    if not _is_sqlite():
        op.execute("CREATE FUNCTION refuse_truncate() RETURNS trigger LANGUAGE plpgsql AS " + _body("TRUE"))
        for table in _STAYS_UNCHANGED:
            op.execute(
                f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION refuse_truncate()"
            )


def downgrade() -> None:
    """Downgrade the schema."""
    for event in ("UPDATE", "DELETE"):
        for table in _STAYS_UNCHANGED:
            name = f"{table}_no_{event.lower()}"
            op.execute(f"DROP TRIGGER {name}" if _is_sqlite() else f"DROP FUNCTION {name} CASCADE")
    if not _is_sqlite():
        op.execute("DROP FUNCTION refuse_truncate CASCADE")


def _stays_there() -> dict[str, str]:
    now = "strftime('%Y-%m-%d %H:%M:%f', 'now')" if _is_sqlite() else "now()"
    return _STAYS_UNCHANGED | {"usage_events": "1 = 1", "prices": _BEGUN.format(now=now)}


def _refuse(event: str, table: str, condition: str) -> None:
    name = f"{table}_no_{event.lower()}"
    if _is_sqlite():
        op.execute(
            f"CREATE TRIGGER {name} BEFORE {event} ON {table} WHEN {condition} "
            f"BEGIN SELECT RAISE(ABORT, 'a row of {table} that was written for good stays as it is'); END"
        )
        return
    op.execute(f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS {_body(condition)}")
    # A condition without a subquery goes into WHEN, so that settling pending events does not call the function.
    when = "" if "SELECT" in condition else f"WHEN ({condition}) "
    op.execute(f"CREATE TRIGGER {name} BEFORE {event} ON {table} FOR EACH ROW {when}EXECUTE FUNCTION {name}()")


def _body(condition: str) -> str:
    """Return the body of a trigger function that refuses the change if `condition` is true."""
    return (
        f"$$ BEGIN IF {condition} THEN RAISE EXCEPTION 'a row of % that was written for good stays as it is', TG_TABLE_NAME "
        "USING ERRCODE = 'integrity_constraint_violation'; END IF; "
        "IF TG_OP = 'UPDATE' THEN RETURN NEW; END IF; RETURN OLD; END $$"
    )


def _is_sqlite() -> bool:
    return op.get_bind().dialect.name == "sqlite"
