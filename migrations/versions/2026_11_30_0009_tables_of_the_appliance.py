"""Tables of the whole appliance are named after it.

Entries of the audit log keep the kind `box` of their targets: it is a part of the text that their hashes cover.
"""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"

_NEW_NAMES = {"box_records": "appliance_records", "usage_box_rollups": "usage_appliance_rollups"}


def upgrade() -> None:
    """Upgrade the schema. In place on both databases."""
    for old, new in _NEW_NAMES.items():
        _rename(old, new)


def downgrade() -> None:
    """Downgrade the schema."""
    for old, new in _NEW_NAMES.items():
        _rename(new, old)


def _rename(old: str, new: str) -> None:
    """Rename a table and the constraint of its primary key. SQLite cannot rename a constraint, and reads its name nowhere."""
    op.rename_table(old, new)
    if op.get_bind().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE {new} RENAME CONSTRAINT pk_{old} TO pk_{new}")
